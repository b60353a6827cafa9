"""Do the tests notice a mistake? Plant many, one at a time, and see.

`list` draws a sample of mutants, `baseline` measures which test runs which line, `run` tests every
mutant, and `report` says how many died and shows those that did not. The mutants are cosmic-ray's;
what they are drawn from, mistakes planted by hand, and mutants that change nothing that a test
could see are in mutants.toml. A mutant lives in memory only: no file is changed.

The sample is of places: first a place in the code is drawn, then one of the mutants there, because
most operators have eleven ways to be wrong and would outweigh everything else. The order is random,
so those that were reached in time are a random sample too.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
KILLED = ("killed", "timeout")


def sample(count: int, seed: int) -> dict[str, object]:
    """Mutants at so many places, and how many places there are."""
    by_place: dict[tuple[Path, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    for file in sources():
        for operator, occurrence, place in mutations(file):
            by_place[file, place].append((operator, occurrence))
    rng = random.Random(seed)
    drawn: list[dict[str, object]] = []
    for file, place in rng.sample(sorted(by_place), len(by_place)):
        if len(drawn) == count:
            break
        operator, occurrence = rng.choice(by_place[file, place])
        mutant = make(file, operator, occurrence)
        if mutant is not None:
            drawn.append(mutant)
    every = sum(map(len, by_place.values()))
    return {"seed": seed, "places": len(by_place), "mutants": drawn, "all_mutants": every}


def sources() -> list[Path]:
    """The files that are mutated."""
    package = ROOT / "src" / "forerun"
    skipped = {package / name for name in SETTINGS["skip_files"]}
    found = [
        file for name in SETTINGS["packages"] for file in sorted((package / name).rglob("*.py"))
    ]
    return [file for file in found if file not in skipped]


def mutations(file: Path) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """(operator, its occurrence, where it begins) of every mutant of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast_from_path(file)))
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments() or name.removeprefix("core/") in SETTINGS["skip_operators"]:
            continue
        operator = operator_class()
        places = (place for node in nodes for place, _ in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            yield name, occurrence, place


def make(file: Path, operator: str, occurrence: int) -> dict[str, object] | None:
    """A mutant, or None if it changes only annotations."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = file.read_text()
    mutated = mutate_code(source, get_operator(operator)(), occurrence)
    if meaning(source) == meaning(mutated):
        return None
    return described(file, source, mutated, operator.removeprefix("core/"))


def meaning(source: str) -> str | None:
    """A module without what Python never looks at; None if it is not even Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def described(file: Path, source: str, mutated: str, operator: str) -> dict[str, object]:
    """The lines that change, and the lines that a test must run to see it."""
    was, becomes = source.splitlines(), mutated.splitlines()
    first = next(i for i, pair in enumerate(zip(was, becomes)) if pair[0] != pair[1])
    after = 0
    while after < min(len(was), len(becomes)) - first and was[-1 - after] == becomes[-1 - after]:
        after += 1
    return {
        "file": str(file.relative_to(ROOT)),
        "operator": operator,
        "line": first + 1,
        "was": was[first : len(was) - after],
        "becomes": becomes[first : len(becomes) - after],
        "runs": lines_to_run(ast.parse(source), first + 1),
    }


def lines_to_run(tree: ast.Module, line: int) -> list[int] | None:
    """The first and last line of the statement at a line, of a compound one only its head. None
    where the line runs when the module is imported."""
    statement: ast.AST = tree
    function = None
    body: list[ast.stmt] = tree.body
    while inside := [one for one in body if first_line(one) <= line <= (one.end_lineno or 0)]:
        [statement] = inside
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            function = statement
        body = [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)]
        body += [s for h in getattr(statement, "handlers", []) for s in h.body]
    if function is None:
        return None
    end = min([function.end_lineno or line, *(first_line(one) - 1 for one in body)])
    if statement is function:
        end = function.end_lineno or line
    return [first_line(statement), max(line, min(end, statement.end_lineno or line))]


def first_line(statement: ast.AST) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def planted() -> list[dict[str, object]]:
    """The mistakes of mutants.toml, which once survived."""
    found = []
    for mistake in SETTINGS["planted"]:
        file = ROOT / "src" / "forerun" / mistake["file"]
        source = file.read_text()
        mutated = source
        for was, becomes in mistake["changes"]:
            if mutated.count(was) != 1:
                raise SystemExit(f"mutants.toml: {was!r} must be in {mistake['file']} once.")
            mutated = mutated.replace(was, becomes)
        found.append(described(file, source, mutated, "planted: " + mistake["name"]))
    return found


