"""Certification by enumeration: run a method once for every random outcome it could have, and add up the probabilities.

The engine, the method and its rules are the ones that run in production; only `sample` differs. No statistics: the law of whole
sequences comes out exact, and is compared with the reference's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun import core
from forerun.api import Model
from forerun.backbones.table import TableBackbone, digest
from forerun.errors import NotAble
from forerun.families.any_subset import AnySubset
from forerun.families.block import Block
from forerun.families.causal import Causal
from forerun.families.masked import Masked
from forerun.laws import total_variation
from forerun.noise import Noise, mix
from forerun.parameters import Sampling
from forerun.sampling import Chain, History, laws

if TYPE_CHECKING:
    from forerun import registry

Law = dict[tuple[int, ...], float]
Prompt = Sequence[int | None]
Rows = Sequence[tuple[int, int]]  # (position, token)
CERTAIN = 1e-12
LANES = 64


class Path:
    """One way a run may go: outcomes that are settled, then the first possible outcome of every further draw."""

    def __init__(self, settled: list[int], todo: list[list[int]]):
        self.taken: list[int] = []
        self.settled, self.todo = settled, todo
        self.probability = 1.0

    def choose(self, law: list[float]) -> int:
        if not any(law):
            return -1  # as in production: a law without mass has no outcome
        if len(self.taken) < len(self.settled):
            outcome = self.settled[len(self.taken)]
        else:
            outcome, *others = [i for i, p in enumerate(law) if p > 0]
            self.todo.extend([*self.taken, other] for other in others)
        self.taken.append(outcome)
        self.probability *= law[outcome]
        return outcome


class Enumeration:
    """The `sample` argument under certification. Every run follows its own path; outcomes not taken become paths still to do."""

    def __init__(self) -> None:
        self.todo: list[list[int]] = [[]]
        self.paths: dict[int, Path] = {}

    def __call__(self, draws: Sequence[tuple[int, int]]) -> Callable[[Tensor], Tensor]:
        if draws[0][0] not in self.paths:
            return Noise(draws)
        paths = [self.paths[key] for key, _ in draws]
        return lambda law_BN: torch.tensor([path.choose(law) for path, law in zip(paths, law_BN.tolist(), strict=True)])

    def law_of(self, run: Callable[[int, int], list[tuple[int, ...]]]) -> Law:
        """The law of what `run(seed, n)` returns n of, over everything they draw. Runs go in batches, as in production."""
        law: Law = defaultdict(float)
        seed = 1
        while self.todo:
            batch, self.todo = [Path(settled, []) for settled in self.todo[:LANES]], self.todo[LANES:]
            self.paths = {mix(seed, i): path for i, path in enumerate(batch)}
            for outcome, path in zip(run(seed, len(batch)), batch, strict=True):
                law[outcome] += path.probability
                self.todo.extend(path.todo)
            seed += 1
        return dict(law)


def table_model(backbone: TableBackbone, sample: Any = None, eos: Sequence[int] = (), family: Any = None) -> Model:
    """A table model, its draws enumerated if asked to."""
    return Model("table", family or Causal(), backbone, None, eos, lanes=LANES, sample=sample)


def family_of(method: str, mask: int | None) -> Any:
    """The family that a method is certified on: causal, or one with a mask token."""
    from forerun import registry

    needs = registry.get("methods", method).needs
    if mask is None:
        return Causal()
    return Block(mask, 4) if core.BlockWise in needs else Masked(mask) if core.Canvases in needs else AnySubset(mask)


def method_law(
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    *,
    draft: TableBackbone | str | None = None,
    draft_family: Any = None,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Any = None,
    **options: Any,
) -> Law:
    """The law of whole sequences that a method writes after a prompt, or into the blanks (None) of one."""
    enumeration = Enumeration()
    model = table_model(target, enumeration, eos, family or family_of(method, mask))
    small: Any = table_model(draft, family=draft_family) if isinstance(draft, TableBackbone) else draft
    how = dict(method=method, draft=small)
    # Something else goes through every lane first: what it leaves in the slots must make no difference.
    outcomes = [token for token in range(target.vocab) if token != mask]
    decoy = [None if token is None else outcomes[(token + 1) % len(outcomes)] for token in prompt]
    if None in prompt:
        model.infill(token_ids=[decoy] * LANES, **how, **options)
    else:
        model.generate([decoy] * LANES, **how, **{**options, "max_tokens": 3, "min_tokens": 0})

    def run(seed: int, n: int) -> list[tuple[int, ...]]:
        if None in prompt:
            jobs = model.submit_infill(token_ids=[list(prompt)], seed=seed, n=n, **how, **options)[0][0].jobs
            model.engine.run()
            results = [job.result() for job in jobs[:n]]
        else:
            results = model.generate([list(prompt)], seed=seed, n=n, **how, **options)
        for result in results:
            if result.error is not None:
                raise result.error
        return [tuple(result.token_ids) for result in results]

    return enumeration.law_of(run)


def reference_law(
    target: TableBackbone,
    prompt: Prompt,
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Any = None,
    size: int = 1,
    **options: Any,
) -> Law:
    """The same law, straight from the definition: no engine, no rows, no method; one conditional after another. Of a block model it
    is left-to-right decoding; with a `size`, of text whose finished blocks of that size see themselves whole."""
    sampling = Sampling(**options)
    ends = frozenset() if sampling.ignore_eos else frozenset(eos)
    stops = (frozenset() if None in prompt else ends) | frozenset(sampling.stop_token_ids)
    never = (frozenset() if mask is None else {mask}) | (ends if None in prompt else frozenset())
    canvas = [*prompt, *[None] * (sampling.max_tokens or 0)]
    given = [(i, token) for i, token in enumerate(canvas) if token is not None]
    finished: Law = {}
    growing: Law = {(): 1.0}
    for position in [i for i, token in enumerate(canvas) if token is None]:
        longer: Law = defaultdict(float)
        for said, probability in growing.items():
            history = History(sampling, np.asarray([t for _, t in given], np.int64), target.vocab, stops, frozenset(never))
            for token in said:
                history.add(token)
            blanks = [i for i, token in enumerate(canvas) if token is None]
            if isinstance(family, Block):
                place, digests = block_context([*given, *zip(blanks, said)], family, size)
            else:
                place, digests = context(given, list(zip(blanks, said)), position, mask)
            p_V = laws(target.logits(place, digests)[None], [Chain(history, [], [0])])[0].tolist()
            for token in range(target.vocab):
                if p_V[token] > 0:
                    (finished if token in stops else longer)[(*said, token)] = probability * p_V[token]
        growing = dict(longer)
    return finished | growing


def context(given: Rows, decided: Rows, position: int, mask: int | None) -> tuple[int, list[int]]:
    """What the next token's law depends on, by definition: where its row stands, and the digests of all rows that it sees.

    Left to right, every row sees all before it. With a mask token: given rows see each other, decided ones see the given and what
    was decided before them, and the query, a mask at the blank's position, sees them all and itself.
    """
    if mask is None:
        text = [*given, *decided]
        return text[-1][0], [digest(text[: i + 1]) for i in range(len(text))]
    after = [digest([*given, *decided[: i + 1]]) for i in range(len(decided))]
    return position, [*[digest(given)] * len(given), *after, digest([*given, *decided, (position, mask)])]


def block_context(text: Rows, family: Block, size: int) -> tuple[int, list[int]]:
    """The same for the token after a text in a block model: its finished blocks see themselves whole, each row of the block that is
    being filled sees all before it; then a mask that sees them all and itself, unless the last row speaks of what follows."""
    n = len(text)
    finished = n // size * size
    digests = [digest(text[: (i // size + 1) * size if i < finished else i + 1]) for i in range(n)]
    if family.shifted:
        return text[-1][0], digests
    return n, [*digests, digest([*text, (n, family.mask_token)])]


def canvas_context(state: Sequence[Any], i: int, mask: int, family: Any, block: int) -> tuple[int, list[int]]:
    """What the law of a blank depends on when a canvas is filled in any order: the row that speaks of it and what that row sees."""
    rows = [(at, mask if token is None else token) for at, token in enumerate(state)]
    if not isinstance(family, Block):
        return i, [digest(rows)] * len(rows)
    row = i - family.shifted
    end = min((row // block + 1) * block, len(rows))
    return row, [digest(rows[: (at // block + 1) * block]) for at in range(end)]


def stepwise_law(
    target: TableBackbone,
    canvas: Prompt,
    *,
    mask: int,
    block: int,
    sub_block: int | None = None,
    family: Any = None,
    **options: Any,
) -> Law:
    """The law of stepwise decoding of a masked model, from its definition: every open blank of the block draws a token from its
    law; the one that the model's own law finds likeliest is decided; again, until none is open. Of a block model, whose blocks are
    counted from the first token; in a shifted one a block's first token is decided before the others."""
    sampling = Sampling(**options)
    canvas = [*canvas, *[None] * (sampling.max_tokens or 0)]
    blanks = [i for i, token in enumerate(canvas) if token is None]
    finished: Law = defaultdict(float)
    states: dict[tuple[Any, ...], float] = {tuple(canvas): 1.0}
    while states:
        state, probability = states.popitem()
        left = [i for i in blanks if state[i] is None]
        if not left:
            finished[tuple(state[i] for i in blanks)] += probability
            continue
        ordinal = (lambda i: i) if isinstance(family, Block) else blanks.index
        open_now = [i for i in left if ordinal(i) // block == ordinal(left[0]) // block]
        if sub_block is not None:
            open_now = [i for i in open_now if i % block // sub_block == left[0] % block // sub_block]
        if isinstance(family, Block) and family.shifted and left[0] % block == 0:
            open_now = left[:1]
        chances, own = [], []
        for i in open_now:
            logits_V = target.logits(*canvas_context(state, i, mask, family, block)).clone()
            logits_V[mask] = -torch.inf
            history = History(sampling, np.zeros(0, np.int64), target.vocab, frozenset())
            chances.append(laws(logits_V[None], [Chain(history, [], [0])])[0].tolist())
            own.append(logits_V.softmax(-1).tolist())
        for drawn in itertools.product(range(target.vocab), repeat=len(open_now)):
            chance = float(np.prod([p[t] for p, t in zip(chances, drawn)]))
            if chance > 0:
                best = max(range(len(drawn)), key=lambda j: (own[j][drawn[j]], -j))
                after = (*state[: open_now[best]], drawn[best], *state[open_now[best] + 1 :])
                states[after] = states.get(after, 0.0) + probability * chance
    return dict(finished)


@dataclass(frozen=True)
class Certificate:
    """What one comparison found."""

    case: dict[str, Any]
    sequences: int
    mass: float
    distance: float

    @property
    def holds(self) -> bool:
        return self.distance < CERTAIN and abs(self.mass - 1) < CERTAIN


def certify_case(
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    *,
    draft: Any = None,
    draft_family: Any = None,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Any = None,
    size: int = 1,
    method_options: dict[str, Any] | None = None,
    **sampling: Any,
) -> Certificate:
    """Compare a method with its reference on one table model. With a `mask` token the model is any-subset, or what the method
    needs, and the prompt may have blanks (None) in it."""
    from forerun import registry

    own, family = method_options or {}, family or family_of(method, mask)
    ours = method_law(
        method, target, prompt, draft=draft, draft_family=draft_family, eos=eos, mask=mask, family=family, **own, **sampling
    )
    if registry.get("methods", method).reference in ("stepwise", "block-stepwise"):
        block = own.get("block", getattr(family, "block", len(prompt)))
        theirs = stepwise_law(
            target, prompt, mask=family.mask_token, block=block, sub_block=own.get("sub_block"), family=family, **sampling
        )
    else:
        theirs = reference_law(target, prompt, eos=eos, mask=mask, family=family, size=size, **sampling)
    return Certificate(
        {"method": method, "prompt": list(prompt), "eos": list(eos), **(method_options or {}), **sampling},
        len(theirs),
        sum(ours.values()),
        total_variation(ours, theirs),
    )


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0.8, "logit_bias": {0: 1.5}, "min_tokens": 2},
    {"temperature": 1.0, "allowed_tokens": [0, 2]},
]


