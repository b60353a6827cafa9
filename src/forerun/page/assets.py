"""The files of the page, and a trace as one HTML file that plays anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
# The modules of a replay, each after those that it imports.
REPLAY = ("dom.js", "trace.js", "tokens.js", "player.js", "replay.js")
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


class Asset(NamedTuple):
    content: bytes
    media_type: str


@cache
def names() -> frozenset[str]:
    return frozenset(file.name for file in STATIC.iterdir() if file.suffix in TYPES)


def read(name: str) -> Asset | None:
    """A file of the page; None if there is none of this name."""
    if name not in names():
        return None
    file = STATIC / name
    return Asset(file.read_bytes(), TYPES[file.suffix])


def replay_html(lines: Sequence[Mapping[str, Any]], title: str = "Forerun replay") -> str:
    """Trace lines as one file: it loads nothing, and may run no script but its own."""
    style = (STATIC / "page.css").read_text(encoding="utf-8")
    script = bundle(REPLAY)
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
    policy += f"script-src {_hash(script)}"
    data = "\n".join(_harmless(json.dumps(line)) for line in lines)
    parts = {
        "POLICY": policy,
        "TITLE": _text(title),
        "STYLE": style,
        "DATA": data,
        "SCRIPT": script,
    }
    page = (STATIC / "replay.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], page)


def bundle(modules: Sequence[str]) -> str:
    """Modules as one script. Their top-level names differ, so they need no wrapping."""
    sources = [(STATIC / name).read_text(encoding="utf-8") for name in modules]
    return "\n".join(EXPORT.sub("", IMPORT.sub("", source)) for source in sources)


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _harmless(data: str) -> str:
    """JSON that cannot end the element it stands in."""
    return data.replace("<", "\\u003c")


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
