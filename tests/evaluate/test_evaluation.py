"""Evaluations: nothing is lost, nothing is asked twice, and what is reported is what was
answered."""

import json
import os
import re
import runpy
import sys
from dataclasses import replace

import pytest

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption
from forerun.evaluate import asking
from forerun.evaluate.answers import AnswerFile
from forerun.evaluate.asking import Style
from forerun.evaluate.benchmarks.base import Benchmark, Fill, Item, Write, user
from forerun.evaluate.benchmarks.catalogue import BENCHMARKS, benchmark_named
from forerun.evaluate.evaluation import Evaluation, Grader, weights_stamp
from forerun.evaluate.examiner import SandboxExaminer
from forerun.evaluate.report import frontier, markdown, page
from forerun.evaluate.summary import summarise, summarise_folder
from forerun.evaluate.tasks import MethodChoice
from tests.helpers import ROOT, fresh, model, run, settled

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def grade(item, answer, examiner):
    """Right if the text has an even length: something that models get right now and then."""
    return {"accuracy": float(len(answer.text) % 2 == 0)}


LENGTHS = Benchmark(
    name="gsm8k",  # a known name, for the summary
    summary="",
    source="a test",
    files=(),
    metric="accuracy",
    read=lambda data: [],
    grade=grade,
)


def items(count=6, tokens=8):
    asks = [Write(f"{i} is a number", max_tokens=tokens) for i in range(count)]
    return [Item(str(i), ask) for i, ask in enumerate(asks)]


def evaluation(folder, m=None, questions=None, **settings):
    return Evaluation(m or model("llama"), LENGTHS, questions or items(), folder, **settings)


def choices(*names):
    return [MethodChoice.read(name, {}) for name in names]


def lines(folder, kind="answer"):
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


class TestAnswers:
    def test_exact_methods_give_the_reference_s_answers(self, tmp_path):
        files = evaluation(tmp_path).run(choices("ar", "lookup", "jacobi"))
        plain, lookup, jacobi = summarise(files)
        assert plain.beside is None and plain.speed.tokens_per_forward == 1
        for other in (lookup, jacobi):
            assert other.beside.same == 1 and other.beside.p_value == 1
            assert other.beside.sentence == "the same answers, token for token, on all 6 items"
        wanted = model("llama").generate("0 is a number", max_tokens=8).text
        assert files[0].records["0", 0].answer.text == wanted

    def test_answers_do_not_hang_on_the_batch(self, tmp_path):
        style = Style(temperature=1.0, samples=2)
        one = fresh(lanes=1)
        [alone] = evaluation(tmp_path / "a", one, style=style).run(choices("ar"))
        [beside] = evaluation(tmp_path / "b", style=style).run(choices("ar"))
        texts = {key: record.answer.text for key, record in alone.records.items()}
        assert texts == {key: record.answer.text for key, record in beside.records.items()}
        assert len(texts) == 12 and texts["0", 0] != texts["0", 1]
        part = items()[3:4]
        [single] = evaluation(tmp_path / "c", one, part, style=style).run(choices("ar"))
        assert single.records["3", 1].answer.text == texts["3", 1]

    def test_costs_are_written_down(self, tmp_path):
        [file] = evaluation(tmp_path).run(choices("lookup"))
        result = model("llama").generate("0 is a number", max_tokens=8, method="lookup")
        cost = file.records["0", 0].cost
        assert (cost.tokens, cost.forwards) == (result.stats.tokens, result.stats.forwards)
        assert 0 < cost.first_token <= cost.seconds
        [summary] = summarise([file])
        assert summary.speed.tokens == sum(r.cost.tokens for r in file.records.values())
        wall = max(r.at for r in file.records.values())
        assert summary.speed.tokens_per_second == pytest.approx(summary.speed.tokens / wall)

    def test_every_method_starts_cold(self, tmp_path):
        m = fresh()
        held = []
        original = asking.submit

        def submit(*arguments):
            held.append(max(memo.common_prefix(m.encode("0 is a number")) for memo in m.host.memos))
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asking, "submit", submit)
            evaluation(tmp_path, m).run(choices("ar", "lookup"))
        assert held == [0, 0], "the second method found the first one's prompts in the slots"

    def test_what_does_not_fit_is_not_solved(self, tmp_path):
        long = Item("long", Write("x" * 500, max_tokens=4))
        [file] = evaluation(tmp_path, questions=[*items(2), long]).run(choices("ar"))
        assert file.records["long", 0].finish == "too long" and len(file.scores) == 3
        [summary] = summarise([file])
        assert summary.items == 3


