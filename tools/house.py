"""How the house stands: `python tools/house.py` prints what a reviewer would count.

It counts over src/forerun: files at the top of the package, import circles (imports under
TYPE_CHECKING included), functions over 50 lines, functions with more than 6 parameters, `Any` in
signatures, lines over 100 characters. `--package` counts another tree, to compare.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "forerun"
LONGEST_FUNCTION = 50
MOST_PARAMETERS = 6
LONGEST_LINE = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports when it is loaded or type-checked."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named
            if not named <= known.keys():  # a name of the module itself, not only modules inside it
                found.add(node.module)
    return found & known.keys()


def circles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    known = modules(package)
    graph = {name: imports(file, known) - {name} for name, file in known.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def parameter_count(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([a for a in named if a.arg not in ("self", "cls")])


def mentions_any(function: Function) -> bool:
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    annotations = [a.annotation for a in every if a is not None] + [function.returns]
    names = [
        node
        for a in annotations
        if a is not None
        for node in ast.walk(a)
        if isinstance(node, ast.Name)
    ]
    return any(name.id == "Any" for name in names)


def count(package: Path = PACKAGE) -> dict[str, int]:
    files = list(modules(package).values())
    every = [function for file in files for function in functions(ast.parse(file.read_text()))]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return {
        "files at the top of the package": len(list(package.glob("*.py"))),
        "import circles": len(circles(package)),
        "modules in import circles": sum(len(group) for group in circles(package)),
        f"functions over {LONGEST_FUNCTION} lines": sum(
            (f.end_lineno or 0) - f.lineno + 1 > LONGEST_FUNCTION for f in every
        ),
        f"functions with over {MOST_PARAMETERS} parameters": sum(
            parameter_count(f) > MOST_PARAMETERS for f in every
        ),
        "functions with Any in their signature": sum(mentions_any(f) for f in every),
        "functions": len(every),
        f"lines over {LONGEST_LINE} characters": sum(len(line) > LONGEST_LINE for line in lines),
        "lines": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", type=Path, default=PACKAGE)
    parser.add_argument("--circles", action="store_true", help="name the modules of each circle")
    arguments = parser.parse_args()
    for name, number in count(arguments.package).items():
        print(f"{number:6} {name}")
    if arguments.circles:
        for group in circles(arguments.package):
            print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