# Methods that guess without a drafter: settings in which guesses are right, wrong, recycled and carried over from block to block.
GUESSING: dict[str, list[dict[str, Any]]] = {
    "jacobi": [{"block": n, "start": start, "refill": n != 2} for n in (1, 2, 4) for start in ("repeat", "text")],
    "multiblock": [
        {"block": 2, "blocks": 2, "spawn": 0.0, "candidates": 2},
        {"block": 2, "blocks": 3, "spawn": 0.5, "candidates": 0, "start": "random"},
        {"block": 3, "blocks": 1, "candidates": 3, "start": "text"},
        {"block": 2, "blocks": 1, "refill": True, "candidates": 1},
    ],
    "lookahead": [{"window": 2, "ngram": 3, "guesses": 2}, {"window": 1, "ngram": 4, "guesses": 3}],
}


HOLES: list[Prompt] = [
    [None, 0, None, None, 1],  # scattered
    [0, 1, None, None, None],  # a prefix is given
    [None, None, 1, 0],  # a suffix is given
    [None, None, None, 2],  # all blank but one
    [None, None],  # nothing is given
]


def standard_cases(method: str) -> list[Callable[[], Certificate]]:
    """The cases that a lossless method must pass: drafts good and bad, every k, every parameter, an end token, holes anywhere."""
    from forerun import registry

    how: registry.Method = registry.get("methods", method)
    if how.guarantee == "approximate":
        return _cases_of_approximation(how)
    if core.AnySubset in how.needs:
        return _cases_with_holes(how)
    if core.Canvases in how.needs:
        return _cases_of_canvases(how)
    if core.BlockWise in how.needs:
        return _cases_of_blocks(how)
    target = TableBackbone(vocab=3, seed=1)
    if how.drafter == "diffusion":
        return _cases_of_diffusion(how, target)
    drafts: list[Any] = [None]
    if how.drafts and how.drafter is None:
        drafts = [TableBackbone(vocab=3, seed=2, like=target, blend=b, cost=0.1) for b in (0.0, 0.7)] + ["lookup"]
    options = GUESSING.get(how.name) or ([{"k": k} for k in (1, 2, 4)] if "k" in how.option_names() else [{}])
    return [
        partial(certify_case, method, target, [0, 1, 0], draft=draft, eos=eos, method_options=option, max_tokens=4, **sampling)
        for draft in drafts
        for option in options
        for eos in ((), (1,))
        for sampling in SAMPLINGS
    ]


