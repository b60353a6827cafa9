"""Real models on standard benchmarks, by every method: answers as JSON lines, and a summary.

    python bench/evaluate_real.py --out OUT --data DATA \\
        --model DIR --dtype float32 bfloat16 --task gsm8k humaneval --method ar lookup jacobi

Needs torch, transformers and NumPy only. What is in OUT already is not asked again, so a run that
was cut short goes on where it was. `--seconds` bounds the whole run: each method of each task gets
an equal share of what is left, and answers the first items first.
`--grade-later` leaves out grading, where processes are slow to start: then
`python bench/evaluate_real.py --out OUT --grade --task ... --data DATA` grades what is in OUT.
`python bench/evaluate_real.py --out OUT --report docs/evaluation.md` writes the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import forerun
from forerun.errors import ForerunError
from forerun.evaluate.answers import AnswerFile
from forerun.evaluate.asking import Style
from forerun.evaluate.benchmarks.base import Benchmark, Data, Item, find_file
from forerun.evaluate.benchmarks.catalogue import benchmark_named
from forerun.evaluate.evaluation import Evaluation, Grader
from forerun.evaluate.examiner import SandboxExaminer
from forerun.evaluate.report import frontier, markdown, page
from forerun.evaluate.summary import summarise_folder
from forerun.evaluate.tasks import MethodChoice
from forerun.registry import method_named

START = "<!-- answers: bench/evaluate_real.py writes this part -->"
END = "<!-- end of answers -->"
LARGEST = 16_000_000  # bytes of a file


def main() -> None:
    flags = parse(sys.argv[1:])
    if flags.model:
        run_all(flags)
    if flags.grade:
        grade_all(flags)
    write_summary(Path(flags.out))
    if flags.report:
        write_report(Path(flags.out), Path(flags.report))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder of the answers")
    parser.add_argument("--model", nargs="*", default=[], help="directories or names")
    parser.add_argument("--dtype", nargs="*", default=["float32"])
    parser.add_argument(
        "--task", nargs="*", default=["gsm8k"], help="TASK or TASK=FILE, for a file of its own"
    )
    parser.add_argument("--data", default=".", help="folder of the benchmarks' files")
    parser.add_argument(
        "--method", nargs="*", default=["ar"], help="METHOD[:DRAFT][@OPTION=VALUE...]"
    )
    parser.add_argument("--count", type=int, default=None, help="items of each task")
    parser.add_argument("--shots", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--lanes", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--max-context", type=int, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="for the whole run")
    parser.add_argument("--no-chat", action="store_true", help="use no chat template")
    parser.add_argument("--allow-code", action="store_true", help="even without isolation")
    parser.add_argument("--grade-later", action="store_true", help="only write answers")
    parser.add_argument("--grade", action="store_true", help="grade the answers that are there")
    parser.add_argument("--report", default=None, help="write the tables into this page")
    return parser.parse_args(words)


@dataclass
class Clock:
    """Shares the time that is left among the methods that are still to come."""

    seconds: float | None
    parts: int

    def __post_init__(self) -> None:
        self.start = time.monotonic()

    def share(self) -> float | None:
        if self.seconds is None:
            return None
        left = self.seconds - (time.monotonic() - self.start)
        part = max(0.0, left) / max(1, self.parts)
        self.parts -= 1
        return part


def run_all(flags: argparse.Namespace) -> None:
    tasks = [read_task(word, flags) for word in flags.task]
    parts = len(flags.model) * len(flags.dtype) * len(tasks) * len(flags.method)
    clock = Clock(flags.seconds, parts)
    for name in flags.model:
        for dtype in flags.dtype:
            began = time.monotonic()
            model = forerun.load(
                name,
                device=flags.device,
                dtype=dtype,
                lanes=flags.lanes,
                max_context=flags.max_context,
            )
            say(f"{name} {dtype}: loaded in {time.monotonic() - began:.1f} s")
            for task in tasks:
                evaluation = evaluation_of(flags, model, task)
                for word in flags.method:
                    evaluation.seconds = clock.share()
                    run_one(evaluation, word)
            model.close()


Task = tuple[Benchmark, list[Item], dict[str, object]]


def read_task(word: str, flags: argparse.Namespace) -> Task:
    name, _, file = word.partition("=")
    benchmark = benchmark_named(name)
    path = find_file(benchmark, file or flags.data)
    items = benchmark.read(Data(path, flags.shots))[: flags.count]
    return benchmark, items, {"data": Path(path).stem, "shots": flags.shots}


def evaluation_of(flags: argparse.Namespace, model: forerun.Model, task: Task) -> Evaluation:
    benchmark, items, shown = task
    return Evaluation(
        model,
        benchmark,
        items,
        flags.out,
        Style(flags.temperature, flags.samples, flags.seed, not flags.no_chat, flags.max_tokens),
        SandboxExaminer(allow_code=flags.allow_code),
        shown=shown,
        grade_later=flags.grade_later,
    )


def grade_all(flags: argparse.Namespace) -> None:
    """Grade every answer of these tasks in the folder that has no score yet."""
    for word in flags.task:
        benchmark, items, _ = read_task(word, flags)
        grader = Grader(benchmark, SandboxExaminer(allow_code=flags.allow_code))
        for path in sorted(Path(flags.out).glob(f"{benchmark.name}.*.jsonl")):
            file = AnswerFile.read(path)
            grader.grade(file, items)
            say(f"{path.name}: {len(file.scores)} graded")


def run_one(evaluation: Evaluation, word: str) -> None:
    """One method. Answers that are the same as another method's are graded once."""
    model = evaluation.model
    name = f"  {evaluation.benchmark.name} {word}"
    choice = MethodChoice.read(word, {})
    if not method_named(choice.method).runs_on(model.family):
        say(f"{name}: does not run on family '{model.family.name}'")
        return
    began = time.monotonic()
    try:
        [file] = evaluation.run([choice])
    except ForerunError as error:
        say(f"{name}: {error}")
        return
    took = time.monotonic() - began
    say(f"{name}: {len(file.scores)} of {len(evaluation.items)} answers, {took:.1f} s")
    if file.file.stat().st_size > LARGEST:
        say(f"    {file.file} is larger than {LARGEST} bytes")


def say(words: str) -> None:
    print(words, flush=True)


def write_summary(out: Path) -> None:
    panels = summarise_folder(out)
    summary = [[one.as_dict() for one in panel] for panel in panels]
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (out / "summary.md").write_text("\n".join(markdown(panel) for panel in panels))
    (out / "summary.html").write_text(page(panels))
    for panel in panels:
        say(markdown(panel))


def write_report(out: Path, report: Path) -> None:
    """Tables and picture of docs/evaluation.md, between its marks."""
    panels = summarise_folder(out)
    text = ""
    for task in dict.fromkeys(panel[0].settings["task"] for panel in panels):
        own = [panel for panel in panels if panel[0].settings["task"] == task]
        text += f"### {task}\n\n" + "\n".join(map(markdown, own)) + "\n"
        if any(len(panel) > 1 for panel in own):  # one method is beside nothing
            picture = report.with_name(f"{report.stem}-{task}.svg")
            picture.write_text(frontier(own))
            text += f"![{task}: quality against speed]({picture.name})\n\n"
    before, rest = report.read_text().split(START)
    after = rest.split(END)[1]
    report.write_text(f"{before}{START}\n\n{text}{END}{after}")


if __name__ == "__main__":
    main()
