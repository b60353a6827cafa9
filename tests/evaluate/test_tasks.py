"""Tasks and metrics: what is measured is what it says."""

import json
import math

import numpy as np
import pytest
import torch

import forerun
from forerun.errors import BadOption
from forerun.evaluate.judge import completion_perplexity, perplexity, surprises
from forerun.evaluate.metrics import mean, rouge, shannon_entropy, t_test
from forerun.evaluate.scattered import ScatteredTask, scattered, scattered_canvases
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

    def test_a_judge_with_other_tokens_reads_the_text(self):
        """It used to take the numbers of one vocabulary for those of another: a perplexity without
        meaning, or an IndexError."""
        m = model("any-subset")
        judge = forerun.load("zoo:ar", lanes=1)
        text = "def add(a, b):\n    return a + b"
        tokens = m.encode(text)
        found = perplexity(judge, tokens, m)
        assert found == pytest.approx(perplexity(judge, judge.encode(text)))
        assert found < 100 < perplexity(judge, tokens), "numbers of bytes are no text to the judge"
        result = m.generate(text, max_tokens=3, method="sequential")
        result = type(result)(**{**vars(result), "token_ids": m.encode(" + c")})
        whole = judge.encode(text + " + c")
        known = len(judge.encode(text))
        nats = surprises(judge, [(whole[:known], whole[known:])])
        assert completion_perplexity(judge, m, [result]) == pytest.approx(math.exp(nats[0]))
        task = ScatteredTask(windows(2), judge=judge)
        [row] = scattered(m, [MethodChoice("sequential")], task, TaskSettings(batch=2))
        assert math.isfinite(row.measures["perplexity"].mean)

    def test_a_share_of_all_is_refused(self):
        with pytest.raises(BadOption, match="known"):
            ScatteredTask(windows(), known=1.0)


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

    def test_mistakes_are_named(self):
        assert "'scattered'" in str(run("evaluate", "scatterd").exception)
        assert "--data" in str(run("evaluate", "humaneval", "--method", "ar").exception)
        assert "'k'" in str(run("evaluate", "scattered", "--method", "assd", "--kk", "3").exception)
