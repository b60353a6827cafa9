"""Tasks that methods are judged on, and what each one measures. `forerun evaluate TASK` runs them.

- `scattered`: held-out text of which a share of tokens, at random places, is given (Guo & Ermon, Tables 1, 4, 5, 6 and 8).
- `stories`: one or three sentences of five are missing (Table 3). ROUGE against what stood there.
- `humaneval`: one line of a program is missing (Table 2). Does the program pass its tests?
- `functions`: a function's body is to be written after its signature and docstring (HumanEval). Does it pass its tests?
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate import sandbox
from forerun.evaluate.certify import laws_along
from forerun.evaluate.metrics import Mean, mean, rouge, shannon_entropy, t_test
from forerun.infilling import Infilled
from forerun.parameters import Sampling
from forerun.result import Result

Progress = Callable[[int, int], None]
Task = dict[str, str]
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")  # behind a function's body


@dataclass(frozen=True)
class How:
    """One way to decode, as it is named on the command line: METHOD or METHOD:DRAFT."""

    method: str
    draft: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, options: dict[str, Any]) -> How:
        """Options go to the methods that have them."""
        from forerun import registry

        method, _, draft = name.partition(":")
        known = registry.get("methods", method).option_names()
        return cls(method, draft or None, {k: v for k, v in options.items() if k in known})

    @property
    def label(self) -> str:
        own = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return self.method + (f" ({self.draft})" if self.draft else "") + (f" [{own}]" if own else "")


@dataclass
class Row:
    """What one way to decode did on a task."""

    how: str
    measures: dict[str, Mean]
    p_values: dict[str, float] = field(default_factory=dict)  # of having the first row's mean

    def as_dict(self) -> dict[str, Any]:
        return {"how": self.how, **{k: asdict(m) for k, m in self.measures.items()}, "p_values": self.p_values}


def decode(model: Model, how: How, canvases: Sequence[Any], batch: int, **options: Any) -> list[tuple[Infilled, float]]:
    """Fill every canvas (token ids with None), each with a seed of its own; with the seconds that each took, shared in a batch."""
    return list(_in_batches(_filling(model), how, canvases, batch, options))


def _filling(model: Model) -> Callable[..., Any]:
    return lambda canvases, **how: model.infill(token_ids=[list(c) for c in canvases], **how)


def _in_batches(
    decoding: Callable[..., Any], how: How, things: Sequence[Any], batch: int, options: dict[str, Any]
) -> Iterator[tuple[Any, float]]:
    for first in range(0, len(things), batch):
        some = things[first : first + batch]
        seed = options.get("seed", 0) * 1_000_003 + first
        began = time.perf_counter()
        results = decoding(some, method=how.method, draft=how.draft, **{**how.options, **options, "seed": seed})
        seconds = (time.perf_counter() - began) / len(some)
        for result in results:
            if result.error is not None:
                raise result.error
            yield result, seconds


def costs(how: How, results: Sequence[tuple[Infilled | Result, float]]) -> dict[str, list[float]]:
    """What each sequence took. A drafter of its own is called once per verdict, or runs forwards that are counted."""
    stats = [result.stats for result, _ in results]
    verdicts = [sum(bool(event.drafted) for event in result.trace) if how.draft else 0 for result, _ in results]
    return {
        "forwards": [s.forwards for s in stats],
        "drafter calls": [s.draft_forwards or calls for s, calls in zip(stats, verdicts)],
        "tokens/forward": [s.tokens / s.forwards for s in stats],
        "seconds": [seconds for _, seconds in results],
    }


def scattered_canvases(windows: np.ndarray, known: float, seed: int = 0) -> list[list[int | None]]:
    """A share of the tokens of each window, at random places; the others are blank."""
    rng = np.random.default_rng(seed)
    canvases = []
    for window in windows:
        given = set(rng.choice(len(window), max(1, round(known * len(window))), replace=False).tolist())
        canvases.append([int(t) if i in given else None for i, t in enumerate(window)])
    return canvases


def perplexity(judge: Model, tokens: Sequence[int]) -> float:
    """How surprised a left-to-right judge is by a sequence (equation 21)."""
    laws_TV = laws_along(judge, tokens[:1], tokens[1:], Sampling(temperature=1.0), frozenset())
    picked = laws_TV[np.arange(len(tokens) - 1), list(tokens[1:])].double().log()
    return math.exp(-float(picked.mean()))


def scattered(
    model: Model,
    hows: Sequence[How],
    windows: np.ndarray,
    *,
    known: float = 0.3,
    temperature: float = 1.0,
    batch: int = 1,
    judge: Model | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Row]:
    """Quality and cost of filling what is missing; p-values against the first way to decode."""
    if not 0 <= known < 1:
        raise BadOption(f"known={known!r} must be at least 0 and below 1.")
    canvases = scattered_canvases(windows, known, seed)
    samples: list[dict[str, list[float]]] = []
    for i, how in enumerate(hows):
        results = decode(model, how, canvases, batch, temperature=temperature, seed=seed + i)
        quality = {"entropy": [shannon_entropy(r.token_ids) for r, _ in results]}
        if judge is not None:
            quality["perplexity"] = [perplexity(judge, r.token_ids) for r, _ in results]
        samples.append({**quality, **costs(how, results)})
        progress(i + 1, len(hows))
    rows = [Row(how.label, {name: mean(values) for name, values in own.items()}) for how, own in zip(hows, samples)]
    for row, own in zip(rows[1:], samples[1:]):
        row.p_values = {name: t_test(own[name], samples[0][name]) for name in ("perplexity", "entropy") if name in own}
    return rows


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BadOption(f"data={file!r} cannot be read: {error}") from error


def _object(file: str, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadOption(f"{file}:{number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadOption(f"{file}:{number} is no JSON object.")
    return found


def read_stories(file: str) -> list[list[str]]:
    """Five sentences a story: JSON lines with "sentences", or lines of five fields with tabs between them."""
    stories = []
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        sentences = _object(file, number, line).get("sentences", ()) if line.lstrip().startswith("{") else line.split("\t")
        if len(sentences) != 5:
            raise BadOption(f"{file}:{number} has {len(sentences)} sentences, and a story has five.")
        stories.append([s.strip() for s in sentences])
    return stories


def stories(
    model: Model,
    hows: Sequence[How],
    told: Sequence[Sequence[str]],
    *,
    missing: Sequence[int] = (2,),
    trials: int = 5,
    temperature: float = 1.0,
    batch: int = 8,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Row]:
    """Sentences `missing` (from 0) are filled in, with as many tokens as stood there, and compared with them."""
    gaps = [_gap(model, " ".join(s[: missing[0]]), " ".join(s[i] for i in missing), " ".join(s[missing[-1] + 1 :])) for s in told]
    rows = []
    for i, how in enumerate(hows):
        results = decode(model, how, [canvas for canvas, _ in gaps] * trials, batch, temperature=temperature, seed=seed + i)
        scores = [rouge(" ".join(r.fills), truth) for (r, _), (_, truth) in zip(results, [*gaps] * trials)]
        quality = {name: [s[name] for s in scores] for name in scores[0]}
        rows.append(Row(how.label, {name: mean(v) for name, v in {**quality, **costs(how, results)}.items()}))
        progress(i + 1, len(hows))
    return rows


def _gap(model: Model, before: str, truth: str, after: str) -> tuple[list[int | None], str]:
    """A canvas that misses the tokens of `truth`, boundary tokens included, and the text that stood there."""
    before, after = before + " " if before else "", " " + after if after else ""
    encoded = model.tokenizer(before + truth + after, add_special_tokens=False, return_offsets_mapping=True)  # type: ignore[misc]
    start, end = len(before), len(before) + len(truth)
    return [None if a < end and b > start else token for token, (a, b) in zip(encoded.input_ids, encoded.offset_mapping)], truth


def read_programs(file: str, fields: Sequence[str] = ("suffix", "canonical_solution")) -> list[Task]:
    """HumanEval tasks: JSON lines with prompt, test and entry_point; where a line is missing, also with suffix and solution."""
    tasks = [_object(file, number, line) for number, line in enumerate(_lines(file), 1) if line.strip()]
    for number, task in enumerate(tasks, 1):
        absent = {"prompt", "test", "entry_point", *fields} - task.keys()
        if absent:
            raise BadOption(f"{file}: task {number} has no {', '.join(sorted(absent))}.")
    return tasks


def humaneval(model: Model, hows: Sequence[How], tasks: Sequence[Task], *, temperature: float = 0.0, **how: Any) -> list[Row]:
    """The missing line is filled in, with as many tokens as stood there."""
    gaps = {i: _line_gap(model, task) for i, task in enumerate(tasks)}
    fitting = {i: gap for i, gap in gaps.items() if len(gap) <= model.context}
    options = dict(temperature=temperature)
    return _pass_rates(hows, tasks, fitting, _filling(model), lambda i, result: model.decode(result.token_ids), options, **how)


def functions(
    model: Model, hows: Sequence[How], tasks: Sequence[Task], *, temperature: float = 0.0, longest: int = 256, **how: Any
) -> list[Row]:
    """The body is written after signature and docstring, up to the first line that belongs to something else."""
    prompts = [task["prompt"].rstrip() for task in tasks]  # a line break and half an indentation would be odd tokens to go on from
    lengths = [len(model.tokenizer(prompt).input_ids) for prompt in prompts]  # type: ignore[misc]
    fitting = {i: prompt for i, prompt in enumerate(prompts) if lengths[i] + longest <= model.context}
    options = dict(temperature=temperature, max_tokens=longest, stop=ENDS)
    return _pass_rates(hows, tasks, fitting, model.generate, lambda i, result: prompts[i] + result.text, options, **how)


def _pass_rates(
    hows: Sequence[How],
    tasks: Sequence[Task],
    fitting: dict[int, Any],
    decoding: Callable[..., Any],
    program: Callable[[int, Any], str],
    options: dict[str, Any],
    *,
    trials: int = 1,
    batch: int = 8,
    seed: int = 0,
    seconds: float = 5.0,
    progress: Progress = lambda done, total: None,
) -> list[Row]:
    """pass@1 is the share of programs that pass their tests: `decoding` is given what stands for every task that fits, and
    `program` makes the program of what comes back."""
    turns, rows = [*fitting] * trials, []
    for number, how in enumerate(hows):
        passed, results = [], []
        own = {**options, "seed": seed + number}
        for i, found in zip(turns, _in_batches(decoding, how, [fitting[i] for i in turns], batch, own)):
            whole = "\n".join([program(i, found[0]), tasks[i]["test"], f"check({tasks[i]['entry_point']})"])
            passed.append(100.0 * sandbox.run(whole, seconds).passed)
            results.append(found)
            progress(number * len(turns) + len(passed), len(hows) * len(turns))
        passed += [0.0] * (len(tasks) - len(fitting)) * trials  # a task that does not fit is a task not solved
        rows.append(Row(how.label, {"pass@1": mean(passed), **{k: mean(v) for k, v in costs(how, results).items()}}))
    return rows


def _line_gap(model: Model, task: Task) -> list[int | None]:
    """The canvas of a task. Tokens that reach over the edge of the missing line (an indentation's line break) are missing too."""
    text = task["prompt"] + task["canonical_solution"] + task["suffix"]
    start, end = len(task["prompt"]), len(task["prompt"]) + len(task["canonical_solution"].rstrip("\n"))
    encoded = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # type: ignore[misc]
    return [None if a < end and b > start else token for token, (a, b) in zip(encoded.input_ids, encoded.offset_mapping)]
