"""The API reference of the site, as a hook of mkdocs: one page per layer of the package, with the
docstrings of all its public modules. A new module needs no entry anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from layers import PACKAGE, layers, what_it_holds

# What users touch comes first; the rest follows the layers.
FIRST = ("api", "requests", "options", "errors", "registry")


def packages() -> list[str]:
    every = [name for layer in layers() for name in layer]
    return [*FIRST, *(name for name in every if name not in FIRST)]


def module_names(name: str) -> list[str]:
    """A package and all its modules, dotted."""
    if (PACKAGE / f"{name}.py").is_file():
        return [f"forerun.{name}"]
    files = sorted((PACKAGE / name).rglob("*.py"))
    dotted = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return sorted(path.removesuffix(".__init__") for path in dotted)


def page(name: str) -> str:
    return "\n\n".join(
        [
            f"# forerun.{name}",
            f"{what_it_holds(name)}.",
            *(f"::: {module}" for module in module_names(name)),
        ]
    )


def on_config(config: Any) -> Any:
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [
                {f"forerun.{name}": f"reference/{name}.md"} for name in packages()
            ]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name in packages():
        files.append(File.generated(config, f"reference/{name}.md", content=page(name)))
    return files
