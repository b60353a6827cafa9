"""bench/study.py: rows of training studies, in files that several processes write."""

import runpy
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(ROOT / "bench" / "study.py"))


def row(recipe, seed, value=1.0):
    return {"recipe": recipe, "seed": seed, "value": value}


def test_processes_share_a_folder_and_what_it_holds_is_not_run_again(study, tmp_path):
    first, second = (study["Results"](tmp_path, seed) for seed in (0, 1))
    first.add(row("a", 0))
    second.add(row("a", 1))
    again = study["Results"](tmp_path, 0)
    asked = []

    def run_one(recipe, seed):
        asked.append((recipe, seed))
        return row(recipe, seed)

    runs = [("a", 0), ("a", 1), ("b", 0)]
    study["run_in_time"](again, runs, time.perf_counter() + 60, run_one)
    assert asked == [("b", 0)]
    assert [study["run_of"](found) for found in again.rows] == [("a", 0), ("b", 0)]


def test_no_run_begins_once_time_is_up(study, tmp_path):
    results = study["Results"](tmp_path, None)
    study["run_in_time"](results, [("a", 0)], time.perf_counter() - 1, lambda *run: row(*run))
    assert not results.rows


def test_of_one_run_the_last_row_counts(study, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    study["Results"](old, None).add(row("b", 0))
    fresh = study["Results"](new, 0)
    fresh.add(row("b", 0, 2.0))
    fresh.add(row("a", 0))
    rows = study["merged"]([old, new, tmp_path / "missing.json"], ["a", "b"])
    assert [(found["recipe"], found["value"]) for found in rows] == [("a", 1.0), ("b", 2.0)]


def test_an_error_is_the_larger_of_that_over_seeds_and_that_over_prompts(study):
    rows = [row("a", 0, 1.0) | {"value error": 0.5}, row("a", 1, 3.0) | {"value error": 0.5}]
    assert study["over_seeds"](rows, "value") == (2.0, 1.0)
    assert study["over_seeds"](rows[:1], "value") == (1.0, 0.5)
