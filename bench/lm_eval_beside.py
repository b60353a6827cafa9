"""lm-evaluation-harness: our model class beside its own `hf` class, on the same weights.

    python bench/lm_eval_beside.py --model DIR --data FOLDER-OF-GSM8K [--gguf FILE] --limit 40

Writes the table of docs/evaluation.md with --report. The tasks are in bench/lm_eval_tasks: one of
each kind of request.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import forerun
from forerun.evaluate.harness import ForerunLM
from forerun.profile.machine import machine

TASKS = Path(__file__).with_name("lm_eval_tasks").resolve()
START = "<!-- lm-eval: bench/lm_eval_beside.py writes this part -->"
END = "<!-- end of lm-eval -->"


def main() -> None:
    flags = parse()
    report = Path(flags.report).resolve() if flags.report else None
    settings = {"gguf_file": flags.gguf} if flags.gguf else {}
    folder = str(Path(flags.model).resolve())
    tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()
    ours = forerun.from_network(network, tokenizer, lanes=flags.batch, max_context=1024)
    os.chdir(flags.data)
    columns = {"`hf`": HFLM(pretrained=network, tokenizer=tokenizer, batch_size=1, max_length=1023)}
    for method in flags.method:
        columns[f"`forerun`, `{method}`"] = ForerunLM(ours, method=method)
    found = {}
    for name, lm in columns.items():
        began = time.perf_counter()
        found[name] = evaluated(lm, flags.task, flags.limit)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    name = Path(flags.gguf or flags.model).stem
    text = table(found) + f"\n{name}, float32; {flags.limit} items of each; {machine()}.\n"
    print(text)
    if report is not None:
        before, rest = report.read_text().split(START)
        after = rest.split(END)[1]
        report.write_text(f"{before}{START}\n\n{text}\n{END}{after}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--gguf", default=None, help="the .gguf file in that folder, if it is one")
    parser.add_argument("--data", required=True, help="the folder of GSM8K's test.jsonl")
    parser.add_argument("--method", nargs="*", default=["ar", "lookup"])
    parser.add_argument("--task", nargs="*", default=["gsm8k_text", "gsm8k_steps", "gsm8k_plain"])
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--report", default=None, help="write the table into this page")
    return parser.parse_args()


def evaluated(lm: object, tasks: list[str], limit: int) -> dict[str, float]:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    report = simple_evaluate(
        lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return {
        f"{task}: {metric.partition(',')[0]}": value
        for task, results in report["results"].items()
        for metric, value in results.items()
        if isinstance(value, float)
    }


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["| task: metric | " + " | ".join(found) + " |", "|" + "---|" * (len(found) + 1)]
    for measure in next(iter(found.values())):
        values = [f"{column[measure]:.5f}" for column in found.values()]
        lines.append(f"| {measure} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
