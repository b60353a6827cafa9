"""Write the table of layers in docs/design.md from the contract in pyproject.toml, or --check it.

The contract says which layers there are, in which order; the docstring of each package says what it
holds.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from page_part import write_or_check

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
PAGE = ROOT / "docs" / "design.md"


def layers(project: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """The layers, top to bottom; several names where packages share one."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [c for c in contracts if c["type"] == "layers"]
    return [layer.replace("|", ":").replace(" ", "").split(":") for layer in contract["layers"]]


def what_it_holds(name: str, package: Path = PACKAGE) -> str:
    """The first sentence of the docstring of a package or module."""
    file = _file(name, package)
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise SystemExit(f"{file} has no docstring: say in one sentence what it holds.")
    first_paragraph = " ".join(text.split("\n\n")[0].split())
    return first_paragraph.split(". ")[0].rstrip(".")


def modules(name: str, package: Path = PACKAGE) -> str:
    """The modules and packages inside a package, as text."""
    folder = package / name
    found = [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
    found += [f"{file.parent.name}/" for file in folder.glob("*/__init__.py")]
    return ", ".join(f"`{module}`" for module in sorted(found))


def table() -> str:
    lines = ["| layer | what it holds | modules |", "|---|---|---|"]
    for layer in layers():
        for name in layer:
            is_package = (PACKAGE / name).is_dir()
            shown = f"`{name}/`" if is_package else f"`{name}.py`"
            inside = modules(name) if is_package else ""
            lines.append(f"| {shown} | {what_it_holds(name)} | {inside} |")
    return "\n".join(lines)


def _file(name: str, package: Path) -> Path:
    module = package / f"{name}.py"
    return module if module.is_file() else package / name / "__init__.py"


if __name__ == "__main__":
    write_or_check(PAGE, "layers", "tools/layers.py", table)
