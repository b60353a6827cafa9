"""Fill holes in a function with names that are in scope there.

    python examples/names_in_scope.py [--model zoo:any-subset] [--free]

An editor knows which names a hole may hold; here `ast` finds them. They become the `choices` of
every hole. A hole without a length takes the lengths of its choices. With `--free` the model fills
three tokens per hole with what it likes.
"""

from __future__ import annotations

import argparse
import ast

import forerun

HOLE = "<|fill|>"
FUNCTIONS = [
    """def scale(values, factor):
    scaled = []
    for value in<|fill|>:
        scaled.append(value *<|fill|>)
    return<|fill|>
""",
    """def count_words(text, words):
    counts = {}
    for word in<|fill|>:
        counts[word] = text.count(<|fill|>)
    return<|fill|>
""",
]


def names_in_scope(function: str) -> list[str]:
    """The arguments and variables of a function with holes: any name may stand for a hole."""
    tree = ast.parse(function.replace(HOLE, " hole"))
    names = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return list(dict.fromkeys(names))


def holes_of(function: str) -> list[dict[str, list[str]]]:
    """What each hole may hold. Tokens hold the space before a word, and so do the holes, but for
    those behind a bracket."""
    names = names_in_scope(function)
    parts = function.split(HOLE)[:-1]
    spaces = ["" if part.endswith(("(", "[")) else " " for part in parts]
    return [{"choices": [space + name for name in names]} for space in spaces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="zoo:any-subset")
    parser.add_argument("--free", action="store_true", help="without the constraint")
    asked = parser.parse_args()
    model = forerun.load(asked.model)
    for function in FUNCTIONS:
        if asked.free:
            result = model.infill(function.replace(HOLE, "<|fill:3|>"))
        else:
            result = model.infill(function, holes=holes_of(function))
        print(result.text)


if __name__ == "__main__":
    main()