def _cases_with_holes(how: registry.Method) -> list[Callable[[], Certificate]]:
    target = TableBackbone(vocab=4, seed=1)
    options: list[dict[str, Any]] = [{}]
    if "k" in how.option_names():
        options = [{"k": k, "ahead": ahead} for k in (1, 2, 3, 9) for ahead in ("none", "bonus", "whole", "every")]
    same: dict[str, Any] = dict(mask=3, temperature=1.0)
    cases: list[Callable[[], Certificate]] = [
        partial(certify_case, how.name, target, hole, method_options=option, **{**same, **sampling})
        for hole in HOLES
        for option in options
        for sampling in ({}, {"temperature": 0.6}, {"temperature": 1.7, "top_p": 0.7}, {"temperature": 0.0})
    ]
    for sampling in SAMPLINGS:
        cases.append(partial(certify_case, how.name, target, HOLES[0], **{**same, **sampling, "min_tokens": 0}))
        cases.append(partial(certify_case, how.name, target, [0, 1], eos=(1,), **{**same, "max_tokens": 3, **sampling}))
        if how.drafts:
            cases.append(partial(certify_case, how.name, target, HOLES[0], draft="ngram", **{**same, **sampling, "min_tokens": 0}))
    return cases


# What makes each approximate method of ours differ from its reference on canvases as small as these.
ROUGH: dict[str, dict[str, Any]] = {
    "assd-tolerant": {"tolerance": 0.3},
    "steps": {"steps": 1},
    "threshold": {"threshold": 0.0},
    "entropy-bounded": {"bound": 9.0},
    "specdiff-confidence": {"k": 2, "steps": 2},
    "block": {"threshold": 0.0},
    "s2d2": {"span": 3, "threshold": 0.0},
    "s2d2-canvases": {"span": 9, "threshold": 0.0},
}


