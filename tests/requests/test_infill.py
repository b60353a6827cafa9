"""Text with holes: how it is written, what is refused, and what comes back."""

import importlib
import json
import math

import numpy as np
import pytest
import torch

import forerun
from forerun.errors import BadOption, NotAble
from forerun.options import Sampling
from forerun.requests.infill import Template, parse_ids, parse_markers, parse_text
from tests.helpers import model, run

TEXT = "def <|fill:3|>(a, b):\n    return a<|fill:2|>"


@pytest.fixture
def m():
    return model("any-subset", torch.float64)


class TestMarkers:
    @pytest.mark.parametrize(
        "text, pieces, sizes",
        [
            ("a<|fill:2|>b", ["a", "b"], [[2]]),
            ("<|fill:1|>", ["", ""], [[1]]),
            ("<|fill:2|><|fill:3|>", ["", "", ""], [[2], [3]]),
            ("x<|fill:2-4|>", ["x", ""], [[2, 3, 4]]),
            ("é<|fill:1|>日本", ["é", "日本"], [[1]]),
            (r"a \<|fill:9|> b<|fill:1|>", ["a <|fill:9|> b", ""], [[1]]),
            (r"a\\<|fill:1|>", ["a\\", ""], [[1]]),
            (r"a\\\<|fill:1|><|fill:1|>", ["a\\<|fill:1|>", ""], [[1]]),
            ("a<|fill|>", ["a", ""], [[]]),
            ("a <|fil:3|> <|fill:3> b<|fill:1|>", ["a <|fil:3|> <|fill:3> b", ""], [[1]]),
        ],
    )
    def test_texts_with_holes_are_read(self, text, pieces, sizes):
        assert parse_markers(text) == Template(pieces, sizes)

    @pytest.mark.parametrize(
        "text",
        [
            "none here",
            "",
            r"\<|fill:2|>",
            "<|fill:0|>",
            "<|fill:3-2|>",
            "<|fill:x|>",
            "<|fill:|>",
            "<|fill:-1|>",
        ],
    )
    def test_texts_that_mean_nothing_are_refused(self, text):
        with pytest.raises(BadOption, match="fill"):
            parse_markers(text)

    def test_an_editor_sends_prefix_suffix_and_a_length(self):
        template = parse_text({"prefix": "a<|fill:2|>", "suffix": "b", "max_tokens": 64})
        assert list(template.pieces) == ["a<|fill:2|>", "b"]  # taken as it is
        [sizes] = template.sizes
        assert sizes[0] == 1 and sizes[-1] == 64 and len(sizes) <= 16
        for bad in (
            {"prefix": "a"},
            {"prefix": "a", "max_tokens": 0},
            {"max_tokens": 3, "middle": "b"},
            5,
        ):
            with pytest.raises(BadOption):
                parse_text(bad)

    def test_token_ids_have_none_for_every_blank(self):
        assert parse_ids([None, 1, None, None, 2]) == Template([[], [1], [2]], [[1], [2]])
        with pytest.raises(BadOption, match="None"):
            parse_ids([1, 2])

    def test_too_many_sizes_are_refused(self, m):
        with pytest.raises(BadOption, match="narrower"):
            m.infill("<|fill:1-20|> and <|fill:1-20|>")


