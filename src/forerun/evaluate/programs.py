"""The tasks `humaneval`, where one line of a program is missing (Guo & Ermon, Table 2), and
`functions`, where the body of a function is (HumanEval). Does the program pass its tests?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate import sandbox
from forerun.evaluate.metrics import mean
from forerun.evaluate.tasks import (
    Gapped,
    MethodChoice,
    R,
    TaskRow,
    TaskSettings,
    Timed,
    costs,
    fill,
    in_batches,
    means,
    parse_object,
    read_lines,
    token_ids,
    with_gap,
)
from forerun.profile.progress import Progress, no_progress
from forerun.requests.result import Result

# What stands behind a function's body.
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")


@dataclass(frozen=True)
class ProgramTask:
    """A program to complete, and its test."""

    prompt: str
    test: str
    entry_point: str
    canonical_solution: str = ""  # the missing line
    suffix: str = ""

    @property
    def reference(self) -> str:
        """The whole program, as the task has it."""
        return self.prompt + self.canonical_solution + self.suffix

    def passes(self, program: str, limits: sandbox.Limits) -> bool:
        trial = sandbox.Trial(program, self.test, self.entry_point, given=self.reference)
        return sandbox.run(trial, limits).passed


@dataclass(frozen=True)
class ProgramSettings(TaskSettings):
    """How programs are decoded and tested."""

    temperature: float = 0.0
    batch: int = 8
    seconds: float = 5.0  # that a program may run
    longest: int = 256  # tokens of a function's body
    allow_code: bool = False  # run programs even where they cannot be isolated

    @cached_property
    def limits(self) -> sandbox.Limits:
        """Of a program. Refused where it cannot be isolated, unless that is allowed."""
        return sandbox.limits_for(self.seconds, self.allow_code)


def read_programs(
    file: str, fields: Sequence[str] = ("suffix", "canonical_solution")
) -> list[ProgramTask]:
    """HumanEval tasks: JSON lines with prompt, test and entry_point; where a line is missing, also
    with suffix and solution."""
    lines = [(number, line) for number, line in enumerate(read_lines(file), 1) if line.strip()]
    objects = [parse_object(file, number, line) for number, line in lines]
    tasks = []
    for number, task in enumerate(objects, 1):
        absent = {"prompt", "test", "entry_point", *fields} - task.keys()
        if absent:
            raise BadOption(f"{file}: task {number} has no {', '.join(sorted(absent))}.")
        tasks.append(
            ProgramTask(
                prompt=task["prompt"],
                test=task["test"],
                entry_point=task["entry_point"],
                canonical_solution=task.get("canonical_solution", ""),
                suffix=task.get("suffix", ""),
            )
        )
    return tasks


def humaneval(
    model: Model,
    choices: Sequence[MethodChoice],
    tasks: Sequence[ProgramTask],
    settings: ProgramSettings | None = None,
    progress: Progress = no_progress,
) -> list[TaskRow]:
    """The missing line is filled in, with as many tokens as stood there."""
    settings = settings or ProgramSettings()
    gaps = [_line_gap(model, task) for task in tasks]
    fitting = [i for i, gap in enumerate(gaps) if len(gap) <= model.context]
    scorer = PassScorer(tasks, fitting, settings, progress)
    canvases = [gaps[i] for i in scorer.turns]
    return scorer.rows(
        choices,
        decode=lambda choice, number: fill(model, choice, canvases, settings, number),
        program=lambda i, result: model.decode(result.token_ids),
    )


def functions(
    model: Model,
    choices: Sequence[MethodChoice],
    tasks: Sequence[ProgramTask],
    settings: ProgramSettings | None = None,
    progress: Progress = no_progress,
) -> list[TaskRow]:
    """The body is written after signature and docstring, up to the first line that belongs to
    something else."""
    settings = settings or ProgramSettings()
    # A line break and half an indentation would be odd tokens to go on from.
    prompts = [task.prompt.rstrip() for task in tasks]
    lengths = [len(token_ids(model, prompt)) for prompt in prompts]
    fitting = [i for i, n in enumerate(lengths) if n + settings.longest <= model.context]
    scorer = PassScorer(tasks, fitting, settings, progress)
    return scorer.rows(
        choices,
        decode=lambda choice, number: _write_bodies(
            model, choice, [prompts[i] for i in scorer.turns], settings, number
        ),
        program=lambda i, result: prompts[i] + result.text,
    )


def _write_bodies(
    model: Model,
    choice: MethodChoice,
    prompts: Sequence[str],
    settings: ProgramSettings,
    number: int,
) -> Iterator[Timed[Result]]:
    def generate(group: Sequence[str], seed: int) -> list[Result]:
        return model.generate_all(
            group,
            method=choice.method,
            draft=choice.draft,
            temperature=settings.temperature,
            max_tokens=settings.longest,
            stop=ENDS,
            seed=seed,
            **choice.options,
        )

    return in_batches(generate, prompts, settings, number)


class PassScorer:
    """Runs the programs that methods complete. pass@1 is the share that pass their tests."""

    def __init__(
        self,
        tasks: Sequence[ProgramTask],
        fitting: Sequence[int],
        settings: ProgramSettings,
        progress: Progress,
    ):
        self.tasks = tasks
        self.limits = settings.limits
        self.progress = progress
        self.turns = [*fitting] * settings.trials  # the tasks that fit, by index
        # a task that does not fit is a task not solved
        self.unsolved = (len(tasks) - len(fitting)) * settings.trials

    def rows(
        self,
        choices: Sequence[MethodChoice],
        decode: Callable[[MethodChoice, int], Iterator[Timed[R]]],
        program: Callable[[int, R], str],
    ) -> list[TaskRow]:
        """`decode(choice, number)` gives a result for every turn, and `program(i, result)` makes
        the program of task i of it."""
        rows = []
        total = len(choices) * len(self.turns)
        for number, choice in enumerate(choices):
            passed: list[float] = []
            timed = []
            for i, one in zip(self.turns, decode(choice, number)):
                passes = self.tasks[i].passes(program(i, one.result), self.limits)
                passed.append(100.0 * passes)
                timed.append(one)
                self.progress(number * len(self.turns) + len(passed), total)
            passed += [0.0] * self.unsolved
            measures = {"pass@1": mean(passed), **means(costs(choice, timed))}
            rows.append(TaskRow(choice.label, measures))
        return rows


def _line_gap(model: Model, task: ProgramTask) -> Gapped:
    """The canvas of a task. The line break at the end of the missing line is given."""
    start = len(task.prompt)
    return with_gap(model, task.reference, start, start + len(task.canonical_solution.rstrip("\n")))