def report(mutants: list[dict], results: list[dict]) -> str:
    """How many died, first and last, and who did not."""
    first: dict[int, dict] = {}
    last: dict[int, dict] = {}
    for result in results:
        first.setdefault(result["id"], result)
        last[result["id"]] = result
    drawn = [m for m in mutants if not m["operator"].startswith("planted")]
    said = [f"{len(last)} of {len(mutants)} mutants were run."]
    for name, found in (
        ("planted by hand", mutants[: len(mutants) - len(drawn)]),
        ("drawn", drawn),
    ):
        for when, outcomes in (("before", first), ("after", last)):
            said.append(f"{name}, {when}: {score([m for m in found if m['id'] in last], outcomes)}")
    said.append(f"outcomes: {dict(Counter(r['outcome'] for r in last.values()))}")
    seconds = [r["seconds"] for r in last.values()]
    said.append(f"seconds per mutant: {sum(seconds) / max(1, len(seconds)):.1f}")
    survivors = [m for m in mutants if m["id"] in last and last[m["id"]]["outcome"] not in KILLED]
    for mutant in sorted(survivors, key=lambda m: (m["file"], m["line"])):
        why = equivalent(mutant)
        said.append(f"\n{mutant['file']}:{mutant['line']} {mutant['operator']} (#{mutant['id']})")
        said += [f"  equivalent: {why}"] if why else []
        said += [f"  - {line.strip()}" for line in mutant["was"]]
        said += [f"  + {line.strip()}" for line in mutant["becomes"]]
    return "\n".join(said)


def score(mutants: list[dict], outcomes: dict[int, dict]) -> str:
    """Killed of those that are not equivalent, with Wilson's interval of 95 %."""
    alive = [m for m in mutants if outcomes[m["id"]]["outcome"] not in KILLED]
    same = sum(equivalent(m) is not None for m in alive)
    total = len(mutants) - same
    killed = len(mutants) - len(alive)
    if not total:
        return "none"
    p, z = killed / total, 1.96
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    interval = f"{middle - half:.1%} to {min(1, middle + half):.1%}"
    return f"{killed} of {total} killed, {p:.1%} ({interval}); {same} more are equivalent"


def equivalent(mutant: dict) -> str | None:
    """Why no test can see this mutant, if mutants.toml says so."""
    was = _text(mutant["was"])
    facts = {"was": was, "becomes": _text(mutant["becomes"]), "operator": mutant["operator"]}
    for one in SETTINGS["equivalent"]:
        here = mutant["file"].endswith(one.get("file", ""))
        same = all(one[name] == fact for name, fact in facts.items() if name in one)
        if here and same and re.fullmatch(one.get("like", ".*"), was):
            return one["why"]
    return None


def _text(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def runner(asked: argparse.Namespace):
    """Made only where it is needed: it imports all that tests import."""
    from mutant_runner import Runner

    return Runner(ROOT, asked.workers, asked.limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("command", choices=["list", "baseline", "run", "report"])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--count", type=int, default=600, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="stop after this")
    parser.add_argument("--tests-s", type=float, default=40, help="seconds of tests per mutant")
    parser.add_argument("--tests", nargs="+", default=SETTINGS["tests"], help="for the baseline")
    parser.add_argument("--again", action="store_true", help="run only those that survived")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    sample_file = asked.folder / "sample.json"
    results_file = asked.folder / "results.jsonl"
    if asked.command == "list":
        found = sample(asked.count, asked.seed)
        found["mutants"] = [
            {"id": i, **mutant} for i, mutant in enumerate([*planted(), *found["mutants"]])
        ]
        sample_file.write_text(json.dumps(found, indent=1))
        results_file.unlink(missing_ok=True)
        print(
            f"{len(found['mutants'])} mutants; {found['places']} places hold {found['all_mutants']}"
        )
        return
    if asked.command == "baseline":
        tests = [ROOT / name for name in asked.tests]
        runner(asked).baseline(tests, asked.folder / "baseline.jsonl")
        return
    mutants = json.loads(sample_file.read_text())["mutants"]
    results = read_lines(results_file)
    if asked.command == "report":
        print(report(mutants, results))
        return
    last = {result["id"]: result["outcome"] for result in results}
    if asked.again:
        mutants = [m for m in mutants if last.get(m["id"]) not in (None, *KILLED)]
    else:
        mutants = [m for m in mutants if m["id"] not in last]
    tests = read_lines(asked.folder / "baseline.jsonl")
    runner(asked).run(mutants, tests, asked.tests_s, results_file)


if __name__ == "__main__":
    main()