class TestInfill:
    def test_the_text_around_the_holes_stays_and_the_holes_are_filled(self, m):
        result = m.infill(TEXT)
        assert result.text == f"def {result.fills[0]}(a, b):\n    return a{result.fills[1]}"
        assert [len(ids) for ids in result.fill_ids] == [3, 2] and result.stats.tokens == 5
        assert (
            result.method == "assd"
            and result.guarantee == "exact"
            and result.finish_reason == "length"
        )
        assert json.loads(json.dumps(result.as_dict()))["fills"] == list(result.fills)

    @pytest.mark.parametrize(
        "text",
        [
            "<|fill:2|> x",
            "x <|fill:2|>",
            "<|fill:2|><|fill:1|>x",
            "é<|fill:2|>ü日",
            "🎉<|fill:1|>🎉",
            "<|fill:4|>",
        ],
    )
    def test_holes_anywhere(self, m, text):
        template, result = parse_markers(text), m.infill(text)
        assert [len(ids) for ids in result.fill_ids] == [s[0] for s in template.sizes]
        assert list(result.given) == list(template.pieces)
        whole = "".join(g + f for g, f in zip(result.given, [*result.fills, ""]))
        assert result.text == whole

    def test_a_range_returns_the_length_with_the_highest_density_per_token(self, m):
        best = m.infill("ab<|fill:2-5|>cd")
        each = [m.infill(f"ab<|fill:{n}|>cd") for n in range(2, 6)]
        rates = [r.logprob / r.stats.tokens for r in each]
        assert best.fill_ids == each[max(range(4), key=lambda i: rates[i])].fill_ids
        ranked = m.infill("ab<|fill:2-5|>cd", n=3)
        assert [r.logprob / r.stats.tokens for r in ranked] == pytest.approx(
            sorted(rates, reverse=True)[:3]
        )
        with pytest.raises(BadOption, match="n=9"):
            m.infill("ab<|fill:2-5|>cd", n=9)

    def test_samples_differ_and_seeds_repeat_them(self, m):
        some = m.infill(TEXT, n=4, temperature=2.0, seed=1)
        assert len({tuple(r.token_ids) for r in some}) > 1
        assert [r.token_ids for r in some] == [
            r.token_ids for r in m.infill(TEXT, n=4, temperature=2.0, seed=1)
        ]

    @pytest.mark.filterwarnings("ignore:.* have an error")
    def test_a_batch_keeps_its_order_and_a_bad_text_fails_alone(self, m):
        a, bad, b, editor = m.infill(
            [TEXT, "nothing", "x<|fill:1|>", {"prefix": "a", "suffix": "b", "max_tokens": 3}]
        )
        assert a.token_ids == m.infill(TEXT).token_ids and len(b.fill_ids[0]) == 1
        assert bad.finish_reason == "error" and "no hole" in str(bad.error)
        assert 1 <= len(editor.fill_ids[0]) <= 3

    def test_a_canvas_longer_than_the_context_is_refused_with_the_numbers(self, m):
        with pytest.raises(BadOption, match=r"201 tokens \(200 of them in holes\).*160"):
            m.infill("a<|fill:200|>")
        assert m.infill("a<|fill:159|>").stats.tokens == 159

    def test_the_end_token_is_not_written_into_a_hole(self, m):
        [end] = m.eos
        for seed in range(3):
            assert end not in m.infill("<|fill:60|>", temperature=3.0, seed=seed).token_ids

    @pytest.mark.parametrize(
        "option",
        [dict(max_tokens=3), dict(stop="a"), dict(min_tokens=2), dict(ignore_eos=True)],
        ids=str,
    )
    def test_options_without_a_meaning_are_refused(self, m, option):
        with pytest.raises(BadOption, match=next(iter(option))):
            m.infill(TEXT, **option)

    def test_a_left_to_right_model_cannot_infill(self):
        with pytest.raises(NotAble, match="any-subset"):
            model("llama").infill(TEXT)

    def test_neither_text_nor_ids_is_refused(self, m):
        with pytest.raises(BadOption, match="either"):
            m.infill()
        with pytest.raises(BadOption, match="300"):
            m.infill(token_ids=[None, 300])

    @pytest.mark.parametrize(
        "ids", [[3.5, None], [True, None], "abc", 5, np.array([3, np.nan])], ids=str
    )
    def test_ids_that_are_none_are_refused(self, m, ids):
        with pytest.raises(BadOption, match="token_ids"):
            m.infill(token_ids=ids)

    def test_ids_may_come_as_arrays_and_generators(self, m):
        expected = m.infill(token_ids=[5, None, 7]).token_ids
        assert m.infill(token_ids=np.array([5, None, 7], object)).token_ids == expected
        assert [r.token_ids for r in m.infill(token_ids=([5, None, 7] for _ in range(2)))] == [
            expected
        ] * 2

    @pytest.mark.parametrize(
        "text, said",
        [
            ({"prefix": None, "max_tokens": 2}, "prefix"),
            ({"prefix": "a", "suffix": "b"}, "max_tokens"),
            ({"prefx": "a", "max_tokens": 2}, "'prefix'"),
            ("a\ud800<|fill:1|>", "Unicode"),
            ("<|fill:" + "9" * 5000 + "|>", "fill:N"),
        ],
        ids=["prefix", "length", "key", "bytes", "digits"],
    )
    def test_what_is_wrong_is_named(self, m, text, said):
        with pytest.raises(BadOption, match=said):
            m.infill(text)

    def test_penalties_and_bias_hold_in_holes(self, m):
        assert set(m.infill("<|fill:5|>x", allowed_tokens=[65, 66]).fill_ids[0]) <= {65, 66}
        once = m.infill("<|fill:20|>", presence_penalty=1e5)
        assert len(set(once.token_ids)) == 20

    def test_an_untried_model_says_what_is_missing(self):
        m = forerun.from_network(
            forerun.checkpoints.tiny.build("any-subset"), None, name="bare", lanes=1, max_context=32
        )
        with pytest.raises(BadOption, match="no tokenizer"):
            m.infill("a<|fill:1|>")