class TestResuming:
    def test_a_second_run_asks_nothing_again(self, tmp_path):
        [first] = evaluation(tmp_path).run(choices("ar"))
        [second] = evaluation(tmp_path, questions=items(9)).run(choices("ar"))
        assert first.file == second.file
        asked = [line["item"] for line in lines(tmp_path)]
        assert asked[:6] != [] and sorted(asked) == sorted(map(str, range(9)))
        assert len({line["session"] for line in lines(tmp_path)}) == 2

    def test_answers_can_be_graded_later(self, tmp_path):
        [file] = evaluation(tmp_path, grade_later=True).run(choices("ar"))
        assert len(file.records) == 6 and not file.scores
        again = AnswerFile.read(file.file)
        Grader(LENGTHS, SandboxExaminer()).grade(again, items())
        assert len(AnswerFile.read(file.file).scores) == 6 and lines(tmp_path, "grade")

    def test_another_setting_is_another_file(self, tmp_path):
        evaluation(tmp_path).run(choices("ar"))
        evaluation(tmp_path, style=Style(max_tokens=4)).run(choices("ar"))
        evaluation(tmp_path, style=Style(temperature=0.5)).run(choices("ar", "lookahead"))
        assert len(list(tmp_path.glob("*.jsonl"))) == 4

    def test_weights_in_other_bits_are_another_file(self, tmp_path):
        """A quantised model is a model of its own, whatever its checkpoint is called."""
        bits = (None, "int8", "int4")
        models = [forerun.load("tiny:llama", lanes=2, quantize=each) for each in bits]
        files = [evaluation(tmp_path, m).run(choices("ar"))[0] for m in models]
        assert [one.settings["dtype"] for one in files] == [
            "float32", "float32 in int8", "float32 in int4"
        ]  # fmt: skip
        assert len({one.file for one in files}) == 3

    def test_fewer_items_are_reported_as_fewer(self, tmp_path):
        evaluation(tmp_path).run(choices("ar"))
        files = evaluation(tmp_path, questions=items(2)).run(choices("ar"))
        assert summarise(files)[0].items == 2 and len(lines(tmp_path)) == 6

    def test_a_checkpoint_that_was_trained_on_is_another_model(self, tmp_path):
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        weights = folder / "model.safetensors"
        weights.write_bytes(b"")
        before = weights_stamp(str(folder))
        os.utime(weights, (0, before + 10))
        assert weights_stamp(str(folder)) == before + 10
        assert weights_stamp(f"zoo:ar+{folder}") == before + 10, "adapters count"
        assert weights_stamp("zoo:ar") is None

    def test_another_prompt_is_asked_anew(self, tmp_path):
        evaluation(tmp_path).run(choices("ar"))
        changed = [Item("0", Write("another prompt", max_tokens=8)), *items()[1:]]
        [file] = evaluation(tmp_path, questions=changed).run(choices("ar"))
        assert len(lines(tmp_path)) == 7
        wanted = model("llama").generate("another prompt", max_tokens=8).text
        assert file.records["0", 0].answer.text == wanted

    def test_an_interrupt_keeps_what_was_answered(self, tmp_path):
        m = fresh(lanes=1)
        many = items(40)  # the engine goes on while this is told
        told = []

        def interrupt(done, total):
            told.append((done, total))
            if done >= 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            evaluation(tmp_path, m, many).run(choices("ar"), interrupt)
        kept = [line["item"] for line in lines(tmp_path)]
        assert 2 <= len(kept) < 40 and told[-1][1] == 40
        settled(m)
        [file] = evaluation(tmp_path, m, many).run(choices("ar"))
        every = [line["item"] for line in lines(tmp_path)]
        assert every[: len(kept)] == kept and sorted(every) == sorted(map(str, range(40)))
        assert len(file.scores) == 40
        [whole] = evaluation(tmp_path / "whole", m, many).run(choices("ar"))
        texts = {key: record.answer.text for key, record in file.records.items()}
        assert texts == {key: record.answer.text for key, record in whole.records.items()}

    def test_a_line_that_was_cut_is_dropped_and_asked_again(self, tmp_path):
        [file] = evaluation(tmp_path).run(choices("ar"))
        text = file.file.read_text().splitlines(keepends=True)
        answers = [i for i, line in enumerate(text) if '"answer"' in line]
        cut = "".join(text[: answers[-1]]) + text[answers[-1]][:40]
        file.file.write_text(cut)
        [again] = evaluation(tmp_path).run(choices("ar"))
        assert len(again.records) == len(again.scores) == 6
        assert AnswerFile.read(again.file).records == again.records

    def test_time_that_is_up_leaves_the_rest_open(self, tmp_path):
        [none] = evaluation(tmp_path, seconds=0.0).run(choices("ar"))
        assert not none.records
        [all_of_them] = evaluation(tmp_path, seconds=60.0).run(choices("ar"))
        assert len(all_of_them.records) == 6

    def test_a_broken_file_is_named(self, tmp_path):
        [file] = evaluation(tmp_path).run(choices("ar"))
        file.file.write_text(file.file.read_text() + "no JSON\n")
        with pytest.raises(BadOption, match=file.file.name):
            evaluation(tmp_path).run(choices("ar"))


