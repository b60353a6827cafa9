"""Text with holes: how users write it, how it becomes canvases, and what comes back.

`<|fill:8|>` is a hole of eight tokens, `<|fill:4-12|>` one of four to twelve, whichever fits best.
A marker that is meant literally gets a backslash before it: `\\<|fill:8|>`; a backslash before a
marker is itself doubled. Editors may send `{"prefix": ..., "suffix": ..., "max_tokens": ...}`
instead, which is taken as it is, markers and all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.constraints.healing import TokenIndex, encode_inside, known_tokens
from forerun.constraints.holes import Hole
from forerun.constraints.parsing import parsed
from forerun.drafters.base import Drafter
from forerun.errors import BadOption, ForerunError, NotAble, unknown
from forerun.families.any_subset import SubsetScorer
from forerun.families.masked import CanvasFiller
from forerun.requests.healing import OpenHole, drops_first_space, open_holes
from forerun.requests.holes import fitting_sizes, hole_specs, said_sizes
from forerun.requests.jobs import Job, failed_result
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import Tokenised, as_list, check_text
from forerun.requests.request import DecodeRequest
from forerun.requests.result import Promise, Result
from forerun.requests.structure import check_no_engine, never_written
from forerun.sequence.canvas import BLANK, Canvas

MARKER = re.compile(r"(\\*)<\|fill(?::([^|>]*))?\|>")
SIZE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_LENGTHS = 64  # ways to size the holes of one text
EDITOR_LENGTHS = 16  # tried between 1 and an editor's max_tokens, evenly spaced in their logarithm
EDITOR_KEYS = ("prefix", "suffix", "max_tokens")
MEANINGLESS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")

Piece = str | Sequence[int]


@dataclass(frozen=True)
class Template:
    """What is given and what is missing: `pieces` (text, or token ids) with a hole between each
    two."""

    pieces: Sequence[Piece]
    # For each hole the lengths it may have; none if the completion decides.
    sizes: Sequence[Sequence[int]]

    def lengths(self) -> list[tuple[int, ...]]:
        """All ways to size the holes."""
        if any(not sizes for sizes in self.sizes):
            raise BadOption("<|fill|> needs a length, as in <|fill:8|> or <|fill:4-12|>.")
        ways = int(np.prod([len(sizes) for sizes in self.sizes]))
        if ways > MOST_LENGTHS:
            raise BadOption(
                f"the holes can be sized in {ways} ways, and {MOST_LENGTHS} are the most: use "
                f"narrower ranges."
            )
        return list(itertools.product(*self.sizes))


def parse_markers(text: str) -> Template:
    """Text with markers."""
    pieces: list[Piece] = []
    sizes = []
    piece = ""
    end = 0
    for found in MARKER.finditer(text):
        slashes = len(found[1])
        marker = text[found.start() + slashes : found.end()]
        piece += text[end : found.start()] + "\\" * (slashes // 2)
        end = found.end()
        if slashes % 2:  # meant literally
            piece += marker
            continue
        pieces.append(piece)
        sizes.append(_sizes(marker, found[2]))
        piece = ""
    pieces.append(piece + text[end:])
    if not sizes:
        raise BadOption(f"text={text[:60]!r} has no hole: mark one with <|fill:N|>, N tokens long.")
    return Template(pieces, sizes)


def _sizes(marker: str, size: str | None) -> list[int]:
    """The lengths that a marker allows; none where it names none."""
    if size is None:
        return []
    numbers = SIZE.fullmatch(size)
    least = int(numbers[1]) if numbers else 0
    most = int(numbers[2] or numbers[1]) if numbers else 0
    if not 1 <= least <= most:
        raise BadOption(
            f"{marker} must be <|fill:N|> or <|fill:N-M|>, with 1 <= N <= M; a marker meant as "
            f"text needs a \\ before it."
        )
    return list(range(least, most + 1))


def parse_text(request: Any) -> Template:
    """A text with holes in any of its forms."""
    if isinstance(request, str):
        return parse_markers(request)
    if isinstance(request, dict):
        return _parse_editor_request(request)
    raise BadOption(
        f"text={request!r} must be a text with holes, or an object with prefix, suffix and "
        f"max_tokens."
    )


def _parse_editor_request(request: Mapping[str, Any]) -> Template:
    for key in request.keys() - set(EDITOR_KEYS):
        raise unknown("key of a text with a hole", str(key), EDITOR_KEYS)
    if "max_tokens" not in request:
        raise BadOption(
            "a text given as prefix and suffix needs max_tokens, the most that the hole may hold."
        )
    for key in ("prefix", "suffix"):
        if not isinstance(request.get(key, ""), str):
            raise BadOption(f"{key}={request[key]!r} must be text.")
    most = request["max_tokens"]
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadOption(f"max_tokens={most!r} must be a whole number, 1 or more.")
    lengths = np.geomspace(1, most, EDITOR_LENGTHS).round().astype(int)
    pieces = [request.get("prefix", ""), request.get("suffix", "")]
    return Template(pieces, [np.unique(lengths).tolist()])


def parse_ids(ids: Any) -> Template:
    """Token ids, with None for every blank."""
    kind = Tokenised if isinstance(ids, Tokenised) else list
    pieces: list[list[int]] = [kind()]
    sizes: list[list[int]] = []
    for token in ids:
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if token is not None and not whole:
            raise BadOption(
                f"token_ids has {token!r} in it: give whole numbers, and None where a token is "
                f"missing."
            )
    for blank, run in itertools.groupby(ids, lambda token: token is None):
        if blank:
            sizes.append([len(list(run))])
            pieces.append(kind())
        else:
            pieces[-1] = kind(int(token) for token in run if token is not None)
    if not sizes:
        raise BadOption("token_ids has no blank: put None where a token is missing.")
    return Template(pieces, sizes)


@dataclass(frozen=True)
class TextsWithHoles:
    """What a caller gave, one or several, still to be parsed one by one: a bad one fails alone."""

    given: Sequence[Any]
    several: bool
    as_ids: bool

    def parse(self, one: Any) -> Template:
        return parse_ids(one) if self.as_ids else parse_text(one)


def read_texts(text: Any, token_ids: Any) -> TextsWithHoles:
    """Texts with holes, or token ids with None for every blank; one of them, or a list."""
    if (text is None) == (token_ids is None):
        raise BadOption("give either a text with holes or token_ids=, not both and not neither.")
    if token_ids is None:
        several = isinstance(text, list | tuple)
        return TextsWithHoles(list(text) if several else [text], several, as_ids=False)
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise BadOption(
            f"token_ids={token_ids!r} must be a list of token ids, with None where one is missing."
        )
    lists = [_as_list_of_ids(one) for one in token_ids]
    several = bool(lists) and isinstance(lists[0], list)
    return TextsWithHoles(lists if several else [lists], several, as_ids=True)


def _as_list_of_ids(one: Any) -> Any:
    plain = isinstance(one, Iterable) and not isinstance(one, str | Tokenised)
    return list(one) if plain else one


def piece_ids(model: DecodableModel, template: Template) -> list[list[int]]:
    """The ids of every piece, each tokenised on its own. What the tokenizer puts before any text
    comes before the first, and nothing before the others."""
    found = []
    for index, piece in enumerate(template.pieces):
        ids = encode(model, piece, inside=index > 0)
        if isinstance(piece, str) and index == 0:
            ids = Tokenised([*_opening_ids(model.tokenizer), *ids])
        for token in ids:
            if not 0 <= token < model.vocab:
                raise BadOption(
                    f"token id {token} is not one of '{model.name}', whose ids run from 0 to "
                    f"{model.vocab - 1}."
                )
        found.append(ids)
    return found


def encode(model: DecodableModel, piece: Piece, inside: bool = False) -> list[int]:
    """A text, or token ids, as token ids and nothing else. A text that stands `inside` another has
    no space put before it."""
    if isinstance(piece, Tokenised):
        return piece
    if not isinstance(piece, str):
        return [int(token) for token in piece]
    if model.tokenizer is None:
        raise BadOption(
            f"'{model.name}' has no tokenizer: give token_ids, with None for every blank."
        )
    check_text(piece)
    if not piece:
        return []
    if inside and model.vocabulary is not None:
        return Tokenised(encode_inside(model.vocabulary, piece))
    return Tokenised(model.tokenizer(piece, add_special_tokens=False).input_ids)


def _opening_ids(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    with_special = tokenizer("a").input_ids
    return with_special[: with_special.index(plain[0])]


def canvas_of(
    model: DecodableModel, pieces: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[int]:
    """Pieces and holes in a row."""
    canvas = list(pieces[0])
    for length, piece in zip(lengths, pieces[1:], strict=True):
        canvas += [BLANK] * length + list(piece)
    if len(canvas) > model.context:
        raise BadOption(
            f"the text with its holes has {len(canvas)} tokens ({sum(lengths)} of them in holes), "
            f"and the context of '{model.name}' holds {model.context}: shorten it."
        )
    if model.family.needs_prompt and all(token == BLANK for token in canvas):
        raise BadOption(
            f"nothing is given around the holes, and '{model.name}' needs at least one token to "
            f"look at."
        )
    return canvas


@dataclass(frozen=True)
class Infilled(Result):
    """A text whose holes are filled: `text` and `token_ids` are the whole of it."""

    fills: Sequence[str] = ()
    fill_ids: Sequence[Sequence[int]] = ()
    given: Sequence[str] = ()  # the text around the fills, one piece more than there are fills
    # The joint log-probability of what was filled in, under the model's own law.
    logprob: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            **super().as_dict(),
            "fills": list(self.fills),
            "fill_ids": [list(ids) for ids in self.fill_ids],
            "logprob": self.logprob,
        }


class Infilling:
    """One text with holes: a job for each sizing of the holes and each sample."""

    scoring = None

    def __init__(
        self,
        model: DecodableModel,
        request: DecodeRequest,
        template: Template,
        make_drafter: Callable[[], Drafter | None],
        holes: Any = None,
    ):
        self.model = model
        sampling = request.sampling
        self.n = sampling.n
        self.specs = hole_specs(len(template.sizes), sampling.constraint, holes)
        never = never_written(model, request, model.eos)
        sizes = fitting_sizes(model, template.sizes, self.specs, never)
        self.template = Template(template.pieces, sizes)
        self.pieces = piece_ids(model, template)
        samples = sampling.n if sampling.temperature > 0 else 1
        self.lengths = [lengths for lengths in self.template.lengths() for _ in range(samples)]
        self.shows_logprobs = sampling.logprobs is not None
        # The best length is chosen by log-probability, so they are always recorded.
        recorded = replace(sampling, logprobs=sampling.logprobs or 0)
        scored = replace(request, sampling=recorded)
        self.opened = [
            open_holes(model, sampling, self.pieces, self._holes(lengths))
            for lengths in self.lengths
        ]
        self.jobs = [
            # A hole ends where the given text goes on: an end token inside would say otherwise.
            Job(
                model,
                scored,
                canvas_of(model, self.pieces, lengths),
                make_drafter(),
                sample=i,
                forbidden=model.eos,
                holes=self._holes(lengths),
                opened=[hole for hole in opened if hole is not None],
            )
            for i, (lengths, opened) in enumerate(zip(self.lengths, self.opened))
        ]
        if self.n > len(self.jobs):
            raise BadOption(
                f"n={self.n} at temperature 0: there is one best completion per length, so "
                f"{len(self.jobs)} in all."
            )

    def results(self) -> list[Infilled]:
        """The n best by joint density per token; in the order of their samples where all have the
        same length."""
        found = [self._infilled(*one) for one in zip(self.jobs, self.lengths, self.opened)]
        if len(set(self.lengths)) > 1:
            rates = [_density_per_token(*one) for one in zip(found, self.jobs)]
            found = [found[i] for i in np.argsort(-np.array(rates), kind="stable")]
        return found[: self.n]

    def _holes(self, lengths: Sequence[int]) -> list[Hole]:
        """Where the holes are, and what they must hold."""
        sizes = [n + len(piece) for n, piece in zip(lengths, self.pieces[1:])]
        starts = np.cumsum([len(self.pieces[0]), *sizes])[:-1].tolist()
        parts = zip(starts, lengths, self.specs, strict=True)
        return [Hole(start, start + length, spec) for start, length, spec in parts]

    def _infilled(
        self, job: Job, lengths: Sequence[int], opened: Sequence[OpenHole | None]
    ) -> Infilled:
        result = job.result()
        # Before the borders stand, the text is what was given.
        canvas = job.seq.tokens.tolist() if job.begun else job.prompt
        fill_ids = []
        fills = []
        for hole, open_hole in zip(self._holes(lengths), opened):
            text, ids = self._fill(job, hole, open_hole)
            fill_ids.append(ids)
            fills.append(text)
        given = [p if isinstance(p, str) else self.model.decode(p) for p in self.template.pieces]
        parts = itertools.zip_longest(given, fills, fillvalue="")
        logprob = None
        if not job.seq.remaining and result.error is None:
            chosen = itertools.chain(result.logprobs or (), job.respelled)
            logprob = sum(entry["logprob"] for entry in chosen)
        fields = {
            **vars(result),
            "parsed": self._parsed(job, fills),
            "logprobs": result.logprobs if self.shows_logprobs else None,
            "text": "".join(itertools.chain.from_iterable(parts)),
            "token_ids": [token for token in canvas if token != BLANK],
        }
        return Infilled(**fields, fills=fills, fill_ids=fill_ids, given=given, logprob=logprob)

    def _fill(self, job: Job, hole: Hole, opened: OpenHole | None) -> tuple[str, list[int]]:
        """What a hole holds: its text, and the tokens that write it."""
        canvas = job.seq.tokens
        if opened is None:
            ids = [int(token) for token in canvas[hole.start : hole.end] if token != BLANK]
            return decode_after(self.model, canvas[: hole.start], ids), ids
        if not job.begun:
            return "", []
        said, ids = opened.fill(canvas)
        if opened.before is None and not writes(opened.tokens, canvas[: opened.start]):
            said = said.removeprefix(first_space(self.model))
        return said.decode(errors="replace"), ids

    def _parsed(self, job: Job, fills: Sequence[str]) -> list[Any] | None:
        """The values of what must be in the holes, if anything must."""
        if job.seq.remaining or job.ticket.error is not None or not any(self.specs):
            return None
        schema = job.request.sampling.schema
        pairs = zip(self.specs, fills, strict=True)
        return [fill if spec is None else parsed(spec, schema, fill) for spec, fill in pairs]


def _density_per_token(result: Infilled, job: Job) -> float:
    logprob = -np.inf if result.logprob is None else result.logprob
    return logprob / max(1, len(job.seq.output) + len(job.respelled))


def decode_after(model: DecodableModel, before: np.ndarray, ids: Sequence[int]) -> str:
    """The text of some tokens where they stand: tokenizers may drop a space at the very start."""
    index = None if model.vocabulary is None else known_tokens(model.vocabulary)
    if index is not None:
        said = b"".join(map(index.spelled, ids))
        if not writes(index, before):
            said = said.removeprefix(first_space(model))
        return said.decode(errors="replace")
    if not len(before) or before[-1] == BLANK:
        return model.decode(ids)
    left = [int(before[-1])]
    alone = model.decode(left)
    together = model.decode([*left, *ids])
    return together[len(alone) :] if together.startswith(alone) else model.decode(ids)


def first_space(model: DecodableModel) -> bytes:
    """What the tokenizer drops at the very beginning of a text."""
    return b" " if drops_first_space(model) else b""


def writes(index: TokenIndex, tokens: np.ndarray) -> bool:
    """Do some tokens write anything?"""
    return any(index.spelled(int(token)) for token in tokens)


def check_infill(model: DecodableModel, options: Mapping[str, Any]) -> None:
    """Refuse a model that cannot infill, and options that mean nothing where every hole is filled
    to its end."""
    if not (model.family.can(SubsetScorer) or model.family.can(CanvasFiller)):
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') goes from left to right, by tokens or "
            f"blocks, and cannot look past a hole. Infilling needs an any-subset or masked model, "
            f"such as 'zoo:any-subset'."
        )
    check_no_engine(options.get("grammar_engine"))
    for name in MEANINGLESS:
        if options.get(name):
            raise BadOption(
                f"{name} has no meaning for infilling: a hole says how long it is, and all of it "
                f"is filled."
            )


def completion_ids(model: DecodableModel, template: Template, completion: Any) -> list[list[int]]:
    """What fills each hole, as ids, checked against the holes' lengths."""
    completion = as_list(completion)
    if not isinstance(completion, str | list | tuple):
        raise BadOption(
            f"completion={completion!r} must be a text or token ids, or a list of these, one for "
            f"each hole."
        )
    is_ids = len(completion) > 0 and isinstance(completion[0], int | np.integer)
    parts = [completion] if isinstance(completion, str) or is_ids else map(as_list, completion)
    parts = list(parts)
    if len(parts) != len(template.sizes):
        raise BadOption(
            f"completion has {len(parts)} parts, and the text has {len(template.sizes)} holes: "
            f"give one for each."
        )
    found: list[list[int]] = []
    for part, sizes in zip(parts, template.sizes):
        ids = encode(model, part, inside=bool(found or template.pieces[0]))
        if not ids or (sizes and len(ids) not in sizes):
            raise BadOption(
                f"completion {part!r} has {len(ids)} tokens, and its hole has "
                f"{said_sizes(sizes)}: use <|fill|> for any length."
            )
        found.append(ids)
    return found


def joint_logprob(seq: Canvas, completion: Sequence[int]) -> float:
    """The sum of the log-probabilities of a completion, from the laws of its blanks that were just
    answered."""
    pairs = zip(seq.blanks, completion, strict=True)
    return sum(seq.logprobs.model_logprob(int(position), token) for position, token in pairs)


def failed_infilling(error: ForerunError, promise: Promise) -> Infilled:
    return Infilled(**vars(failed_result(error, promise)))
