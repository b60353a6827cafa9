"""Results in OpenAI's shapes, and what we add to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from forerun.requests.result import Result
from forerun.sequence.logprobs import Alternative, TokenLogprob
from forerun.serve.streams import Decoding

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# What ended a text, in OpenAI's words. What a deadline or the server's end cut off is too short.
FINISH = {"stop": "stop", "length": "length", "error": "stop"}


def finish_reason(decoding: Decoding, result: Result) -> str:
    return FINISH.get(decoding.reason(result), "length")


def usage(results: Sequence[Sequence[Result]], predicted: bool = False) -> dict[str, Any]:
    """Tokens read and written. A prompt counts once, however many samples it has."""
    prompt = sum(group[0].stats.prompt_tokens for group in results if group)
    flat = [result for group in results for result in group]
    written = sum(result.stats.tokens for result in flat)
    told: dict[str, Any] = usage_so_far(prompt, written)
    details = {"reasoning_tokens": 0}
    if predicted:
        drafted = [event for result in flat for event in result.trace if event.drafted]
        details["accepted_prediction_tokens"] = sum(event.accepted for event in drafted)
        details["rejected_prediction_tokens"] = sum(len(event.rejected) for event in drafted)
    told["completion_tokens_details"] = details
    return told


def usage_so_far(prompt: int, written: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def about(decoding: Decoding, results: Sequence[Sequence[Result]], seed: Any) -> dict[str, Any]:
    """What every answer says under `forerun`."""
    flat = [result for group in results for result in group]
    asked = decoding.ask.extension
    queued = max(result.stats.queued_seconds for result in flat)
    told = {
        "method": flat[0].method,
        "draft": asked.draft,
        "options": asked.options,
        "deadline": asked.deadline,
        "priority": asked.priority,
        "guarantee": flat[0].guarantee,
        "reference": flat[0].reference,
        "seed": seed,
        **cost(flat),
        "sequences": len(decoding.sequences()),
        "queue_seconds": round(decoding.waited + queued, 6),
        "decode_seconds": round(max(result.stats.seconds for result in flat), 6),
        "finish_reasons": [decoding.reason(result) for result in flat],
    }
    if asked.trace:
        told["trace"] = f"/v1/traces/{decoding.id}"
    return told


def cost(results: Sequence[Result]) -> dict[str, Any]:
    """What some sequences took together."""
    tokens = sum(result.stats.tokens for result in results)
    forwards = sum(result.stats.forwards for result in results)
    drafts = [event for result in results for event in result.trace if event.drafted]
    drafted = sum(len(event.drafted) for event in drafts)
    accepted = sum(event.accepted for event in drafts)
    return {
        "forwards": forwards,
        "draft_forwards": sum(result.stats.draft_forwards for result in results),
        "tokens_per_forward": round(tokens / forwards, 4) if forwards else 0.0,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
    }


def chat_logprobs(tokenizer: Any, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities as chats have them."""
    return {
        "content": [
            {
                **_told(tokenizer, entry),
                "top_logprobs": [_told(tokenizer, other) for other in entry["top"]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _told(tokenizer: Any, entry: TokenLogprob | Alternative) -> dict[str, Any]:
    text = entry.get("text", "")
    raw = token_bytes(tokenizer, entry["token"], text)
    return {"token": text, "logprob": entry["logprob"], "bytes": raw}


def token_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """The bytes of a token; those of a part of a character are in its name."""
    if REPLACEMENT not in text:
        return list(text.encode())
    name = tokenizer.convert_ids_to_tokens(token) if tokenizer is not None else None
    if not isinstance(name, str):
        return None
    hexadecimal = BYTE_TOKEN.fullmatch(name)
    if hexadecimal:
        return [int(hexadecimal[1], 16)]
    alphabet = byte_alphabet()
    known = all(character in alphabet for character in name)
    return [alphabet[character] for character in name] if known else None


@lru_cache
def byte_alphabet() -> Mapping[str, int]:
    """The characters that byte-level tokenizers write bytes with (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


def token_name(tokenizer: Any, entry: TokenLogprob | Alternative) -> str:
    """A token's text; a part of a character by its bytes, so that no two have one name."""
    text = entry.get("text", "")
    raw = token_bytes(tokenizer, entry["token"], text)
    if REPLACEMENT in text and raw is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def completion_logprobs(
    tokenizer: Any, entries: Sequence[TokenLogprob | None], ids: Sequence[int], start: int = 0
) -> dict[str, Any]:
    """Log-probabilities as completions have them. An entry may be unknown, as the first token's of
    a prompt is: then only its name is told."""
    tokens: list[str] = []
    offsets = []
    at = start
    for entry, token in zip(entries, ids, strict=True):
        unknown: Alternative = {"token": token, "logprob": 0.0, "text": _text(tokenizer, token)}
        named = entry or unknown
        tokens.append(token_name(tokenizer, named))
        offsets.append(at)
        at += len(named.get("text", ""))
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] if entry else None for entry in entries],
        "top_logprobs": [_top(tokenizer, entry) for entry in entries],
        "text_offset": offsets,
    }


def _text(tokenizer: Any, token: int) -> str:
    return "" if tokenizer is None else str(tokenizer.decode([token]))


def _top(tokenizer: Any, entry: TokenLogprob | None) -> dict[str, float] | None:
    if entry is None:
        return None
    names = [(token_name(tokenizer, other), other["logprob"]) for other in entry["top"]]
    found: dict[str, float] = {}
    for name, logprob in names:
        found.setdefault(name, logprob)
    return found