class TestDensity:
    def test_the_joint_density_is_the_sum_of_sequential_conditionals(self, m):
        result = m.infill(TEXT, method="sequential", temperature=1.0, logprobs=0, seed=3)
        total = sum(entry["logprob"] for entry in result.logprobs)
        assert m.logprob(TEXT, result.fill_ids) == pytest.approx(total, abs=1e-9)
        assert result.logprob == pytest.approx(total, abs=1e-9)

    def test_it_takes_one_forward(self, m):
        before = m.engine.clock.forwards
        m.logprob("a<|fill|>b<|fill|>c", ["some text", "and more"])
        assert m.engine.clock.forwards == before + 1

    def test_all_completions_of_a_hole_have_probability_one(self):
        m = model("any-subset", torch.float64)
        total = sum(math.exp(m.logprob("ab<|fill:1|>cd", [[token]])) for token in range(m.vocab))
        assert total == pytest.approx(1, abs=1e-9)

    def test_a_left_to_right_model_scores_a_hole_at_the_end(self):
        m = model("llama", torch.float64)
        score = m.logprob("hello<|fill|>", "wo")
        ids = m.tokenizer("wo").input_ids
        first = m.generate("hello", max_tokens=1, allowed_tokens=[ids[0]], logprobs=0).logprobs[0][
            "logprob"
        ]
        second = m.generate("hellow", max_tokens=1, allowed_tokens=[ids[1]], logprobs=0).logprobs[
            0
        ]["logprob"]
        assert score == pytest.approx(first + second, abs=1e-9)
        with pytest.raises(NotAble, match="left to right"):
            m.logprob("a<|fill|>b", "x")

    @pytest.mark.parametrize(
        "text, completion, said",
        [
            ("a<|fill:2|>", "xyz", "3 tokens"),
            ("a<|fill|>", ["x", "y"], "2 parts"),
            ("a<|fill|>", "", "0 tokens"),
        ],
    )
    def test_completions_that_do_not_fit_are_refused(self, m, text, completion, said):
        with pytest.raises(BadOption, match=said):
            m.logprob(text, completion)


class TestCommand:
    def test_texts_are_filled_and_printed_as_json(self, tmp_path):
        done = run("infill", "ab<|fill:2|>", "--model", "tiny:any-subset", "--json", "--k", "3")
        [line] = done.stdout.splitlines()
        assert (
            done.exit_code == 0
            and json.loads(line)["text"].startswith("ab")
            and json.loads(line)["stats"]["tokens"] == 2
        )
        (tmp_path / "p.jsonl").write_text(
            '{"text": "x<|fill:1|>"}\n{"prefix": "a", "suffix": "b", "max_tokens": 2}\n'
        )
        done = run(
            "infill", "--prompts", str(tmp_path / "p.jsonl"), "--model", "tiny:any-subset", "--json"
        )
        assert [json.loads(line)["request"] for line in done.stdout.splitlines()] == [0, 1]

    def test_a_trace_is_written_and_flags_without_a_meaning_are_refused(self, tmp_path):
        run(
            "infill",
            "ab<|fill:4|>",
            "--model",
            "tiny:any-subset",
            "--trace",
            str(tmp_path / "t.jsonl"),
        )
        lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
        assert sum(len(line["tokens"]) for line in lines if line["kind"] == "commit") == 4
        assert "'chat' is unknown" in str(run("infill", "ab<|fill:4|>", "--chat").exception)

    def test_in_a_file_a_bad_text_fails_alone(self, tmp_path):
        (tmp_path / "p.jsonl").write_text('{"prompt": "x<|fill:1|>"}\n{"text": "no hole"}\n')
        done = run(
            "infill", "--prompts", str(tmp_path / "p.jsonl"), "--model", "tiny:any-subset", "--json"
        )
        first, second = (json.loads(line) for line in done.stdout.splitlines())
        assert done.exit_code == 1 and "error" not in first and "no hole" in second["error"]

    def test_what_is_wrong_with_a_text_shows_before_a_model_is_loaded(self, monkeypatch):
        monkeypatch.setattr(
            importlib.import_module("forerun.cli.decoding"),
            "load",
            lambda *a, **k: pytest.fail("loaded"),
        )
        assert "no hole" in str(run("infill", "none").exception)
        assert "no text" in str(run("infill").exception)

    def test_the_filled_part_is_coloured(self):
        from forerun.cli.infill import picture

        text = picture(model("any-subset").infill("ab<|fill:2|>cd"))
        [span] = text.spans
        assert text.plain[: span.start] == "ab" and text.plain[span.end :] == "cd"


def test_what_means_nothing_is_refused_inside_an_object_too():
    m = model("any-subset")
    for how in (dict(max_tokens=4), dict(sampling=Sampling(max_tokens=4))):
        with pytest.raises(BadOption, match="max_tokens has no meaning"):
            m.infill("a <|fill:2|>", **how)