def _cases_of_approximation(how: registry.Method) -> list[Callable[[], Certificate]]:
    """How far an approximate method is from its reference, with options that let it be."""
    if how.reference == how.name or how.name not in ROUGH:
        raise NotAble(f"method={how.name!r} is approximate ({how.reason}): there is no law that it claims to have.")
    target, option = TableBackbone(vocab=4, seed=1), ROUGH[how.name]
    if how.drafter is not None:
        draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
        own: dict[str, Any] = dict(draft=draft, draft_family=Masked(3), max_tokens=3, logit_bias={3: -1e6})
        return [partial(certify_case, how.name, target, [0, 1], temperature=t, method_options=option, **own) for t in (0.0, 1.0)]
    if core.BlockWise in how.needs:
        prompts: list[Prompt] = [[0, 1], [1]]
        return [
            partial(certify_case, how.name, target, prompt, mask=3, temperature=1.0, method_options=option, max_tokens=3)
            for prompt in prompts
        ]
    holes: list[Prompt] = [[0, None, None, None], [None, 0, None, 1]]
    return [partial(certify_case, how.name, target, hole, mask=3, temperature=1.0, method_options=option) for hole in holes]


def _cases_of_canvases(how: registry.Method) -> list[Callable[[], Certificate]]:
    target = TableBackbone(vocab=3, seed=1)
    options: list[dict[str, Any]] = [{"block": b} for b in (1, 2, 9)]
    if "drafts" in how.option_names():
        options = [{"block": b, "drafts": n} for b in (1, 2, 9) for n in (0, 1, 2, 4)]
        options += [{"block": 9, "drafts": 3, "tree": "chain"}, {"block": 9, "worth": 0.3}]
    samplings: list[dict[str, Any]] = [{"temperature": t} for t in (1.0, 0.0, 2.0)] + [{"temperature": 0.5, "top_p": 0.8}]
    cases: list[Callable[[], Certificate]] = [
        partial(certify_case, how.name, target, hole, mask=2, method_options=option, **sampling)
        for hole in ([None, 0, None, None, 1], [0, 1, None, None, None], [None, None, 1], [None, None])
        for option in options
        for sampling in samplings
    ]
    # Two decisions in the other order need four blanks: one that is certain, the two, and one behind them.
    four: list[Prompt] = [[None, None, 0, None, None]]
    own: list[dict[str, Any]] = [{"block": 2}, {"block": 9}]
    return cases + [
        partial(certify_case, how.name, target, hole, mask=2, method_options=option, temperature=t)
        for hole in four
        for option in own
        for t in (1.0, 0.0)
    ]