class TestAsking:
    def chatting(self):
        m = forerun.from_network(
            tiny.build("llama"), tiny.tokenizer(), name="chat", lanes=2, max_context=160
        )
        m.tokenizer.chat_template = TEMPLATE
        return m

    def test_a_chat_goes_through_the_template_and_begins_with_its_opening(self):
        m = self.chatting()
        ask = Write("plain", user("hi"), opening="So:", stop=("a",), chat_stop=("b",))
        request = asking.request_for(m, Item("0", ask), 0, Style())
        assert m.decode(request.prompt) == "<user>hi<assistant>So:"
        assert request.stop == ("b",) and request.chatted
        plain = asking.request_for(m, Item("0", ask), 0, Style(chat=False))
        assert m.decode(plain.prompt) == "plain" and plain.stop == ("a",) and not plain.chatted

    def test_a_second_turn_comes_after_the_model_s_own_answer(self, tmp_path):
        m = self.chatting()
        turns = [
            Item("1/1", Write("a", user("a"), max_tokens=4)),
            Item("1/2", Write("b", user("b"), max_tokens=4), after="1/1"),
        ]
        [file] = evaluation(tmp_path, m, turns).run(choices("ar"))
        first = file.records["1/1", 0].answer.text
        prompt = f"<user>a<assistant>{first}<user>b<assistant>"
        wanted = m.generate(m.encode(prompt, special=False), max_tokens=4).text
        assert file.records["1/2", 0].answer.text == wanted
        evaluation(tmp_path, m, turns).run(choices("ar"))
        assert len(lines(tmp_path)) == 2

    def test_models_that_fill_blanks_get_a_hole(self, tmp_path):
        m = model("any-subset")
        ask = Fill("def f():\n", "    x = 1", "\n    return x", ("lines", 1))
        request = asking.request_for(m, Item("0", ask), 0, Style())
        assert request.hole and request.ids.count(None) == len("    x = 1")
        files = evaluation(tmp_path, m, [Item("0", ask)]).run(choices("sequential", "assd"))
        answer = files[0].records["0", 0].answer
        assert answer.whole.startswith("def f():\n") and answer.whole.endswith("\n    return x")
        assert summarise(files)[1].beside.same == 1

    def test_left_to_right_models_see_the_suffix_if_they_have_tokens_for_it(self):
        ask = Fill("pre ", "x", " post", ("lines", 2))
        plain = asking.request_for(model("llama"), Item("0", ask), 0, Style())
        assert model("llama").decode(plain.prompt) == "pre" and not plain.middle
        m = self.chatting()
        names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"]
        m.tokenizer.add_special_tokens({"additional_special_tokens": names})
        m.vocab = len(m.tokenizer)
        request = asking.request_for(m, Item("0", ask), 0, Style())
        said = m.decode(request.prompt, special=True)
        assert said == "<fim_prefix>pre <fim_suffix> post<fim_middle>" and request.middle
        assert request.stop_ids == (m.tokenizer.convert_tokens_to_ids("<|endoftext|>"),)

    def test_a_left_to_right_model_goes_on_from_no_white_space(self):
        """Tokens begin with white space: after a line break alone, a model writes another one."""
        m = model("llama")
        ask = Fill("def f():\n", "    x = 1", "\n    return x", ("lines", 1))
        request = asking.request_for(m, Item("0", ask), 0, Style())
        assert m.decode(request.prompt) == "def f():" and request.lead == "\n"
        result = m.generate(request.prompt, max_tokens=1)
        for text, line in (
            ("\n    x = 1\n    y", "    x = 1"),
            ("    x = 1\n", "    x = 1"),
            ("\n\n    x", ""),
        ):
            written = type(result)(**{**vars(result), "text": text})
            assert asking.answer_of(request, written).text == line

    def test_what_is_written_is_cut_after_as_much_as_is_missing(self):
        assert asking.cut("a\nb\nc", "lines", 2) == "a\nb"
        assert asking.cut(" One. Two! Three", "sentences", 2) == "One. Two!"
        assert asking.cut("no end", "sentences", 1) == "no end"


