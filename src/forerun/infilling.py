"""Text with holes: how users write it, how it becomes canvases, and what comes back.

`<|fill:8|>` is a hole of eight tokens, `<|fill:4-12|>` one of four to twelve, whichever fits best. A marker that is meant literally
gets a backslash before it: `\\<|fill:8|>`; a backslash before a marker is itself doubled. Editors may send
`{"prefix": ..., "suffix": ..., "max_tokens": ...}` instead, which is taken as it is, markers and all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.arguments import Wish, check_text
from forerun.core import BLANK, AnySubset, Canvas, Canvases
from forerun.errors import BadOption, ForerunError, NotAble, unknown
from forerun.jobs import Job
from forerun.result import Result

if TYPE_CHECKING:
    from forerun.api import Model

MARKER = re.compile(r"(\\*)<\|fill(?::([^|>]*))?\|>")
SIZE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_LENGTHS = 64  # ways to size the holes of one text
EDITOR_LENGTHS = 16  # lengths tried between 1 and an editor's max_tokens, evenly spaced in their logarithm
NOT_HERE = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True)
class Template:
    """What is given and what is missing: `pieces` (text, or token ids) with a hole between each two."""

    pieces: Sequence[str | Sequence[int]]
    sizes: Sequence[Sequence[int]]  # for each hole the lengths it may have; none if the completion decides

    def lengths(self) -> list[tuple[int, ...]]:
        """All ways to size the holes."""
        if any(not sizes for sizes in self.sizes):
            raise BadOption("<|fill|> needs a length, as in <|fill:8|> or <|fill:4-12|>.")
        ways = int(np.prod([len(sizes) for sizes in self.sizes]))
        if ways > MOST_LENGTHS:
            raise BadOption(f"the holes can be sized in {ways} ways, and {MOST_LENGTHS} are the most: use narrower ranges.")
        return list(itertools.product(*self.sizes))


def parse(text: str) -> Template:
    """Text with markers."""
    pieces, sizes, piece, at = [], [], "", 0
    for found in MARKER.finditer(text):
        slashes, size = found[1], found[2]
        piece += text[at : found.start()] + "\\" * (len(slashes) // 2)
        at = found.end()
        if len(slashes) % 2:
            piece += text[found.start() + len(slashes) : found.end()]
            continue
        pieces.append(piece)
        sizes.append(_sizes(text[found.start() + len(slashes) : at], size))
        piece = ""
    pieces.append(piece + text[at:])
    if not sizes:
        raise BadOption(f"text={text[:60]!r} has no hole: mark one with <|fill:N|>, N tokens long.")
    return Template(pieces, sizes)


def _sizes(marker: str, size: str | None) -> list[int]:
    if size is None:
        return []
    numbers = SIZE.fullmatch(size)
    least, most = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
    if not 1 <= least <= most:
        raise BadOption(
            f"{marker} must be <|fill:N|> or <|fill:N-M|>, with 1 <= N <= M; a marker meant as text needs a \\ before it."
        )
    return list(range(least, most + 1))


def read(request: Any) -> Template:
    """A request in any of its forms."""
    if isinstance(request, str):
        return parse(request)
    if isinstance(request, dict):
        for key in request.keys() - {"prefix", "suffix", "max_tokens"}:
            raise unknown("key of a text with a hole", str(key), ("prefix", "suffix", "max_tokens"))
        if "max_tokens" not in request:
            raise BadOption("a text given as prefix and suffix needs max_tokens, the most that the hole may hold.")
        for key in ("prefix", "suffix"):
            if not isinstance(request.get(key, ""), str):
                raise BadOption(f"{key}={request[key]!r} must be text.")
        most = request["max_tokens"]
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise BadOption(f"max_tokens={most!r} must be a whole number, 1 or more.")
        sizes = np.unique(np.geomspace(1, most, EDITOR_LENGTHS).round().astype(int)).tolist()
        return Template([request.get("prefix", ""), request.get("suffix", "")], [sizes])
    raise BadOption(f"text={request!r} must be a text with holes, or an object with prefix, suffix and max_tokens.")


def of_ids(ids: Sequence[int | None]) -> Template:
    """Token ids, with None for every blank."""
    pieces: list[list[int]] = [[]]
    sizes: list[list[int]] = []
    for token in ids:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int | np.integer)):
            raise BadOption(f"token_ids has {token!r} in it: give whole numbers, and None where a token is missing.")
    for blank, run in itertools.groupby(ids, lambda token: token is None):
        if blank:
            sizes.append([len(list(run))])
            pieces.append([])
        else:
            pieces[-1] = [int(token) for token in run if token is not None]
    if not sizes:
        raise BadOption("token_ids has no blank: put None where a token is missing.")
    return Template(pieces, sizes)


def token_ids(model: Model, template: Template) -> list[list[int]]:
    """The ids of every piece, each tokenised on its own; what the tokenizer puts before any text comes before the first."""
    ids = []
    for index, piece in enumerate(template.pieces):
        own = encode(model, piece)
        if isinstance(piece, str) and index == 0:
            own = [*_opening(model.tokenizer), *own]
        bad = next((t for t in own if not 0 <= t < model.vocab), None)
        if bad is not None:
            raise BadOption(f"token id {bad} is not one of '{model.name}', whose ids run from 0 to {model.vocab - 1}.")
        ids.append(own)
    return ids


def encode(model: Model, piece: str | Sequence[int]) -> list[int]:
    """A text, or token ids, as token ids and nothing else."""
    if not isinstance(piece, str):
        return [int(token) for token in piece]
    if model.tokenizer is None:
        raise BadOption(f"'{model.name}' has no tokenizer: give token_ids, with None for every blank.")
    check_text(piece)
    return list(model.tokenizer(piece, add_special_tokens=False).input_ids) if piece else []


def _opening(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain, dressed = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    return dressed[: dressed.index(plain[0])]


def canvas_of(model: Model, ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """Pieces and holes in a row."""
    canvas = list(ids[0])
    for length, piece in zip(lengths, ids[1:], strict=True):
        canvas += [BLANK] * length + list(piece)
    if len(canvas) > model.context:
        raise BadOption(
            f"the text with its holes has {len(canvas)} tokens ({sum(lengths)} of them in holes), and the context of "
            f"'{model.name}' holds {model.context}: shorten it."
        )
    if model.family.needs_prompt and all(token == BLANK for token in canvas):
        raise BadOption(f"nothing is given around the holes, and '{model.name}' needs at least one token to look at.")
    return canvas


@dataclass(frozen=True)
class Infilled(Result):
    """A text whose holes are filled: `text` and `token_ids` are the whole of it."""

    fills: Sequence[str] = ()
    fill_ids: Sequence[Sequence[int]] = ()
    given: Sequence[str] = ()  # the text around the fills, one piece more than there are fills
    logprob: float | None = None  # joint log-probability of what was filled in, under the model's own law

    def as_dict(self) -> dict[str, Any]:
        own = {"fills": list(self.fills), "fill_ids": [list(ids) for ids in self.fill_ids], "logprob": self.logprob}
        return {**super().as_dict(), **own}


class Request:
    """One text with holes on its way: a job for each sizing of the holes and each sample."""

    def __init__(self, model: Model, wish: Wish, template: Template, small: Model | None):
        self.model, self.template, self.n = model, template, wish.sampling.n
        self.ids = token_ids(model, template)
        self.lengths = [lengths for lengths in template.lengths() for _ in range(self._samples(wish))]
        scored = replace(wish, sampling=replace(wish.sampling, logprobs=wish.sampling.logprobs or 0))
        self.shows_logprobs = wish.sampling.logprobs is not None
        self.jobs = [
            # The end of the text is where it is given: an end token inside a hole would say otherwise.
            Job(model, scored, canvas_of(model, self.ids, lengths), i, model.drafter(wish, small), forbidden=model.eos)
            for i, lengths in enumerate(self.lengths)
        ]
        if self.n > len(self.jobs):
            raise BadOption(f"n={self.n} at temperature 0: there is one best completion per length, so {len(self.jobs)} in all.")

    def _samples(self, wish: Wish) -> int:
        return wish.sampling.n if wish.sampling.temperature > 0 else 1

    def results(self) -> list[Infilled]:
        """The n best by joint density per token; in the order of their samples where all have the same length."""
        found = [self._infilled(job, lengths) for job, lengths in zip(self.jobs, self.lengths)]
        if len(set(self.lengths)) > 1:
            found.sort(key=lambda r: -(r.logprob if r.logprob is not None else -np.inf) / max(1, r.stats.tokens))
        return found[: self.n]

    def _infilled(self, job: Job, lengths: Sequence[int]) -> Infilled:
        result, canvas = job.result(), job.seq.canvas
        starts = np.cumsum([len(self.ids[0]), *(n + len(p) for n, p in zip(lengths, self.ids[1:]))])[:-1]
        fill_ids = [[int(t) for t in canvas[a : a + n] if t != BLANK] for a, n in zip(starts, lengths)]
        fills = [decode_after(self.model, canvas[:a], ids) for a, ids in zip(starts, fill_ids)]
        given = [p if isinstance(p, str) else self.model.decode(p) for p in self.template.pieces]
        whole = not job.seq.remaining and result.error is None
        fields = {**vars(result), "logprobs": result.logprobs if self.shows_logprobs else None}
        fields["text"] = "".join(itertools.chain.from_iterable(itertools.zip_longest(given, fills, fillvalue="")))
        fields["token_ids"] = [int(t) for t in canvas if t != BLANK]
        logprob = sum(entry["logprob"] for entry in result.logprobs or ()) if whole else None
        return Infilled(**fields, fills=fills, fill_ids=fill_ids, given=given, logprob=logprob)


def decode_after(model: Model, before: np.ndarray, ids: Sequence[int]) -> str:
    """The text of some tokens where they stand: tokenizers may drop a space at the very start."""
    if not len(before) or before[-1] == BLANK:
        return model.decode(ids)
    left = [int(before[-1])]
    alone, together = model.decode(left), model.decode([*left, *ids])
    return together[len(alone) :] if together.startswith(alone) else model.decode(ids)


def check_options(model: Model, options: dict[str, Any]) -> None:
    """Refuse a model that cannot infill, and options that mean nothing where every hole is filled to its end."""
    if not {AnySubset, Canvases} & {*model.family.answers}:
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') goes from left to right, by tokens or blocks, and cannot look "
            f"past a hole. Infilling needs an any-subset or masked model, such as 'zoo:any-subset'."
        )
    for name in NOT_HERE:
        if options.get(name):
            raise BadOption(f"{name} has no meaning for infilling: a hole says how long it is, and all of it is filled.")


def completion_ids(model: Model, template: Template, completion: Any) -> list[list[int]]:
    """What fills each hole, as ids, checked against the holes' lengths."""
    completion = completion.tolist() if hasattr(completion, "tolist") else completion
    if not isinstance(completion, str | list | tuple):
        raise BadOption(f"completion={completion!r} must be a text or token ids, or a list of these, one for each hole.")
    one = isinstance(completion, str) or (len(completion) > 0 and isinstance(completion[0], int | np.integer))
    parts = [completion] if one else [part.tolist() if hasattr(part, "tolist") else part for part in completion]
    if len(parts) != len(template.sizes):
        raise BadOption(f"completion has {len(parts)} parts, and the text has {len(template.sizes)} holes: give one for each.")
    ids = []
    for part, sizes in zip(parts, template.sizes):
        own = encode(model, part)
        if not own or (sizes and len(own) not in sizes):
            wanted = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}" if sizes else "at least 1"
            raise BadOption(f"completion {part!r} has {len(own)} tokens, and its hole has {wanted}: use <|fill|> for any length.")
        ids.append(own)
    return ids


def density(seq: Canvas, completion: Sequence[int]) -> float:
    """The sum of the log-probabilities of a completion, from the laws of its blanks that were just answered."""
    total = 0.0
    for position, token in zip(seq.blanks, completion, strict=True):
        logits_V, _ = seq.laws[0, int(position)]
        total += float(logits_V.double().log_softmax(-1)[token])
    return total


def failed(error: ForerunError, result: Result) -> Infilled:
    return Infilled(**{**vars(result), "error": error})
