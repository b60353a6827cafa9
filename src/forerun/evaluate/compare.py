"""Methods side by side: the same prompts, seeds and machine, in turns, with what each costs, promises and is worth.

Speed without quality is easy: beside the speed stand whether the output is the reference's, how likely a judge finds it, and
whether it parses. A method that is fast and wrong must look wrong here.
"""

from __future__ import annotations

import ast
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from typing import Any

import torch

from forerun import registry
from forerun.api import Model
from forerun.arguments import check_same_tokens
from forerun.core import Conditional, Marginal
from forerun.errors import TokenizerMismatch
from forerun.evaluate.certify import Bets, laws_along
from forerun.evaluate.costs import Cost, since, snapshot
from forerun.evaluate.metrics import first_line
from forerun.parameters import Sampling
from forerun.result import Result


@dataclass(frozen=True)
class Entry:
    """A contestant."""

    model: Model
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        given = {key: getattr(value, "name", value) for key, value in self.options.items() if value}
        said = [str(value) if key == "draft" else f"{key} {value}" for key, value in given.items()]
        return f"{self.method} ({', '.join(said)})" if said else self.method


@dataclass
class Row:
    """What one contestant did."""

    model: str
    method: str
    family: str
    guarantee: str
    tokens: int
    forwards: int
    draft_forwards: int
    tokens_per_forward: float
    acceptance_length: float | None
    tokens_per_second: float  # median over the rounds
    least: float
    most: float
    speedup: float | None  # over the method's own reference on the same model
    over_ar: float | None  # over plain left-to-right decoding, of whichever model does that here
    equals_reference: float | None  # at temperature 0, the share of outputs that are the reference's, token for token
    p_value: float | None  # above temperature 0, of the hypothesis that the output has the reference's law
    perplexity: float | None  # under the judge
    parses: float  # share of prompts with their completions that are Python
    exact: float | None = None  # share of completions whose first line is the true one, where that is known
    loss: float | None = None  # the model's own, per token of the true completions, where it scores chains
    mflops_per_token: float = 0.0  # of all models together, rows as they really ran
    mbytes_per_token: float = 0.0  # weights, keys and values read
    draft_mflops: float | None = None  # per draft, of the models that draft


def entries(model: Model, methods: Sequence[str] | None = None, draft: Any = None) -> list[Entry]:
    """All that a model can run; methods that need a draft take part if there is one."""
    found = []
    for name in methods or registry.names("methods"):
        how: registry.Method = registry.get("methods", name)
        if methods is None and any(question not in model.family.answers for question in how.needs):
            continue
        how.check(model.family, model.name)
        if how.drafts_itself:
            found += [Entry(model, name), Entry(model, name, {"draft": "ngram"})]
        elif how.drafter is not None and "model" in {f.name for f in fields(registry.get("drafters", how.drafter))}:
            fills = isinstance(draft, Model) and Marginal in draft.family.answers
            if methods is not None or fills:
                found.append(Entry(model, name, {"draft": draft}))
        elif how.drafts and how.drafter is None:
            if draft is None and methods is None:
                continue
            found.append(Entry(model, name, {"draft": draft}))
        else:
            found.append(Entry(model, name))
    return sorted(found, key=lambda entry: entry.method != registry.get("methods", entry.method).reference)


