"""Certification by enumeration: run a method once for every random outcome it could have, and add
up the probabilities.

The engine, the method and its rules are the ones that run in production; only the sampler differs.
No statistics: the law of whole sequences comes out exact, and is compared with the reference's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from forerun import registry
from forerun.api import Model
from forerun.backbones.table import TableBackbone
from forerun.certify.healing import End, healed_canvases, healed_ends, healed_law
from forerun.certify.reference import (
    Asked,
    CanvasReading,
    First,
    Law,
    Prompt,
    State,
    block_context,
    context,
    reference_law,
    stepwise_law,
    vocabulary_of,
)
from forerun.engine.engine import MakeSampler
from forerun.errors import BadOption, NotAble
from forerun.families.any_subset import AnySubset
from forerun.families.base import Family
from forerun.families.block import Block, BlockFiller
from forerun.families.causal import Causal
from forerun.families.masked import CanvasFiller, Masked
from forerun.methods.block_order import CanvasBlockOptions, OrderedBlockOptions
from forerun.options import Sampling
from forerun.probability.acceptance import Sampler
from forerun.probability.distributions import total_variation
from forerun.probability.noise import Noise, mix
from forerun.requests.prompts import Tokenised

CERTAIN = 1e-12
LANES = 64


class Path:
    """One way a run may go: outcomes that are fixed, then the first possible outcome of every
    further draw."""

    def __init__(self, fixed: list[int]):
        self.fixed = fixed
        self.taken: list[int] = []
        self.others: list[list[int]] = []  # paths that branch off from here
        self.probability = 1.0

    def choose(self, law: list[float]) -> int:
        if not any(p > 0 for p in law):
            return -1  # as in production: a law without mass, or of no numbers, has no outcome
        if len(self.taken) < len(self.fixed):
            outcome = self.fixed[len(self.taken)]
        else:
            outcome, *others = [i for i, p in enumerate(law) if p > 0]
            self.others.extend([*self.taken, other] for other in others)
        self.taken.append(outcome)
        self.probability *= law[outcome]
        return outcome


class PathSampler:
    """Every sequence of a batch draws what its path says."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __call__(self, law_BN: Tensor) -> Tensor:
        rows = zip(self.paths, law_BN.tolist(), strict=True)
        return torch.tensor([path.choose(law) for path, law in rows])

    def many(self, law_BKN: Tensor) -> Tensor:
        return torch.stack([self(law_BKN[:, i]) for i in range(law_BKN.shape[1])], 1)

    def ahead(self, x_BK: Tensor, law_BLN: Tensor) -> Tensor:
        drawn_BL = torch.full(law_BLN.shape[:2], -1)
        for path, row, x_K, law_LN in zip(self.paths, drawn_BL, x_BK.tolist(), law_BLN.tolist()):
            for i, (law, expected) in enumerate(zip(law_LN, [*x_K, -1])):
                row[i] = path.choose(law)
                if row[i] != expected:
                    break
        return drawn_BL


class Enumeration:
    """Makes the samplers under certification. Every run follows its own path; outcomes not taken
    become paths still to do."""

    def __init__(self) -> None:
        self.todo: list[list[int]] = [[]]
        self.paths: dict[int, Path] = {}

    def __call__(self, draws: Sequence[tuple[int, int]]) -> Sampler:
        if draws[0][0] not in self.paths:
            return Noise(draws)
        return PathSampler([self.paths[key] for key, _ in draws])

    def law_of(self, run: Callable[[int, int], list[tuple[int, ...]]]) -> Law:
        """The law of what `run(seed, n)` returns n of, over everything they draw. Runs go in
        batches, as in production."""
        law: Law = defaultdict(float)
        seed = 1
        while self.todo:
            batch = [Path(fixed) for fixed in self.todo[:LANES]]
            self.todo = self.todo[LANES:]
            self.paths = {mix(seed, i): path for i, path in enumerate(batch)}
            for outcome, path in zip(run(seed, len(batch)), batch, strict=True):
                law[outcome] += path.probability
                self.todo.extend(path.others)
            seed += 1
        return dict(law)


def table_model(
    backbone: TableBackbone,
    sampler: MakeSampler = Noise,
    eos: Sequence[int] = (),
    family: Family | None = None,
    spelled: Sequence[bytes] | None = None,
) -> Model:
    """A table model, its draws enumerated if asked to. For constraints, its tokens may spell
    something."""
    model = Model(
        "table",
        family or Causal(),
        backbone,
        eos=eos,
        lanes=LANES,
        sampler=sampler,
        threaded=False,  # many small ones, each for a moment
    )
    if spelled is not None:
        model.vocabulary = vocabulary_of(tuple(spelled))
    return model


def family_of(method: str, mask: int | None) -> Family:
    """The family that a method is certified on: causal, or one with a mask token."""
    if mask is None:
        return Causal()
    needs = registry.method_named(method).needs
    if BlockFiller in needs:
        return Block(mask, 4)
    return Masked(mask) if CanvasFiller in needs else AnySubset(mask)