class TestSummaries:
    def files(self, folder):
        """The second method is made to be right on one item less."""
        files = evaluation(folder, questions=items(20)).run(choices("ar", "lookup"))
        files[0].scores = {key: {"accuracy": 1.0} for key in files[0].scores}
        files[1].scores = dict(files[0].scores)
        files[1].scores["3", 0] = {"accuracy": 0.0}
        files[1].records["3", 0] = replace(files[1].records["3", 0], tokens="other")
        return files

    def test_methods_are_paired_item_by_item(self, tmp_path):
        first, second = summarise(self.files(tmp_path))
        assert first.score.mean == 1 and second.score.mean == pytest.approx(0.95)
        assert second.beside.difference.differing == 1 and second.beside.same == 0.95
        assert second.beside.difference.mean == pytest.approx(-0.05)
        assert second.beside.p_value == 1.0
        assert second.beside.sentence.startswith("no difference larger than 15.0 points")

    def test_quality_is_that_of_the_items_that_all_have_answered(self, tmp_path):
        files = self.files(tmp_path)
        files[1].scores = {key: files[1].scores[key] for key in (("3", 0), ("4", 0))}
        first, second = summarise(files)
        assert first.items == second.items == 2
        assert (first.score.mean, second.score.mean) == (1.0, 0.5)
        assert second.beside.difference.items == 2
        assert first.speed.tokens == 16
        records = files[0].records.values()
        wall = max(record.at for record in records)
        every = sum(record.cost.tokens for record in records)
        assert first.speed.tokens_per_second == pytest.approx(every / wall)

    def test_samples_of_one_item_do_not_make_the_error_smaller(self, tmp_path):
        files = self.files(tmp_path)
        one = summarise(files)[1].score
        files[1].scores |= {(i, 1): scores for (i, _), scores in files[1].scores.items()}
        two = summarise(files)[1].score
        assert (two.mean, two.error, two.samples) == (one.mean, one.error, one.samples)

    def test_a_folder_is_read_back_with_the_reference_first(self, tmp_path):
        evaluation(tmp_path).run(choices("lookup", "ar"))
        [panel] = summarise_folder(tmp_path)
        assert [one.method for one in panel] == ["ar", "lookup"]
        assert json.dumps(panel[1].as_dict())

    def test_tables_picture_and_page_show_every_method(self, tmp_path):
        panel = summarise(self.files(tmp_path))
        table = markdown(panel)
        assert "| `ar` | 100.0 ± 0.0 |" in table and "| `lookup` | 95.0 ± 5.0 |" in table
        assert "20 items; temperature 0; plain prompt; batch 8" in table
        picture = frontier([panel])
        assert picture.count("<circle") == 2 and picture.startswith("<svg")
        assert picture in page([panel]) and "<script" not in page([panel])

    def test_names_cannot_break_the_page(self, tmp_path):
        panel = summarise(self.files(tmp_path))
        evil = replace(panel[0], settings={**panel[0].settings, "method": "<script>"})
        assert "<script>" not in page([[evil]])


def humaneval_file(folder):
    one = dict(
        task_id="HumanEval/0",
        prompt="def add(a, b):\n",
        test="def check(candidate):\n    assert candidate(2, 3) == 5\n",
        entry_point="add",
    )
    (folder / "HumanEval.jsonl").write_text(json.dumps(one) + "\n")
    return folder


