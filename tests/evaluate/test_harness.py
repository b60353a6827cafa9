"""lm-evaluation-harness: our class beside its own, on the same weights, and for every family.

Runs where the harness is installed (`pip install 'forerun[lm-eval]'`)."""

import json

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from forerun.checkpoints import tiny
from forerun.cli.lm_eval import with_model
from forerun.errors import BadOption
from forerun.evaluate.harness import ForerunLM
from tests.helpers import model, network, run

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DATA = [
    {"question": "one and one", "choices": ["two", "three"], "label": 0, "text": "One two three."},
    {"question": "two and two", "choices": ["five", "four"], "label": 1, "text": "Aha, so it is"},
    {"question": "a", "choices": [" b", " c"], "label": 1, "text": "Another text of some words"},
]
SHARED = """
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
"""
TASKS = {
    "choose": """
task: choose
output_type: multiple_choice
doc_to_text: "{{question}} is"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "read": """
task: read
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
task: write
output_type: generate_until
doc_to_text: "{{question}} is"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Local tasks of the three kinds of requests."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, DATA)) + "\n")
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + SHARED.format(file=file))
    return folder


def evaluated(lm, folder, **settings):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(
        lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **settings
    )


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def theirs(arch="llama"):
    return HFLM(pretrained=network(arch), tokenizer=tiny.tokenizer(), batch_size=1, max_length=159)


class TestBesideTheirs:
    """The same weights behind the harness's own class."""

    def test_the_whole_evaluation_has_the_same_numbers(self, tasks):
        ours = evaluated(ForerunLM(model("llama")), tasks)
        hf = evaluated(theirs(), tasks)
        for name in TASKS:
            for metric, value in hf["results"][name].items():
                if isinstance(value, float):
                    found = ours["results"][name][metric]
                    assert found == pytest.approx(value, rel=1e-4), (name, metric)
        texts = [
            [sample["resps"][0][0] for sample in one["samples"]["write"]] for one in (ours, hf)
        ]
        assert texts[0] == texts[1] and any(texts[0])

    def test_every_log_likelihood_is_the_same(self):
        pairs = [("a b", " c"), ("", "alone"), ("ends in a space ", "x"), ("q" * 50, " long one")]
        requests = instances("loglikelihood", *pairs)
        ours = ForerunLM(model("llama")).loglikelihood(requests)
        for (mine, greedy), (other, theirs_) in zip(ours, theirs().loglikelihood(requests)):
            assert mine == pytest.approx(other, abs=1e-4) and greedy == theirs_
        texts = instances("loglikelihood_rolling", ("One two three.",), ("x" * 400,))
        mine = ForerunLM(model("llama")).loglikelihood_rolling(texts)
        assert mine == pytest.approx(theirs().loglikelihood_rolling(texts), abs=2e-3)

    def test_what_is_generated_is_the_same_by_every_exact_method(self):
        arguments = {"until": ["\x00"], "max_gen_toks": 16, "do_sample": False}
        requests = instances("generate_until", ("a b", arguments), ("another", arguments))
        wanted = theirs().generate_until(requests)
        for method in ("ar", "lookup", "jacobi", "lookahead"):
            lm = ForerunLM(model("llama"), method=method)
            assert lm.generate_until(requests, disable_tqdm=True) == wanted


@pytest.mark.parametrize("arch", ["any-subset", "masked", "block"])
def test_every_family_answers_every_kind_of_request(arch, tasks):
    lm = ForerunLM(model(arch), draws=2)
    report = evaluated(lm, tasks)
    assert set(report["results"]) == set(TASKS)
    exact = arch == "any-subset"
    assert ("exact" in lm.get_model_info()["log_likelihood"]) == exact
    again = evaluated(ForerunLM(model(arch), draws=2), tasks)
    for name in ("choose", "read"):
        numbers = [
            {key: value for key, value in one["results"][name].items() if isinstance(value, float)}
            for one in (report, again)
        ]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4), "the seed decides"


def test_sampling_arguments_reach_the_request_and_others_are_refused():
    lm = ForerunLM(model("llama"), seed=3)
    sampled = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_k": 5}
    requests = instances("generate_until", ("a b", sampled))
    [text] = lm.generate_until(requests, disable_tqdm=True)
    m = model("llama")
    wanted = m.generate("a b", max_tokens=8, temperature=1.0, top_k=5, seed=3)
    assert text == m.decode(wanted.token_ids)
    with pytest.raises(BadOption, match="num_beams"):
        lm.generate_until(instances("generate_until", ("a", {**sampled, "num_beams": 2})))


def test_chat_templates_are_the_tokenizer_s():
    lm = ForerunLM(model("llama", torch.float32, 1))
    lm.tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == "<user>hi<assistant>"
    assert lm.chat_template(True) == TEMPLATE
    lm.tokenizer.chat_template = None
    with pytest.raises(BadOption, match="no chat template"):
        lm.apply_chat_template(chat)


class TestCommand:
    def test_all_words_go_to_the_harness_and_the_model_is_ours(self, tasks, tmp_path):
        words = ["--tasks", "choose,write", "--include_path", tasks, "--output_path", tmp_path]
        words += ["--model_args", "pretrained=tiny,method=lookup,k=3", "--limit", "2"]
        said = run("lm-eval", *words)
        assert said.exit_code == 0, said.output
        [file] = tmp_path.rglob("results_*.json")
        report = json.loads(file.read_text())
        assert report["config"]["model"] == "forerun" and report["config"]["method"] == "lookup"
        assert report["n-samples"]["choose"]["effective"] == 2

    def test_a_model_that_is_named_stays(self):
        assert with_model(["run", "--model", "hf"]) == ["run", "--model", "hf"]
        assert with_model(["--model=hf"]) == ["--model=hf"]
        assert with_model(["ls", "tasks"]) == ["ls", "tasks"]
        assert with_model(["run"]) == ["run"], "which shows the harness's help"
        assert with_model(["--tasks", "x"])[-2:] == ["--model", "forerun"]
