"""The tables and figures of the five papers, by one command each, at our scale:

    python bench/papers.py --list
    python bench/papers.py SSD-table-1 [NAME ...] --data DATA [--count N] [--tokens N] [--seed N]
    python bench/papers.py --page

DATA is a folder of .py files or a .jsonl[.xz] corpus; prompts are 64 tokens of its held-out
documents. All rows of a table decode the same prompts in turns, one prompt at a time, so speeds are
compared prompt by prompt; ± is a standard error over prompts. `--device cuda` and `--swap
zoo:masked=MODEL` run the same at full size. Results go to docs/papers.json; `--page` writes the
table of docs/papers.md from them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from page import DOCS, write_tables
from papers_list import TABLES, PaperTable, Spec
from study import over_seeds, read_rows

import forerun
from forerun import zoo
from forerun.evaluate.ar_ness import order_report
from forerun.evaluate.estimators import estimator_errors
from forerun.evaluate.judge import surprises
from forerun.evaluate.scattered import scattered_canvases
from forerun.evaluate.ssd_limit import ssd_limit
from forerun.profile.latency import forward_seconds
from forerun.profile.machine import machine
from forerun.train.data import held_out_windows

REPORT = DOCS / "papers.json"
GIVEN = 64
JUDGE = "zoo:ar"
MEASURES = {"n = 64": "tokens/forward at n = 64", "nats": "nats under zoo:ar"}  # of studies

Row = dict[str, Any]


@dataclass
class Bench:
    """Models, loaded once, and the text that they are asked to continue."""

    arguments: argparse.Namespace
    windows: np.ndarray
    models: dict[str, forerun.Model] = field(default_factory=dict)

    def model(self, name: str) -> forerun.Model:
        swapped = dict(pair.split("=", 1) for pair in self.arguments.swap)
        if name not in self.models:
            device = self.arguments.device
            self.models[name] = forerun.load(swapped.get(name, name), lanes=1, device=device)
        return self.models[name]

    @property
    def prompts(self) -> list[list[int]]:
        return self.windows[:, :GIVEN].tolist()

    @property
    def truths(self) -> list[list[int]]:
        return self.windows[:, GIVEN:].tolist()


@dataclass
class Measured:
    """What one row did on every prompt."""

    spec: Spec
    results: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def decode(bench: Bench, spec: Spec, number: int) -> Any:
    """One prompt: its continuation, or the blanks of a text where the table leaves `blank` ones."""
    model = bench.model(spec.model)
    options = dict(spec.options)
    if "draft" in options and str(options["draft"]).startswith("zoo:"):
        options["draft"] = bench.model(options["draft"])
    common = dict(method=spec.method, seed=bench.arguments.seed + number, ignore_eos=True)
    blank = options.pop("blank", None)
    length = options.pop("length", GIVEN + bench.arguments.tokens)
    if blank is None:
        options.setdefault("max_tokens", bench.arguments.tokens)
        return model.generate_all([bench.prompts[number]], **common, **options)[0]
    common.pop("ignore_eos")
    window = bench.windows[number : number + 1, :length]
    canvases = scattered_canvases(window, 1 - blank, bench.arguments.seed + number)
    return model.infill_all(canvases, **common, **options)[0]


def in_turns(bench: Bench, specs: Sequence[Spec]) -> list[Measured]:
    """All rows on the first prompt, then on the next; the first turn warms up and is done again."""
    rows = [Measured(spec) for spec in specs]
    for number in [0, *range(len(bench.windows))]:
        for row in rows:
            began = time.perf_counter()
            result = decode(bench, row.spec, number)
            row.seconds.append(time.perf_counter() - began)
            row.results.append(result)
    for row in rows:
        del row.results[0], row.seconds[0]
    return rows


def mean_and_error(values: Sequence[float]) -> list[float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return [statistics.mean(values), error]


def row_of(bench: Bench, row: Measured, first: Measured) -> Row:
    """Means and standard errors over prompts; speed against the first row, prompt by prompt."""
    stats = [result.stats for result in row.results]
    alphas = [one.alpha for one in stats if one.alpha is not None]
    pace = [one.tokens / s for one, s in zip(stats, row.seconds)]
    first_pace = [r.stats.tokens / s for r, s in zip(first.results, first.seconds)]
    pairs = list(zip(row.results, first.results))
    found: Row = {
        "label": row.spec.label,
        "model": row.spec.model,
        "tokens/forward": mean_and_error([one.tokens_per_forward for one in stats]),
        "saved": 1 - sum(one.forwards for one in stats) / sum(one.tokens for one in stats),
        "draft forwards": sum(one.draft_forwards for one in stats),
        "alpha": mean_and_error(alphas) if len(alphas) > 1 else None,
        "speed": mean_and_error([a / b for a, b in zip(pace, first_pace)]),
        "same": statistics.mean(a.token_ids == b.token_ids for a, b in pairs),
        "guarantee": row.results[0].guarantee,
        "accepted": accepted_lengths(stats),
    }
    if "blank" not in row.spec.options:
        found |= quality(bench, row)
    return found


def accepted_lengths(stats: Sequence[Any]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for one in stats:
        for length, count in one.acceptance_histogram.items():
            lengths[length] = lengths.get(length, 0) + count
    return dict(sorted(lengths.items()))


def quality(bench: Bench, row: Measured) -> Row:
    """By a judge, and without one: the share of tokens that are those of the held-out text."""
    outputs = [result.token_ids for result in row.results]
    texts = [(p, o) for p, o in zip(bench.prompts, outputs) if o]
    right = [
        statistics.mean(a == b for a, b in zip(output, truth)) if output else 0.0
        for output, truth in zip(outputs, bench.truths)
    ]
    nats = mean_and_error(surprises(bench.model(JUDGE), texts))
    return {"nats": nats, "true tokens": mean_and_error(right)}


def compare(bench: Bench, table: PaperTable) -> list[Row]:
    rows = in_turns(bench, table.specs)
    firsts = {row.spec.model: row for row in reversed(rows)}
    against = rows[0] if table.against_first else None
    return [row_of(bench, row, against or firsts[row.spec.model]) for row in rows]


def limits(bench: Bench, _: PaperTable) -> list[Row]:
    found = ssd_limit(bench.model("zoo:masked"), bench.prompts, max_tokens=bench.arguments.tokens)
    return [
        {"label": f"N = {one.drafts}, k = {one.top}", "saved": one.reduction, "bound": one.bound}
        for one in found
    ]


def estimators(bench: Bench, _: PaperTable) -> list[Row]:
    model = bench.model("zoo:block")
    found = estimator_errors(
        model, bench.prompts, block=16, max_tokens=bench.arguments.tokens, seed=bench.arguments.seed
    )
    return [
        {"label": f"{e.estimator} {e.strength:g}", "error": [e.bias, e.spread], "mae": e.absolute}
        for e in found
    ]


def orders(bench: Bench, table: PaperTable) -> list[Row]:
    rows = []
    for spec in table.specs:
        options = {**spec.options, "method": spec.method, "logprobs": 0, "ignore_eos": True}
        found = bench.model(spec.model).generate_all(
            bench.prompts, max_tokens=bench.arguments.tokens, seed=bench.arguments.seed, **options
        )
        report = order_report(found, spec.label, 16, ks=3)
        rows.append({"label": spec.label, "local": report.local, "global": report.overall})
    return rows


def latency(bench: Bench, _: PaperTable) -> list[Row]:
    seconds = forward_seconds(bench.model(JUDGE))
    first = seconds[min(seconds)]
    return [{"label": f"{n} tokens", "over one token": s / first} for n, s in seconds.items()]


RUNNERS: dict[str, Callable[[Bench, PaperTable], list[Row]]] = {
    "compare": compare,
    "limits": limits,
    "estimators": estimators,
    "orders": orders,
    "latency": latency,
}


def load_report() -> dict[str, Any]:
    return json.loads(REPORT.read_text()) if REPORT.exists() else {}


def plain(value: Any) -> Any:
    """Numbers of a report with as many digits as mean something."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 4)
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value


