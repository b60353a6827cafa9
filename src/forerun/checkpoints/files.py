"""Where the files of a checkpoint are: in a directory, or in a revision of a hub's repository."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import BadCheckpoint


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a directory or hub id, and a file in it if it is a GGUF."""

    name: str
    place: str
    gguf: str | None = None
    only_cached: bool = False  # the hub cannot be reached
    revision: str | None = None  # a branch, tag or commit of a hub's repository

    @property
    def arguments(self) -> dict[str, Any]:
        """What the library's `from_pretrained` takes. No code of a checkpoint ever runs: unless it
        is told so, the library asks on the terminal."""
        arguments: dict[str, Any] = {
            "pretrained_model_name_or_path": self.place,
            "trust_remote_code": False,
        }
        if self.gguf:
            arguments["gguf_file"] = self.gguf
        if self.only_cached:
            arguments["local_files_only"] = True
        if self.revision is not None:
            arguments["revision"] = self.revision
        return arguments


def path_of(source: Source, name: str) -> Path:
    """Where a file of a checkpoint is on this machine."""
    if Path(source.place).is_dir():
        return Path(source.place) / name
    from transformers.utils import cached_file

    with quiet():
        found = cached_file(
            source.place, name, local_files_only=source.only_cached, revision=source.revision
        )
    return Path(str(found))


def has_file(source: Source, name: str) -> bool:
    try:
        return path_of(source, name).is_file()
    except OSError:
        return False


def read_json(source: Source, name: str) -> dict[str, Any]:
    """A file of settings; empty where there is none."""
    if not has_file(source, name):
        return {}
    try:
        found = json.loads(path_of(source, name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(
            f"model={source.name!r}: {name} is not JSON: {first_line(error)}"
        ) from error
    if not isinstance(found, dict):
        raise BadCheckpoint(f"model={source.name!r}: {name} does not hold settings.")
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's own progress bars and advice."""
    from transformers.utils import logging as library_logging

    before = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        library_logging.set_verbosity(before)


def first_line(error: BaseException) -> str:
    """An error in one line, for ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