def check_table_families(method: str) -> None:
    """Refuse a method that asks what no family of ours answers: nobody can guess its family."""
    chosen = registry.method_named(method)
    ours = (Causal(), AnySubset(0), Masked(0), Block(0, 1))
    if not any(chosen.runs_on(family) for family in ours):
        asked = " and ".join(need.does for need in chosen.needs)
        raise NotAble(
            f"method={method!r} needs a model that {asked}, and no family of ours does: call "
            f"certify_case with family=, an instance of your own family."
        )


def check_table(name: str, backbone: object) -> None:
    if not isinstance(backbone, TableBackbone):
        raise BadOption(
            f"{name}={type(backbone).__name__} must be a TableBackbone: enumeration needs a model "
            f"small enough for every outcome, and a law by definition to compare with. For real "
            f"models use forerun.certify.testing.certify."
        )


def method_law(  # noqa: PLR0913 - keywords of a public function
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    *,
    draft: TableBackbone | str | None = None,
    draft_family: Family | None = None,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Family | None = None,
    spelled: Sequence[bytes] | None = None,
    text: bool = False,
    **options: Any,
) -> Law:
    """The law of whole sequences that a method writes after a prompt, or into the blanks (None) of
    one. If the prompt is `text`, its end is healed, or what stands around its blanks is, and the
    sequences hold it."""
    enumeration = Enumeration()
    model = table_model(target, enumeration, eos, family or family_of(method, mask), spelled)
    drafter: Model | str | None
    if isinstance(draft, TableBackbone):
        drafter = table_model(draft, family=draft_family)
    else:
        drafter = draft
    options = {**options, "method": method, "draft": drafter}
    ids = [token for token in prompt if token is not None]
    if text:
        ids = Tokenised(ids)
    canvas = Tokenised(cast("Sequence[int]", prompt)) if text else list(prompt)
    used_lanes = 0

    def run(seed: int, n: int) -> list[tuple[int, ...]]:
        nonlocal used_lanes
        if n > used_lanes:
            used_lanes = min(max(n, 2 * used_lanes), LANES)
            _use_lanes(model, used_lanes, prompt, mask, options)
        if None in prompt:
            jobs = model.submit_infill(token_ids=[canvas], seed=seed, n=n, **options)
            jobs.run()
            results = [job.result() for job in jobs.requests[0].jobs[:n]]
        else:
            jobs = model.submit([ids], seed=seed, n=n, **options)
            jobs.run()
            results = jobs.results()
        for result in results:
            if result.error is not None:
                raise result.error
        if text and None in prompt:
            return [tuple(job.seq.tokens.tolist()) for job in jobs.requests[0].jobs[:n]]
        return [(*(result.prompt_ids if text else ()), *result.token_ids) for result in results]

    return enumeration.law_of(run)


def _use_lanes(
    model: Model, lanes: int, prompt: Prompt, mask: int | None, options: dict[str, Any]
) -> None:
    """Decode something else in every lane that the next paths use: what it leaves in the slots must
    make no difference."""
    outcomes = [token for token in range(model.vocab) if token != mask]

    def other(token: int) -> int:
        return outcomes[(token + 1) % len(outcomes)]

    if None in prompt:
        decoy = [None if token is None else other(token) for token in prompt]
        model.infill(token_ids=[decoy] * lanes, **options)
    else:
        shorter = {**options, "max_tokens": 3, "min_tokens": 0}
        ids = [other(token) for token in prompt if token is not None]
        model.submit([ids] * lanes, **shorter).run()


def canvas_reading(
    method: str, target: TableBackbone, options: dict[str, Any], family: Family
) -> CanvasReading:
    """How the target reads a canvas, with blocks as a method's options have them."""
    chosen = registry.method_named(method).options(**options)
    block = chosen.block
    if block is None and isinstance(family, Block):
        block = family.block
    assert family.mask_token is not None, "a model that fills blanks has a mask"
    reading = CanvasReading(
        target, family.mask_token, block, getattr(chosen, "sub_block", None), family
    )
    if isinstance(chosen, CanvasBlockOptions):
        reading = replace(reading, cache=chosen.cache, refresh=chosen.refresh)
    if isinstance(chosen, OrderedBlockOptions):
        reading = replace(reading, order=chosen.order)
    return reading


def law_by_definition(  # noqa: PLR0913 - as certify_case
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    family: Family,
    options: dict[str, Any],
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    size: int = 1,
    spelled: Sequence[bytes] | None = None,
    first: First | None = None,
    **sampling: Any,
) -> Law:
    """The law of a method's reference."""
    if registry.method_named(method).reference in ("stepwise", "block-stepwise"):
        reading = canvas_reading(method, target, options, family)
        return stepwise_law(reading, prompt, eos=eos, first=first, spelled=spelled, **sampling)
    return reference_law(
        target,
        prompt,
        eos=eos,
        mask=mask,
        family=family,
        size=size,
        spelled=spelled,
        first=first,
        **sampling,
    )