def run(names: Sequence[str], arguments: argparse.Namespace) -> None:
    longest = [s.options.get("length", 0) for name in names for s in TABLES[name].specs]
    length = max(GIVEN + arguments.tokens, *longest, 0)
    windows = held_out_windows(arguments.data, zoo.tokenizer(), arguments.count, length)
    bench = Bench(arguments, windows)
    for name in names:
        table = TABLES[name]
        if table.runner is None:
            sys.exit(f"{name}: {table.needs}. {table.command}")
        rows = plain(RUNNERS[table.runner](bench, table))
        report = load_report()
        report[name] = {
            "machine": machine(),
            "prompts": arguments.count,
            "tokens": arguments.tokens,
            "seed": arguments.seed,
            "rows": rows,
        }
        REPORT.write_text(json.dumps(report, indent=1))
        print(f"{name}: {table.title}")
        for row in rows:
            print("  " + in_words(row))


def in_words(row: Row) -> str:
    """A row as one line."""
    words = [row["label"]]
    for key, value in row.items():
        if value is None or key in ("label", "model", "accepted", "guarantee"):
            continue
        if isinstance(value, list) and len(value) == 2 and key not in ("local", "global"):
            words.append(f"{key} {value[0]} ± {value[1]}")
        else:
            words.append(f"{key} {value}")
    return "; ".join(words)


