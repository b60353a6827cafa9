"""Benchmarks: they ask the published prompt, and grade the published way."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from forerun.errors import BadOption
from forerun.evaluate.benchmarks import instructions, math500, mbpp
from forerun.evaluate.benchmarks.base import Answer, Data, Item, Read
from forerun.evaluate.benchmarks.catalogue import BENCHMARKS, benchmark_named
from forerun.evaluate.benchmarks.chats import ask_judge
from forerun.evaluate.examiner import SandboxExaminer


class Examiner:
    """Notes what it was asked to run; passes what holds the right words."""

    def __init__(self, right="return a + b"):
        self.right = right
        self.ran = []

    def passes(self, program, test, entry_point, given=""):
        self.ran.append(program)
        return self.right in program

    def rate(self, question, answer):
        return None


def written(folder, *objects, name="data.jsonl"):
    lines = [json.dumps(one, ensure_ascii=False) for one in objects]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / name)


def items_of(name, path, **settings):
    return benchmark_named(name).read(Data(path, **settings))


def graded(name, item, text="", examiner=None, **answer):
    return benchmark_named(name).grade(item, Answer(text, **answer), examiner or Examiner())


class TestGSM8K:
    def data(self, folder):
        train = [
            {"question": f"q{i}", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
            for i in range(7)
        ]
        written(folder, *train, name="train.jsonl")
        # a character that ends a line for Python, and not for JSON
        test = {"question": "How\u2028many?", "answer": "So 1,234.\n#### 1,234"}
        return written(folder, test, name="test.jsonl")

    def test_the_prompt_is_the_harness_s(self, tmp_path):
        [item] = items_of("gsm8k", self.data(tmp_path))
        first = "Question: q0\nAnswer: 0+1=1\n#### 1\n\nQuestion: q1\n"
        assert item.ask.prompt.startswith(first)
        assert item.ask.prompt.count("Question:") == 6
        assert item.ask.prompt.endswith("Question: How\u2028many?\nAnswer:")
        assert item.ask.chat == ({"role": "user", "content": item.ask.prompt},)
        [bare] = items_of("gsm8k", self.data(tmp_path), shots=0)
        assert bare.ask.prompt.startswith("Question: How")
        [other] = items_of("gsm8k", self.data(tmp_path), seed=3)
        assert other.ask.prompt != item.ask.prompt

    @pytest.mark.parametrize(
        "text, flexible, strict",
        [
            ("5 + 6 is 11.\n#### 1234", 1, 1),
            ("the answer is $1,234.", 1, 0),
            ("the answer is 1234.00", 1, 0),
            ("1234, or rather 7", 0, 0),
            ("#### 1,234\nwhich leaves 7", 0, 1),
            ("I do not know", 0, 0),
            ("-1234", 0, 0),
        ],
    )
    def test_the_last_number_is_the_answer(self, tmp_path, text, flexible, strict):
        [item] = items_of("gsm8k", self.data(tmp_path))
        assert graded("gsm8k", item, text) == {"accuracy": flexible, "strict": strict}


class TestMath:
    @pytest.mark.parametrize(
        "written, truth",
        [
            (r"\frac{1}{2}", r"\dfrac12"),
            ("0.5", r"\frac{1}{2}"),
            ("1/2", r"\tfrac{1}{2}"),
            (r"12\text{ cm}", "12"),
            (r"x = 5", "5"),
            (r"10,000", "10000"),
            (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
            (r"50\%", "50"),
            (r"90^\circ", "90"),
            (r"\sqrt2", r"\sqrt{2}"),
            ("3.0", "3"),
            (r"\text{Evelyn}", "Evelyn"),
            (".5", "0.5"),
        ],
    )
    def test_ways_to_write_one_answer_are_one(self, written, truth):
        assert math500.normalised(written) == math500.normalised(truth)

    @pytest.mark.parametrize("written, truth", [("12", "21"), ("(1,2)", "12"), ("-3", "3")])
    def test_other_answers_are_others(self, written, truth):
        assert math500.normalised(written) != math500.normalised(truth)

    def test_the_last_box_counts_with_its_braces(self, tmp_path):
        assert math500.last_box(r"\boxed{1} so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
        assert math500.last_box(r"\boxed{1") is None
        file = written(tmp_path, {"problem": "p", "answer": r"\frac12", "subject": "Algebra"})
        [item] = items_of("math500", file)
        assert item.group == "Algebra" and r"\boxed{}" in item.ask.chat[0]["content"]
        right = graded("math500", item, r"Hence \boxed{0.5}")
        assert right == {"accuracy": 1, "answered": 1}
        assert graded("math500", item, "The answer is 1/2.")["accuracy"] == 1
        assert graded("math500", item, "no idea") == {"accuracy": 0, "answered": 0}


FUNCTION = dict(
    task_id="HumanEval/0",
    prompt='import math\n\n\ndef add(a, b):\n    """Add."""\n',
    canonical_solution="    return a + b\n",
    test="def check(candidate):\n    assert candidate(2, 3) == 5\n",
    entry_point="add",
)


class TestPrograms:
    def test_a_base_model_goes_on_from_the_prompt(self, tmp_path):
        [item] = items_of("humaneval", written(tmp_path, FUNCTION))
        assert item.ask.prompt == FUNCTION["prompt"].rstrip() and "\ndef " in item.ask.stop
        examiner = Examiner()
        assert graded("humaneval", item, "\n    return a + b", examiner) == {"pass@1": 1}
        assert examiner.ran == [FUNCTION["prompt"].rstrip() + "\n    return a + b"]

    def test_a_chat_model_s_program_runs_alone_and_after_the_task_s_imports(self, tmp_path):
        [item] = items_of("humaneval", written(tmp_path, FUNCTION))
        assert item.ask.opening.endswith("```python\n")
        examiner = Examiner("import math\n\n\n\ndef add")
        found = graded("humaneval", item, "def add(a, b): ...\n```\nThis", examiner, chatted=True)
        assert found == {"pass@1": 1, "alone": 0}
        assert examiner.ran[0] == "def add(a, b): ...\n"

    def test_other_words_ask_for_the_same_function(self, tmp_path):
        [plain] = items_of("humaneval", written(tmp_path, FUNCTION))
        [item] = items_of("humaneval-qwen", written(tmp_path, FUNCTION))
        system, asked = item.ask.chat
        assert system["role"] == "system" and FUNCTION["prompt"].strip() in asked["content"]
        assert item.ask.opening == "```python\n" and "\n#" in item.ask.chat_stop
        assert item.facts == plain.facts and item.ask.prompt == plain.ask.prompt

    @pytest.mark.parametrize("body, passes", [("return a + b", 1), ("return a - b", 0)])
    def test_programs_really_run(self, tmp_path, body, passes):
        examiner = SandboxExaminer(allow_code=True)
        [item] = items_of("humaneval", written(tmp_path, FUNCTION))
        assert graded("humaneval", item, f"\n    {body}", examiner) == {"pass@1": passes}
        one = {
            "task_id": 11,
            "text": "Add.",
            "code": "",
            "test_list": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"],
        }
        [item] = items_of("mbpp", written(tmp_path, one), shots=0)
        program = f"def add(a, b):\n    {body}\n[DONE] def"
        assert graded("mbpp", item, program, examiner) == {"pass@1": passes}

    def test_mbpp_shows_three_tasks_and_grades_the_test_set(self, tmp_path):
        tasks = [
            {"task_id": i, "text": f"t{i}", "code": f"c{i}", "test_list": [f"assert f(1) == {i}"]}
            for i in (1, 2, 3, 4, 11, 510, 511)
        ]
        items = items_of("mbpp", written(tmp_path, *tasks))
        assert [item.id for item in items] == ["11", "510"]
        prompt = items[0].ask.prompt
        assert [f"task: t{i} " in prompt for i in (1, 2, 3, 4, 11)] == [
            False,
            True,
            True,
            True,
            True,
        ]
        assert prompt.endswith("assert f(1) == 11\n[BEGIN]\n") and "c2\n[DONE]" in prompt

    def test_mbpp_s_tested_function_is_found_inside_of_builtins(self):
        assert mbpp.tested_function("assert set(similar((1,), (2,))) == set()") == "similar"
        assert mbpp.program_of(Answer("```python\nx = 1\n```\nsaid")) == "x = 1\n"

    def test_infilling_joins_prefix_answer_and_suffix(self, tmp_path):
        one = {**FUNCTION, "prompt": "def add(a, b):\n", "suffix": "    # end\n"}
        one["task_id"] = "SingleLineInfilling/HumanEval/0/L0"
        [item] = items_of("humaneval-infilling", written(tmp_path, one))
        assert item.group == "SingleLineInfilling" and item.ask.ends == ("lines", 1)
        examiner = Examiner("def add(a, b):\n    return a + b\n    # end\n")
        found = graded("humaneval-infilling", item, "    return a + b", examiner)
        assert found == {"pass@1": 1, "exact match": 1}
        several = {**one, "canonical_solution": "    x = 1\n    y = 2\n"}
        [item] = items_of("humaneval-infilling", written(tmp_path, several))
        assert item.ask.ends == ("lines", 2) and item.ask.suffix == "\n    # end\n"


FOLLOWED = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog", "a cat"),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        "cat, Cat",
        "cat",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "the Cat"),
    (
        "keywords:letter_frequency",
        {"letter": "z", "let_frequency": 2, "let_relation": "less than"},
        "Z only",
        "zz",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "Dr. Who came. He left!",
        "One. Two? Three!",
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "a\n***\nb",
        "a\n***\n\n***\nb",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "one two, three",
        "one two",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "a\n\n'Weekend, is",
        "a\n\nThe weekend",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. more", "x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and ** **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it. Yes", "Yes. say it"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So "the END."', "The end. Or not"),
    ("startend:quotation", {}, '"all of it"', '"only this" not that'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "THIS IS it",
        "THIS is it",
    ),
    ("language:response_language", {"language": "de"}, "Hund und Katze", "dog and cat"),
    ("change_case:english_capital", {}, "ALL OF THE WORDS ARE LOUD", "Not all OF THEM"),
    ("change_case:english_lowercase", {}, "all of the words are quiet", "Not all"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


class FakeLangdetect:
    """Tells two languages apart by a word, and none in a text of numbers."""

    __spec__ = "there"

    class LangDetectException(Exception):
        pass

    class DetectorFactory:
        seed = None

    @classmethod
    def detect(cls, text):
        if not any(letter.isalpha() for letter in text):
            raise cls.LangDetectException
        return "de" if "und" in text.lower() else "en"


class TestIFEval:
    @pytest.fixture(autouse=True)
    def languages(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "langdetect", FakeLangdetect)

    @pytest.mark.parametrize("name, arguments, good, bad", FOLLOWED)
    def test_each_published_check(self, name, arguments, good, bad):
        assert instructions.follows(name, arguments, good)
        assert not instructions.follows(name, arguments, bad)
        assert not instructions.follows(name, arguments, "  \n"), "nothing follows no instruction"

    def test_all_published_checks_are_there(self):
        tested = {name for name, *_ in FOLLOWED}
        assert tested == instructions.CHECKS.keys()
        assert len(instructions.CHECKS) == 25

    def test_languages_are_told_as_published(self):
        assert instructions.follows("language:response_language", {"language": "de"}, "123")
        assert not instructions.follows("change_case:english_capital", {}, "HUND UND KATZE")
        assert FakeLangdetect.DetectorFactory.seed == 0

    def test_a_language_without_its_package_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("forerun.evaluate.benchmarks.ifeval.find_spec", lambda name: None)
        name = "language:response_language"
        one = {"prompt": "p", "instruction_id_list": [name], "kwargs": [{"language": "de"}]}
        with pytest.raises(BadOption, match="langdetect"):
            items_of("ifeval", written(tmp_path, one))

    def test_loosely_forgives_what_stands_around(self):
        name = "startend:quotation"
        text = 'Here you are:\n"all of it"\nAnything else?'
        assert not instructions.follows(name, {}, text)
        assert instructions.follows_loosely(name, {}, text)

    def test_a_prompt_counts_when_all_is_followed(self, tmp_path):
        one = {
            "key": 1000,
            "prompt": "p",
            "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
            "kwargs": [{}, {"num_words": None}],
        }
        [item] = items_of("ifeval", written(tmp_path, one))
        both = graded("ifeval", item, '"yes"')
        assert both["accuracy"] == 1 and both["followed"] == 2
        half = graded("ifeval", item, "yes")
        assert half["accuracy"] == 0 and half["followed"] == 1
        whole = benchmark_named("ifeval").combine([both, half])
        assert whole == {"of instructions": 0.75}
        unknown = {**one, "instruction_id_list": ["x:y", "startend:quotation"]}
        with pytest.raises(BadOption, match="x:y"):
            items_of("ifeval", written(tmp_path, unknown))


class TestLikelihoods:
    def test_lambada_asks_for_the_last_word(self, tmp_path):
        [item] = items_of("lambada", written(tmp_path, {"text": "the cat sat"}))
        assert (item.ask.context, item.ask.choices) == ("the cat", (" sat",))
        found = graded("lambada", item, logprobs=(-2.0,), greedy=(True,))
        assert found == {"accuracy": 1, "nats": 2}
        assert benchmark_named("lambada").combine([found, found])["perplexity"] == pytest.approx(
            7.389, abs=1e-3
        )

    def test_hellaswag_s_endings_are_weighed_by_their_length(self, tmp_path):
        one = dict(
            ind=4,
            ctx_a="A man sits.",
            ctx_b="he",
            activity_label="Sitting [step]",
            endings=["stands [title] up.", "x"],
            label="0",
        )
        [item] = items_of("hellaswag", written(tmp_path, one))
        assert item.ask.context == "Sitting : A man sits. He"
        assert item.ask.choices == (" stands. up.", " x")
        found = graded("hellaswag", item, logprobs=(-10.0, -2.0), greedy=(False, False))
        assert found == {"accuracy": 1, "plain": 0}

    def test_wikitext_is_counted_in_words_and_bytes_of_whole_pages(self, tmp_path):
        text = (
            " = Page one = \n\n words é here \n = = Section = = \n more \n = Page two = \n end \n"
        )
        (tmp_path / "wiki.test.raw").write_text(text, encoding="utf-8")
        items = items_of("wikitext", str(tmp_path))
        assert [" = Page" in item.ask.text for item in items] == [True, True]
        assert "Section" in items[0].ask.text
        item = Item("0", Read("two wörds"))
        found = graded("wikitext", item, logprobs=(-10.0,), greedy=(False,))
        assert (found["words"], found["bytes"]) == (2, 10)
        whole = benchmark_named("wikitext").combine([found])
        assert whole["word perplexity"] == pytest.approx(148.413, abs=1e-3)
        assert whole["bits per byte"] == pytest.approx(1.4427, abs=1e-4)


class TestTexts:
    def test_stories_have_a_hole_where_sentences_are_missing(self, tmp_path):
        sentences = ["One.", "Two two.", "Three.", "Four.", "Five."]
        (tmp_path / "s.tsv").write_text("\t".join(["id", "title", *sentences]) + "\n")
        file = written(tmp_path, {"sentences": sentences}, name="s.jsonl")
        [item] = items_of("stories", file)
        assert [item] == items_of("stories", str(tmp_path / "s.tsv"))
        ask = item.ask
        assert ask.prefix + ask.truth + ask.suffix == " ".join(sentences) and ask.truth == "Three."
        [item] = items_of("stories", file, options={"missing": 3})
        assert item.ask.truth == "Two two. Three. Four." and item.ask.ends == ("sentences", 3)
        assert graded("stories", item, "two two three four")["rougeL"] == 1
        (tmp_path / "bad.tsv").write_text("One.\tTwo.\n")
        with pytest.raises(BadOption, match=r"bad\.tsv:1 has 2"):
            items_of("stories", str(tmp_path / "bad.tsv"))

    def test_summaries_are_compared_with_the_highlights(self, tmp_path):
        [item] = items_of("summaries", written(tmp_path, {"article": "a b", "highlights": "b c"}))
        assert item.ask.prompt == "a b\nTL;DR:"
        assert graded("summaries", item, "b")["rouge1"] == pytest.approx(2 / 3)


class TestChats:
    def test_a_turn_comes_after_the_one_before(self, tmp_path):
        one = {"question_id": 81, "category": "writing", "turns": ["first", "second"]}
        file = written(tmp_path, one, {"question_id": 1, "category": "qa", "turns": ["x"]})
        items = items_of("mt-bench", file)
        assert [(item.id, item.after) for item in items] == [
            ("81/1", None),
            ("81/2", "81/1"),
            ("1/1", None),
        ]
        kinds = [item.group for item in items_of("spec-bench", file)]
        assert kinds == ["multi-turn conversation", "multi-turn conversation", "qa"]

    def test_a_judge_is_any_openai_compatible_address(self):
        asked = []

        class Judge(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append(
                    (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                )
                said = {"choices": [{"message": {"content": "Fine. Rating: [[7.5]]"}}]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *words):
                pass

        server = HTTPServer(("127.0.0.1", 0), Judge)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        examiner = SandboxExaminer(judge=address, judge_model="m")
        item = Item("81/1", Read(""), {"question": "Why?"})
        answer = Answer("Because.", before="user: Well?\n\n")
        found = benchmark_named("mt-bench").grade(item, answer, examiner)
        server.shutdown()
        server.server_close()
        assert found == {"rating": 7.5, "words": 1}
        [(path, body)] = asked
        assert path == "/v1/chat/completions" and body["model"] == "m"
        words = body["messages"][1]["content"]
        assert "user: Well?\n\nWhy?" in words and "Because." in words
        with pytest.raises(BadOption, match="judge="):
            ask_judge(address, "m", "q", "a", timeout=1)


class TestFiles:
    @pytest.mark.parametrize("name", BENCHMARKS)
    def test_a_file_that_is_missing_is_described(self, tmp_path, name):
        with pytest.raises(BadOption, match="give the file itself"):
            items_of(name, str(tmp_path))

    @pytest.mark.parametrize("text", ["# no JSON", "[1]", '{"other": "x"}', ""])
    def test_a_file_that_holds_something_else_is_named(self, tmp_path, text):
        (tmp_path / "t.jsonl").write_text(text)
        for name in ("humaneval", "gsm8k", "mbpp", "ifeval", "lambada", "hellaswag", "mt-bench"):
            with pytest.raises(BadOption, match=r"t\.jsonl"):
                items_of(name, str(tmp_path / "t.jsonl"), shots=0)