def law_after_text(  # noqa: PLR0913 - as law_by_definition
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    family: Family,
    options: dict[str, Any],
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    spelled: Sequence[bytes] = (),
    **sampling: Any,
) -> Law:
    """The same after a text whose end is healed, prompt and output together; or of a text with
    holes that is healed around them."""
    if None in prompt:
        arguments = {"eos": eos, "mask": mask, "spelled": spelled, **sampling}
        return law_around_holes(method, target, prompt, family, options, **arguments)
    ids = [token for token in prompt if token is not None]
    asked = Asked(ids, Sampling(**sampling), eos, mask, spelled)
    same: dict[str, Any] = {"eos": eos, "mask": mask, "spelled": spelled}

    def logits(kept: Sequence[int], more: Sequence[int]) -> Tensor:
        text = list(enumerate([*kept, *more]))
        if isinstance(family, Masked):
            reading = canvas_reading(method, target, options, family)
            state = (*kept, *more, *[None] * (len(asked.canvas) - len(text)))
            return target.logits(*reading.context(state, len(text), None, []))
        if isinstance(family, Block):
            return target.logits(*block_context(text, family, 1))
        parts = text[: len(kept)], text[len(kept) :]
        return target.logits(*context(*parts, len(text), mask))

    def after(end: End) -> Law:
        arguments = {**same, **sampling, "first": end.first}
        return law_by_definition(method, target, end.prompt, family, options, **arguments)

    least = 1 if family.needs_prompt else 0
    return healed_law(healed_ends(asked, ids, spelled, least, logits), after)


def law_around_holes(  # noqa: PLR0913 - as law_by_definition
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    family: Family,
    options: dict[str, Any],
    *,
    eos: Sequence[int] = (),
    mask: int | None = None,
    spelled: Sequence[bytes] = (),
    **sampling: Any,
) -> Law:
    """The law of whole canvases: of the borders of holes, one after the other, then of the rest."""
    asked = Asked(prompt, Sampling(**sampling), eos, mask, spelled)

    def logits(state: State, put: Sequence[tuple[int, int]], position: int) -> Tensor:
        if isinstance(family, Masked):
            reading = canvas_reading(method, target, options, family)
            placed = dict(put)
            filled = tuple(placed.get(i, token) for i, token in enumerate(state))
            return target.logits(*reading.context(filled, position, None, []))
        given = [(i, token) for i, token in enumerate(state) if token is not None]
        return target.logits(*context(given, put, position, mask))

    law: Law = defaultdict(float)
    for canvas, probability in healed_canvases(asked, spelled, logits).items():
        begun = [None if token < 0 else token for token in canvas]
        same: dict[str, Any] = {"eos": eos, "mask": mask, "spelled": spelled, **sampling}
        rest: Law = {(): 1.0}
        if None in begun:
            rest = law_by_definition(method, target, begun, family, options, **same)
        for tokens, chance in rest.items():
            left = iter(tokens)
            law[tuple(next(left) if t is None else t for t in begun)] += probability * chance
    return dict(law)


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


def certify_case(  # noqa: PLR0913 - keywords of a public function
    method: str,
    target: TableBackbone,
    prompt: Prompt,
    *,
    draft: TableBackbone | str | None = None,
    draft_family: Family | None = None,
    eos: Sequence[int] = (),
    mask: int | None = None,
    family: Family | None = None,
    size: int = 1,
    spelled: Sequence[bytes] | None = None,
    text: bool = False,
    reference: Law | None = None,
    method_options: dict[str, Any] | None = None,
    **sampling: Any,
) -> Certificate:
    """Compare a method with its reference on one table model.

    With a `mask` token the model is any-subset, or what the method needs, and the prompt may have
    blanks (None) in it. Another `family` may be given. A `draft` table model has the
    `draft_family`, causal unless given.

    `size` is for block models that are compared with left-to-right decoding: finished blocks of so
    many tokens see themselves whole; with 1, the default, no token sees a later one.

    `spelled` is what each token spells, for a constraint among the sampling parameters, and for a
    prompt that is `text`, whose end is healed.

    `reference` is a law of whole outputs to compare with, for those who have one of their own.
    """
    check_table("target", target)
    if draft is not None and not isinstance(draft, str):
        check_table("draft", draft)
    if family is None:
        check_table_families(method)
        family = family_of(method, mask)
    options = method_options or {}
    ours = method_law(
        method,
        target,
        prompt,
        draft=draft,
        draft_family=draft_family,
        eos=eos,
        mask=mask,
        family=family,
        spelled=spelled,
        text=text,
        **options,
        **sampling,
    )
    if reference is None:
        define: Callable[..., Law] = partial(law_by_definition, size=size)
        if text:
            define = law_after_text
        reference = define(
            method,
            target,
            prompt,
            family,
            options,
            eos=eos,
            mask=mask,
            spelled=spelled,
            **sampling,
        )
    case = {"method": method, "prompt": list(prompt), "eos": list(eos), **options, **sampling}
    distance = total_variation(ours, reference)
    return Certificate(case, len(reference), sum(ours.values()), distance)