def _cases_of_blocks(how: registry.Method) -> list[Callable[[], Certificate]]:
    """Aligned and shifted, prompts that end before, at and after the end of a block, every block size and draft."""
    target = TableBackbone(vocab=3, seed=1)
    options: list[dict[str, Any]] = [{"block": b} for b in (1, 2, 3, 4)] + [{"block": 4, "sub_block": 2}]
    if "k" in how.option_names():
        options = [{"k": k, "ahead": ahead} for k in (1, 2, 3) for ahead in ("whole", "every")]
    elif "drafts" in how.option_names():
        options += [{"block": 4, "drafts": n, "tree": tree} for n in (0, 1, 3) for tree in ("chain", "mixed")]
    same: dict[str, Any] = dict(mask=2, max_tokens=3)
    cases: list[Callable[[], Certificate]] = [
        partial(certify_case, how.name, target, prompt, family=family, method_options=option, temperature=t, **same)
        for family in (Block(2, 4), Block(2, 4, shifted=True))
        for prompt in ([0], [0, 1, 0], [1, 0, 1, 1], [0, 1, 0, 0, 1])
        for option in options
        for t in (1.0, 0.0)
    ]
    if how.reference == "ar":
        for sampling in SAMPLINGS:
            if "allowed_tokens" not in sampling:  # one of the two that it allows is the mask here
                cases += [
                    partial(certify_case, how.name, target, [0, 1], eos=eos, method_options=options[2], **same, **sampling)
                    for eos in ((), (1,))
                ]
    return cases


def _cases_of_diffusion(how: registry.Method, target: TableBackbone) -> list[Callable[[], Certificate]]:
    """Drafters that fill blanks, good and bad, masked and any-subset, in one step or from left to right, keys kept or not."""
    target = TableBackbone(vocab=4, seed=1)
    draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
    samplings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.5, "top_p": 0.8}]
    return [
        partial(
            certify_case, how.name, target, [0, 1], draft=draft, draft_family=family, eos=eos, max_tokens=3, logit_bias={3: -1e6},
            method_options={"k": k, "steps": steps, "keep": keep}, **sampling,
        )
        for family in (Masked(3), AnySubset(3))
        for k, steps, keep in ((1, 1, True), (3, 1, True), (3, 2, True), (3, 3, False))
        for eos in ((), (1,))
        for sampling in samplings
    ]  # fmt: skip
