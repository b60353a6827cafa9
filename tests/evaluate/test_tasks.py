"""Tasks and metrics: what is measured is what it says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.evaluate.judge import perplexity
from forerun.evaluate.metrics import mean, rouge, shannon_entropy, t_test
from forerun.evaluate.programs import (
    ProgramSettings,
    ProgramTask,
    functions,
    humaneval,
    read_programs,
)
from forerun.evaluate.scattered import ScatteredTask, scattered, scattered_canvases
from forerun.evaluate.stories import read_stories, stories
from forerun.evaluate.tasks import MethodChoice, TaskSettings
from tests.helpers import model, run


class TestMetrics:
    def test_entropy_is_that_of_the_token_frequencies(self):
        assert shannon_entropy([5, 5, 5]) == 0
        assert shannon_entropy([1, 2, 3, 4]) == 2
        assert shannon_entropy([1, 1, 2, 3]) == 1.5

    def test_means_have_standard_errors(self):
        found = mean([1.0, 2.0, 3.0, 6.0])
        assert found.mean == 3 and found.error == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2)
        assert math.isnan(mean([1.0]).error)

    def test_the_t_test_tells_samples_apart(self):
        rng = np.random.default_rng(0)
        a, b, c = rng.normal(0, 1, 80), rng.normal(0, 1, 80), rng.normal(1, 1, 80)
        assert t_test(a, b) > 0.05 > 1e-4 > t_test(a, c)

    def test_rouge_by_hand(self):
        found = rouge("The cat sat.", "the cat ate the fish")
        assert found["rouge1"] == pytest.approx(100 * 2 * 2 / (3 + 5))
        assert found["rouge2"] == pytest.approx(100 * 2 * 1 / (2 + 4))
        assert found["rougeL"] == pytest.approx(100 * 2 * 2 / (3 + 5))
        assert rouge("a b c d", "a c b d")["rougeL"] == pytest.approx(75)
        assert (
            rouge("", "words")["rouge1"] == 0
            and rouge("same words", "Same, words!")["rougeL"] == 100
        )


def windows(count=6, length=24, seed=0):
    return np.random.default_rng(seed).integers(0, 200, (count, length))


class TestScattered:
    def test_the_share_that_is_given_is_given(self):
        canvases = scattered_canvases(windows(), 0.25)
        assert all(24 - canvas.count(None) == 6 for canvas in canvases)
        assert all(
            t is None or t == w for c, row in zip(canvases, windows()) for t, w in zip(c, row)
        )
        assert (
            scattered_canvases(windows(), 0.25)
            == canvases
            != scattered_canvases(windows(), 0.25, seed=1)
        )

    def test_every_method_is_measured_against_the_first(self):
        rows = scattered(
            model("any-subset"),
            [MethodChoice("sequential"), MethodChoice("assd"), MethodChoice("assd", "ngram")],
            ScatteredTask(windows(), judge=model("llama")),
            TaskSettings(batch=3),
        )
        first, itself, ngram = rows
        assert (
            first.measures["forwards"].mean == 24 - 7 and first.measures["tokens/forward"].mean == 1
        )
        assert itself.measures["forwards"].mean <= 17
        assert itself.measures["drafter calls"].mean == 0
        assert ngram.measures["drafter calls"].mean > 0
        assert set(itself.p_values) == {"perplexity", "entropy"} and not first.p_values
        assert json.dumps([row.as_dict() for row in rows])

    def test_perplexity_is_the_judges_own(self):
        judge = model("llama", torch.float64)
        total = 0.0
        for i in (1, 2, 3):
            token = [5, 6, 7, 8][i]
            total += judge.generate(
                [5, 6, 7, 8][:i], max_tokens=1, allowed_tokens=[token], logprobs=0
            ).logprobs[0]["logprob"]
        assert perplexity(judge, [5, 6, 7, 8]) == pytest.approx(math.exp(-total / 3))

    def test_a_share_of_all_is_refused(self):
        with pytest.raises(BadOption, match="known"):
            ScatteredTask(windows(), known=1.0)


def test_stories_are_compared_with_what_stood_there(tmp_path):
    (tmp_path / "s.tsv").write_text("One.\tTwo two.\tThree.\tFour.\tFive.\n")
    (tmp_path / "s.jsonl").write_text(
        json.dumps({"sentences": ["One.", "Two two.", "Three.", "Four.", "Five."]}) + "\n"
    )
    read = read_stories(str(tmp_path / "s.tsv"))
    assert read == read_stories(str(tmp_path / "s.jsonl"))
    for missing, tokens in (((2,), len("Three.")), ((1, 2, 3), len("Two two. Three. Four."))):
        [row] = stories(
            model("any-subset"),
            [MethodChoice("sequential")],
            read,
            TaskSettings(batch=8, trials=2),
            missing=missing,
        )
        assert row.measures["forwards"].mean == tokens and 0 <= row.measures["rougeL"].mean <= 100
    (tmp_path / "bad.tsv").write_text("One.\tTwo.\n")
    with pytest.raises(BadOption, match=r"bad\.tsv:1 has 2"):
        read_stories(str(tmp_path / "bad.tsv"))


TASK = dict(
    prompt="def add(a, b):\n",
    canonical_solution="    return a + b\n",
    suffix="",
    test="def check(candidate):\n    assert candidate(2, 3) == 5\n",
    entry_point="add",
)


def test_a_program_passes_when_its_line_is_right(tmp_path, monkeypatch):
    """The model is made to write the right line, then a wrong one."""
    (tmp_path / "t.jsonl").write_text(json.dumps(TASK) + "\n")
    tasks = read_programs(str(tmp_path / "t.jsonl"))
    m = model("any-subset")
    original = type(m).infill_all

    def writes(line):
        def infill_all(self, canvases, **options):
            results = original(self, canvases, **options)
            whole = self.tokenizer(TASK["prompt"] + line).input_ids
            return [type(r)(**{**vars(r), "token_ids": whole}) for r in results]

        return infill_all

    for line, passes in (("    return a + b\n", 100), ("    return a - b\n", 0)):
        monkeypatch.setattr(type(m), "infill_all", writes(line))
        [row] = humaneval(
            m, [MethodChoice("assd")], tasks, ProgramSettings(trials=2, allow_code=True)
        )
        assert row.measures["pass@1"].mean == passes and row.measures["pass@1"].samples == 2


def test_a_task_that_does_not_fit_counts_as_not_solved():
    short = ProgramTask(**TASK)
    long = replace(short, prompt="# " + "x" * 500 + "\n" + short.prompt)
    settings = ProgramSettings(allow_code=True)
    [row] = humaneval(model("any-subset"), [MethodChoice("assd")], [short, long], settings)
    assert row.measures["pass@1"].samples == 2


def test_a_function_passes_when_its_body_is_right_and_ends_where_another_begins(
    tmp_path, monkeypatch
):
    (tmp_path / "t.jsonl").write_text(
        json.dumps({k: TASK[k] for k in ("prompt", "test", "entry_point")}) + "\n"
    )
    tasks = read_programs(str(tmp_path / "t.jsonl"), fields=())
    m = model("llama")
    original = type(m).generate_all

    def writes(body):
        def generate_all(self, prompts, **options):
            assert prompts == ["def add(a, b):"] * len(prompts) and "\ndef " in options["stop"]
            results = original(self, prompts, **{**options, "max_tokens": 4})
            return [type(r)(**{**vars(r), "text": body}) for r in results]

        return generate_all

    for body, passes in (
        ("\n    return a + b", 100),
        ("\n    return a - b", 0),
        ("\n    while True: pass", 0),
    ):
        monkeypatch.setattr(type(m), "generate_all", writes(body))
        settings = ProgramSettings(trials=2, batch=1, seconds=1.0, longest=4, allow_code=True)
        rows = functions(m, [MethodChoice("ar"), MethodChoice("jacobi")], tasks, settings)
        assert [row.measures["pass@1"].mean for row in rows] == [passes] * 2
        assert (
            rows[0].measures["pass@1"].samples == 2 and rows[0].measures["tokens/forward"].mean == 1
        )
    too_long = replace(tasks[0], prompt="# " + "x" * 500)
    [row] = functions(
        m, [MethodChoice("ar")], [tasks[0], too_long], ProgramSettings(longest=4, allow_code=True)
    )
    assert row.measures["pass@1"].samples == 2, "what does not fit is not solved"


class TestCommand:
    def test_evaluate_prints_json_with_the_machine(self, tmp_path):
        for i in range(60):
            (tmp_path / f"{i}.py").write_text(f"def f{i}(x):\n    return x * {i} + {i * i}\n" * 8)
        words = [
            "scattered",
            "--data",
            str(tmp_path),
            "--count",
            "2",
            "--length",
            "32",
            "--k",
            "3",
            "--json",
        ]
        report = json.loads(run("evaluate", *words).stdout)
        assert [row["label"] for row in report["rows"]] == [
            "sequential",
            "assd [k=3]",
            "assd (ngram) [k=3]",
        ]
        assert report["machine"] and report["rows"][0]["perplexity"]["mean"] > 1

    @pytest.mark.parametrize("text", ["# no JSON", "[1]", '{"prompt": "x"}', None])
    def test_a_file_that_holds_no_tasks_is_named(self, tmp_path, text):
        if text is not None:
            (tmp_path / "t.jsonl").write_text(text)
        for task in ("functions", "humaneval", "stories"):
            said = run(
                "evaluate",
                task,
                "--data",
                tmp_path / "t.jsonl",
                "--model",
                "zoo:any-subset",
                "--method",
                "assd",
                "--allow-code",
            ).exception
            assert isinstance(said, BadOption) and "t.jsonl" in str(said)

    def test_mistakes_are_named(self):
        assert "'scattered'" in str(run("evaluate", "scatterd").exception)
        assert "--data" in str(run("evaluate", "humaneval").exception)
        assert "'k'" in str(run("evaluate", "scattered", "--method", "assd", "--kk", "3").exception)
