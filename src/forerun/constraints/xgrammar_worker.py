"""Run as a script, in a process of its own: has xgrammar compile grammars, one line of JSON each.

xgrammar has no limits: a short expression may take minutes and all memory. So this process has
them, and is killed by its own alarm; the next grammar gets another one. Nothing of Forerun is
imported.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any


def limit_memory(megabytes: int) -> None:
    """Where the system knows how."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def compile_grammar(compiler: Any, asked: dict[str, Any]) -> Any:
    kind = asked["kind"]
    text = asked["text"]
    if kind == "json":
        whitespace = asked["whitespace"]
        return compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=whitespace)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "lark":
        return compiler.compile_lark(text)
    return compiler.compile_grammar(text)


def answer(compiler: Any, asked: dict[str, Any]) -> dict[str, str]:
    if hasattr(signal, "alarm"):
        signal.alarm(asked["seconds"])  # nobody handles it: the process ends, wherever it is
    try:
        return {"compiled": compile_grammar(compiler, asked).serialize_json()}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # of many kinds, from the library's C++
        return {"error": str(error)}
    finally:
        if hasattr(signal, "alarm"):
            signal.alarm(0)


def main() -> None:
    import xgrammar

    first = json.loads(sys.stdin.readline())
    info = xgrammar.TokenizerInfo.deserialize_json(first["tokenizer"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    limit_memory(first["megabytes"])
    for line in sys.stdin:
        print(json.dumps(answer(compiler, json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
