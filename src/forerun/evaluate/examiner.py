"""What grades answers: a sandbox for programs, and a judge at an address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from forerun.evaluate import sandbox
from forerun.evaluate.benchmarks.chats import ask_judge


@dataclass(frozen=True)
class SandboxExaminer:
    """Runs programs in isolation, or refuses where that cannot be had, unless it is allowed.

    `judge` is the address of an OpenAI-compatible server, `judge_model` the model to ask there.
    """

    seconds: float = 5.0  # that a program may run
    allow_code: bool = False  # run programs even where they cannot be isolated
    judge: str | None = None
    judge_model: str = "default"

    @cached_property
    def limits(self) -> sandbox.Limits:
        return sandbox.limits_for(self.seconds, self.allow_code)

    def passes(self, program: str, test: str, entry_point: str, given: str = "") -> bool:
        trial = sandbox.Trial(program, test, entry_point, given)
        return sandbox.run(trial, self.limits).passed

    def rate(self, question: str, answer: str) -> float | None:
        if self.judge is None:
            return None
        return ask_judge(self.judge, self.judge_model, question, answer)
