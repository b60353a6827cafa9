"""Run as a script, in a process of its own: a regular expression or a JSON schema from standard
input becomes an automaton over bytes on standard output.

A small expression may need billions of states, so time and memory are limited, and nothing of
Forerun is imported: the process starts at once.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import suppress
from typing import Any

import numpy as np

BYTES = 256


def compile_regex(regex: str, most_states: int) -> dict[str, Any]:
    """States from 0 on, the number of states where there is no way on.

    From a state where a text may end, outlines-core leaves out ways to states where it may not:
    `[0-9]+([.][0-9]+)?` would never see a point. So a zero byte is put behind the text, and a state
    is final if that byte completes the match. The byte itself is in no text.
    """
    from outlines_core import Index, Vocabulary

    # With a token for every byte the index of tokens is the automaton over bytes.
    vocabulary = Vocabulary(BYTES, {bytes([byte]): [byte] for byte in range(BYTES)})
    index = Index(rf"(?:{regex})\x00", vocabulary)
    transitions = index.get_transitions()
    first = index.get_initial_state()
    complete = index.get_final_states()
    names = sorted({first, *transitions} - complete)
    if len(names) > most_states:
        raise ValueError(f"it has {len(names)} states, and {most_states} are the most")
    number = {name: i for i, name in enumerate(names)}
    table_SB = np.full((len(names), BYTES), len(names), np.int32)
    final_S = np.zeros(len(names), bool)
    for name, state in number.items():
        for byte, after in transitions.get(name, {}).items():
            if byte == 0:
                final_S[state] = after in complete
            elif byte < BYTES and after in number:
                table_SB[state, byte] = number[after]
    return {"table": table_SB, "final": final_S, "start": np.array(number[first])}


def limit_memory(limit: int) -> None:
    """Where the system knows how."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    limit_memory(asked["megabytes"] << 20)
    regex = asked["text"]
    try:
        if asked["kind"] == "schema":
            from outlines_core.json_schema import build_regex_from_schema

            regex = build_regex_from_schema(regex, max_recursion_depth=asked["depth"])
        found = compile_regex(regex, asked["states"])
    except ImportError:
        sys.exit("import")
    except MemoryError:
        sys.exit("memory")
    except (ValueError, TypeError) as error:
        sys.exit(f"refused {error}")
    packed = io.BytesIO()
    np.savez(packed, **found)
    sys.stdout.buffer.write(packed.getvalue())


if __name__ == "__main__":
    main()