def compare(
    contestants: Sequence[Entry],
    prompts: Sequence[Any],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    rounds: int = 3,
    batch: int = 1,
    seed: int = 0,
    judge: Model | None = None,
    truths: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Run all contestants in turns. The first round warms up and is not timed. `truths` are what really follows the prompts."""
    how = dict(max_tokens=max_tokens, temperature=temperature, seed=seed)
    rates: list[list[float]] = [[] for _ in contestants]
    results: list[list[Result]] = [[] for _ in contestants]
    costs: list[dict[Any, Cost]] = [{} for _ in contestants]
    for turn in range(rounds + 1):
        for i, entry in enumerate(contestants):
            began, before = time.perf_counter(), snapshot(entry.model.engine.hosts)
            results[i] = [
                r
                for group in _groups(prompts, batch)
                for r in entry.model.generate(group, method=entry.method, **how, **entry.options)
            ]
            seconds = time.perf_counter() - began
            costs[i] = since(entry.model.engine.hosts, before)
            for result in results[i]:
                if result.error is not None:
                    raise result.error
            if turn:
                rates[i].append(sum(r.stats.tokens for r in results[i]) / seconds)
            progress(turn * len(contestants) + i + 1, (rounds + 1) * len(contestants))
    rows = [_row(entry, results[i], rates[i], costs[i], temperature, judge) for i, entry in enumerate(contestants)]
    _against_references(contestants, rows, results, temperature)
    if truths is not None:
        _against_truths(contestants, rows, results, truths)
    return rows


def _groups(prompts: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(prompts[i : i + size]) for i in range(0, len(prompts), size)]


def _row(
    entry: Entry, results: list[Result], rates: list[float], costs: dict[Any, Cost], temperature: float, judge: Model | None
) -> Row:
    how: registry.Method = registry.get("methods", entry.method)
    tokens, forwards = sum(r.stats.tokens for r in results), sum(r.stats.forwards for r in results)
    lengths = [r.stats.acceptance_length for r in results if r.stats.acceptance_length is not None]
    return Row(
        model=entry.model.name,
        method=entry.label,
        family=entry.model.family.name,
        guarantee=how.guarantee,
        tokens=tokens,
        forwards=forwards,
        draft_forwards=sum(r.stats.draft_forwards for r in results),
        tokens_per_forward=tokens / forwards,
        acceptance_length=statistics.mean(lengths) if lengths else None,
        tokens_per_second=statistics.median(rates),
        least=min(rates),
        most=max(rates),
        speedup=None,
        over_ar=None,
        equals_reference=None,
        p_value=law_p_value(entry.model, results, temperature) if temperature > 0 and _scores(entry.model) else None,
        perplexity=perplexity(judge, entry.model, results) if judge is not None else None,
        parses=statistics.mean(parses(entry.model.decode([*r.prompt_ids, *r.token_ids])) for r in results),
        mflops_per_token=sum(cost.flops for cost in costs.values()) / tokens / 1e6,
        mbytes_per_token=sum(cost.bytes for cost in costs.values()) / tokens / 1e6,
        draft_mflops=_per_draft(entry, results, costs),
    )


def _per_draft(entry: Entry, results: list[Result], costs: dict[Any, Cost]) -> float | None:
    """Arithmetic of the draft models for one draft, in millions; none where no other model drafts."""
    drafts = sum(1 for r in results for event in r.trace if event.drafted)
    if not drafts or not any(r.stats.draft_forwards for r in results):
        return None
    return sum(cost.flops for host, cost in costs.items() if host is not entry.model.host) / drafts / 1e6


def _scores(model: Model) -> bool:
    """Can the law of what it wrote be told? A masked model has none for whole sequences."""
    return Conditional in model.family.answers


def _against_references(contestants: Sequence[Entry], rows: list[Row], results: list[list[Result]], temperature: float) -> None:
    """Set each row beside its reference's row on the same model, and beside plain left-to-right decoding, where those take part."""
    plain = next((j for j, e in enumerate(contestants) if e.method == "ar" and e.model.family.name == "causal"), None)
    for i, entry in enumerate(contestants):
        if plain is not None:
            rows[i].over_ar = rows[i].tokens_per_second / rows[plain].tokens_per_second
        reference = registry.get("methods", entry.method).reference
        at = next((j for j, other in enumerate(contestants) if other.model is entry.model and other.method == reference), None)
        if at is None:
            continue
        rows[i].speedup = rows[i].tokens_per_second / rows[at].tokens_per_second
        if temperature == 0:
            rows[i].equals_reference = statistics.mean(a.token_ids == b.token_ids for a, b in zip(results[i], results[at]))


def _against_truths(
    contestants: Sequence[Entry], rows: list[Row], results: list[list[Result]], truths: Sequence[Sequence[int]]
) -> None:
    losses: dict[int, float] = {}
    for entry, row, own in zip(contestants, rows, results):
        decode = entry.model.decode
        row.exact = statistics.mean(first_line(decode(r.token_ids)) == first_line(decode(t)) for r, t in zip(own, truths))
        if _scores(entry.model):
            if id(entry.model) not in losses:
                losses[id(entry.model)] = statistics.mean(surprises(entry.model, zip((r.prompt_ids for r in own), truths)))
            row.loss = losses[id(entry.model)]


def law_p_value(model: Model, results: Sequence[Result], temperature: float) -> float:
    """A p-value that holds whenever one looks: one over the largest mean stake against the output (see `certify`)."""
    twin = Model(model.name, model.family, model.backbone, model.tokenizer, model.eos, lanes=1, context=model.context)
    bets = Bets(alpha=0.01, shadows=0)
    for result in results:
        laws_TV = laws_along(twin, result.prompt_ids, result.token_ids, Sampling(temperature=temperature), model.eos)
        for token, p_V in zip(result.token_ids, laws_TV):
            bets.see(token, p_V, None)
    return 0.0 if bets.impossible else min(1.0, 1 / bets.best)


def perplexity(judge: Model, model: Model, results: Sequence[Result]) -> float | None:
    """How surprised a judge with the same tokenizer is by the completions; none if its tokens are other tokens."""
    try:
        check_same_tokens(judge, model)
    except TokenizerMismatch:
        return None
    nats = surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])
    lengths = [len(r.token_ids) for r in results]
    return math.exp(sum(n * length for n, length in zip(nats, lengths)) / sum(lengths))


def surprises(judge: Model, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """How surprised a judge is by each completion of a prompt, in nats per token."""
    twin = Model(judge.name, judge.family, judge.backbone, judge.tokenizer, (), lanes=1, context=judge.context)
    found = []
    for prompt, output in texts:
        laws_TV = laws_along(twin, prompt, output, Sampling(temperature=1.0), frozenset())
        picked_T = laws_TV[torch.arange(len(output)), torch.tensor(output)]
        found.append(float(-picked_T.double().log().mean()))
    return found


def parses(code: str) -> bool:
    """Is it Python, up to its last whole line, a few unfinished lines at the end forgiven?"""
    lines = code.split("\n")[:-1] or [code]
    for cut in range(min(4, len(lines))):
        try:
            ast.parse("\n".join(lines[: len(lines) - cut]))
        except (SyntaxError, ValueError):
            continue
        return True
    return False


def machine() -> str:
    """What this ran on."""
    devices = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores ({platform.machine()})"
    return f"{devices}, torch {torch.__version__}, {date.today()}"


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