def state(table: PaperTable, report: dict[str, Any]) -> str:
    if table.name in report:
        return f"measured, {report[table.name]['machine']}"
    if table.study and study_words(table):
        return f"measured, docs/{table.study}"
    if table.runner is None:
        return f"needs: {table.needs}" if table.needs else f"elsewhere: {table.command}"
    return "not run yet"


def show_list() -> None:
    report = load_report()
    for table in TABLES.values():
        print(f"{table.name:18} {table.title:62} {state(table, report)}")


def result_words(table: PaperTable, report: dict[str, Any]) -> str:
    """Our numbers, as the page shows them."""
    if table.study and (words := study_words(table)):
        return words
    if table.name not in report:
        needs = f": needs {table.needs.removeprefix('a GPU: ')}" if table.needs else ""
        return table.result or f"not run here{needs}"
    measured = report[table.name]
    rows = [short(row, table.shows) for row in measured["rows"]]
    about = f"{measured['prompts']} prompts of {measured['tokens']} tokens, seed {measured['seed']}"
    return "; ".join(rows) + f" ({about})"


def study_words(table: PaperTable) -> str:
    """The recipes of a training study that were run, over their seeds."""
    rows = [row | row.get("curve", [{}])[-1] for row in read_rows(DOCS / table.study)]
    parts, seeds = [], set()
    for recipe in table.recipes:
        if of_recipe := [row for row in rows if row["recipe"] == recipe]:
            cells = ["{:.2f} ± {:.2f}".format(*over_seeds(of_recipe, key)) for key in table.shows]
            parts.append(f"{recipe} {', '.join(cells)}")
            seeds.add(str(len(of_recipe)))
    if not parts:
        return ""
    shown = ", ".join(MEASURES.get(key, key) for key in table.shows)
    about = f"{' to '.join(sorted(seeds))} seeds, {rows[-1]['steps']} steps, docs/{table.study}"
    return f"{shown}: {'; '.join(parts)} ({about})"


def short(row: Row, shows: Sequence[str]) -> str:
    cells = []
    for key in shows:
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, list) and key not in ("local", "global"):
            cells.append(f"{value[0]:.2f}" + (f" ± {value[1]:.2f}" if value[1] is not None else ""))
        elif isinstance(value, list):
            cells.append("/".join(f"{one:.2f}" for one in value))
        elif key in ("saved", "bound", "same"):
            cells.append(f"{value:.0%}")
        else:
            cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
    return f"{row['label']} {', '.join(cells)}"


def write_page() -> None:
    report = load_report()
    lines = [
        "| table or figure | command | ours | the paper's | agrees | why |",
        "|---|---|---|---|---|---|",
    ]
    for table in TABLES.values():
        command = table.command or f"bench/papers.py {table.name}"
        ours = result_words(table, report)
        if table.shows and table.name in report:
            ours = f"{', '.join(table.shows)}: {ours}"
        cells = (table.name, f"`{command}`", ours, table.theirs, table.agrees, table.why)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    machines = sorted({entry["machine"] for entry in report.values()})
    lines += ["", f"Measured on: {'; '.join(machines)}; shared, so speeds are ratios in turns."]
    write_tables("papers.md", "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*TABLES, []], metavar="NAME")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--swap", nargs="*", default=[], metavar="ZOO=MODEL")
    parser.add_argument("--list", action="store_true", help="every table with its state")
    parser.add_argument("--page", action="store_true", help="write docs/papers.md")
    arguments = parser.parse_args()
    if arguments.list:
        show_list()
    if arguments.names:
        if arguments.data is None:
            parser.error("--data is needed: a folder of .py files, or a .jsonl[.xz] corpus")
        arguments.data = str(arguments.data)
        run(arguments.names, arguments)
    if arguments.page:
        write_page()


if __name__ == "__main__":
    main()