class TestCommand:
    def test_every_kind_of_task_runs_on_every_family(self, tmp_path):
        humaneval_file(tmp_path)
        (tmp_path / "stories.tsv").write_text("One.\tTwo two.\tThree.\tFour.\tFive.\n")
        (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
        (tmp_path / "wikitext.jsonl").write_text(json.dumps({"page": "a b c"}) + "\n")
        words = ["humaneval", "stories", "lambada", "wikitext", "--data", tmp_path, "--json"]
        words += ["--max-tokens", 4, "--draws", 2, "--allow-code"]
        for arch in ("llama", "any-subset", "masked", "block"):
            out = tmp_path / arch
            said = run("evaluate", *words, "--model", f"tiny:{arch}", "--out", out)
            assert said.exit_code == 0, said.output
            panels = json.loads(said.stdout)
            names = [panel[0]["settings"]["task"] for panel in panels]
            assert names == ["humaneval", "stories", "lambada", "wikitext"]
            assert panels[2][0]["settings"]["method"] == "likelihood"

    def test_a_page_is_written_and_a_table_shown(self, tmp_path):
        humaneval_file(tmp_path)
        said = run(
            "evaluate",
            "humaneval",
            "--data",
            f"humaneval={tmp_path}",
            "--model",
            "tiny",
            "--method",
            "ar,lookup@k=3",
            "--max-tokens",
            "4",
            "--allow-code",
            "--out",
            tmp_path / "out",
            "--html",
            tmp_path / "page.html",
        )
        assert said.exit_code == 0, said.output
        assert "[k=3]" in said.output
        assert "lookup [k=3]" in (tmp_path / "page.html").read_text()

    def test_without_a_task_all_are_listed_with_their_sources(self):
        said = " ".join(run("evaluate").output.split())
        assert all(name in said for name in BENCHMARKS) and "openai/human-eval" in said

    def test_mistakes_are_named(self, tmp_path):
        def error(*words):
            return str(run("evaluate", *words).exception)

        data = humaneval_file(tmp_path)
        assert "'gsm8k'" in error("gsm8")
        assert "needs --data" in error("humaneval")
        assert "temperature" in error("humaneval", "--data", data, "--samples", "3")
        assert "http" in error("mt-bench", "--data", data, "--judge", "zoo:ar")
        assert "'ar'" in error("humaneval", "--data", data, "--method", "arr")
        assert "run it alone" in error("scattered", "gsm8k")

    def test_ctrl_c_says_that_the_same_command_goes_on(self, tmp_path, monkeypatch):
        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(Evaluation, "run", interrupted)
        data = humaneval_file(tmp_path)
        said = run("evaluate", "humaneval", "--data", data, "--model", "tiny", "--out", "kept")
        assert said.exit_code == 130 and "kept" in said.stderr and "goes on" in said.stderr


def test_the_catalogue_names_every_source():
    for benchmark in BENCHMARKS.values():
        assert benchmark_named(benchmark.name) is benchmark
        assert "github" in benchmark.source or "JSON lines" in benchmark.source, benchmark.name


def test_the_bench_for_real_models_runs_and_writes_its_tables(tmp_path, monkeypatch, capsys):
    humaneval_file(tmp_path)
    page_ = tmp_path / "evaluation.md"
    lines_ = (ROOT / "docs/evaluation.md").read_text().split("\n")
    marks = [line for line in lines_ if "answers" in line and line.startswith("<!--")]
    page_.write_text("\n".join(["before", *marks, "after"]))
    words = ["--out", tmp_path / "out", "--data", tmp_path, "--model", "tiny"]
    words += ["--task", "humaneval", "--method", "ar", "lookup", "stepwise"]
    words += ["--max-tokens", "4", "--allow-code", "--seconds", "60", "--report", page_]
    monkeypatch.setattr(sys, "argv", ["evaluate_real.py", *map(str, words)])
    runpy.run_path(str(ROOT / "bench/evaluate_real.py"), run_name="__main__")
    assert "stepwise: does not run on family 'causal'" in capsys.readouterr().out
    text = page_.read_text()
    assert text.startswith("before\n<!-- answers") and text.endswith(
        "<!-- end of answers -->\nafter"
    )
    assert "| `lookup` |" in text and (tmp_path / "evaluation-humaneval.svg").exists()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [one["settings"]["method"] for one in summary[0]] == ["ar", "lookup"]


def test_only_the_command_line_needs_its_packages():
    """Machines that only decode and evaluate have neither typer nor rich."""
    needs = re.compile(r"^\s*(?:import|from) (?:typer|rich)\b", re.MULTILINE)
    files = [file for file in (ROOT / "src/forerun").rglob("*.py") if "cli" not in file.parts]
    assert not [file for file in files if needs.search(file.read_text(encoding="utf-8"))]
