"""How well acceptance is foreseen: what each estimator expects of a draft, beside what is accepted
(Table 4 of Han et al., 2026)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.api import Model, Prompt
from forerun.evaluate.ar_ness import check_fills_blocks
from forerun.families.block import BlockFiller
from forerun.methods.block_order import BlockOptions, ModelBlockOrder
from forerun.methods.routers import ESTIMATORS, RouterDriver, RoutingOptions, expected_prefix
from forerun.methods.s2d2 import Acceptance, RunDraft, judge_run
from forerun.options import Sampling
from forerun.probability.acceptance import rejection
from forerun.requests.prompts import parse_prompts, room_after
from forerun.sequence.canvas import BLANK, Canvas

STRENGTHS: dict[str, tuple[float, ...]] = {
    "random": (1.0,),
    "entropy": (0.5, 0.75, 1.0, 1.25, 1.5),
    "confidence": (0.5, 0.75, 1.0, 1.25, 1.5),
    "renyi": (1.0,),
    "hard-entropy": (0.01, 0.02, 0.05, 0.1, 0.2),
    "margin": (0.01, 0.02, 0.05, 0.1, 0.2),
}


@dataclass(frozen=True)
class EstimatorError:
    """How far an estimator's expected accepted length is from the length that was accepted."""

    estimator: str
    strength: float
    bias: float  # mean error: below 0 it expects too little
    spread: float
    absolute: float


class EstimatorSetting(NamedTuple):
    estimator: str
    strength: float


SETTINGS = [EstimatorSetting(name, s) for name, strengths in STRENGTHS.items() for s in strengths]


class JudgedDraft(NamedTuple):
    """How many tokens of a draft were accepted, and how many each estimator expected."""

    accepted: int
    expected: Mapping[EstimatorSetting, float]


def estimator_errors(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    block: int | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[EstimatorError]:
    """Decode by S2D2, verify every draft, and set beside every verdict what each estimator would
    have expected."""
    check_fills_blocks(model, "estimators")
    drafts: list[JudgedDraft] = []
    sampling = Sampling(temperature=temperature)
    for i, prompt in enumerate(prompts):
        seq = _canvas_after(model, prompt, max_tokens, sampling, seed + i)
        drafts += judged_drafts(model, seq, BlockOptions(block=block))
    accepted = np.array([draft.accepted for draft in drafts])
    rows = []
    for setting in SETTINGS:
        error = np.array([draft.expected[setting] for draft in drafts]) - accepted
        rows.append(
            EstimatorError(
                *setting,
                bias=float(error.mean()),
                spread=float(error.std()),
                absolute=float(np.abs(error).mean()),
            )
        )
    return rows


def _canvas_after(
    model: Model, prompt: Prompt, max_tokens: int, sampling: Sampling, seed: int
) -> Canvas:
    """A prompt and the blanks after it."""
    [ids] = parse_prompts(model, [prompt]).ids
    if not isinstance(ids, list):
        raise ids
    room_after(ids, model, max_tokens)
    return model.canvas([*ids, *[BLANK] * max_tokens], sampling, seed=seed)


def judged_drafts(model: Model, seq: Canvas, options: BlockOptions) -> list[JudgedDraft]:
    """S2D2 on one sequence, always verified."""
    target = model.handle()
    assert isinstance(target, BlockFiller)
    drafts: list[JudgedDraft] = []

    async def decode() -> None:
        order = ModelBlockOrder(seq, target, options)
        driver = RouterDriver(seq, RoutingOptions(), order.part)
        while not seq.done:
            blanks = order.open()
            span = order.span()
            alone = order.alone
            [laws] = await order.ask([blanks], [()])
            draft = await driver.draft(blanks, laws)
            if alone:
                seq.place(draft.confident, "decided")
                continue
            run = draft.view.run
            expected = _expected_lengths(laws.model_law[:run], blanks[:run])
            before = len(seq.trace.events)
            run_draft = RunDraft(blanks, draft.tokens[:run], laws)
            await judge_run(seq, target, run_draft, span, Acceptance(rejection, False))
            drafts.append(JudgedDraft(len(seq.trace.events[before].tokens), expected))

    model.run_to_end(seq, decode)
    return drafts


def _expected_lengths(
    model_law_NV: Tensor, positions: Sequence[int]
) -> dict[EstimatorSetting, float]:
    where_1N = torch.tensor([positions], device=model_law_NV.device)
    expected = {}
    for setting in SETTINGS:
        estimate = ESTIMATORS[setting.estimator].estimate
        alpha_1N = estimate(model_law_NV[None], where_1N, setting.strength)
        expected[setting] = float(expected_prefix(alpha_1N))
    return expected
