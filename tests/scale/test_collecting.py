"""Training data and answers are the same whoever makes them, in whatever order, however often."""

import json

import numpy as np
import pytest
import torch

from forerun.errors import BadCheckpoint, BadOption
from forerun.evaluate.asking import Style
from forerun.evaluate.benchmarks.base import Data
from forerun.evaluate.benchmarks.catalogue import benchmark_named
from forerun.evaluate.evaluation import Evaluation
from forerun.evaluate.tasks import MethodChoice
from forerun.scale import collecting, evaluating
from forerun.scale.collecting import SampleWorkers, TrajectoryWorkers
from forerun.scale.evaluating import EvaluatePlan, Question
from forerun.scale.loading import LoadPlan
from forerun.scale.local import LocalPool
from forerun.scale.work import Answered
from forerun.train import samples, trajectories
from forerun.train.data import Corpus
from forerun.train.networks import load_network
from forerun.train.samples import SamplePlan
from forerun.train.trajectories import TrajectoryPlan
from tests.helpers import run


class LastFirst:
    """Workers that answer the last part first, and every part twice, as after a loss."""

    workers = 2

    def run(self, plan, parts):
        worker = plan.make()
        for part in reversed(list(parts)):
            answer = json.loads(json.dumps(worker(json.loads(json.dumps(part.value)))))
            yield Answered(part.name, answer, 1)
            yield Answered(part.name, answer, 2)


PROMPTS = torch.randint(8, 4000, (5, 6), generator=torch.Generator().manual_seed(2))
PLAN = TrajectoryPlan(blocks=2, block=4, start="repeat")


def test_trajectories_by_workers_are_those_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectories, "CHUNK", 2)
    network = load_network("zoo:ar").eval()
    pads = torch.tensor([0, 2, 1, 0, 3])
    plan = TrajectoryPlan(2, 4, "random", (0,))
    trajectories.collect(network, PROMPTS, plan, tmp_path / "one", pads_S=pads)
    workers = TrajectoryWorkers("zoo:ar", plan)
    collecting.collect_trajectories(workers, PROMPTS, tmp_path / "many", LastFirst(), pads_S=pads)
    one = trajectories.read_folder(tmp_path / "one")
    many = trajectories.read_folder(tmp_path / "many")
    assert (one.states_SJL == many.states_SJL).all() and (one.prompts_SP == many.prompts_SP).all()
    assert (one.spans.ends_S == many.spans.ends_S).all()
    # what is there is not made again, and what is another model's is refused
    (tmp_path / "many" / "chunk1.npz").unlink()
    made = []
    collecting.collect_trajectories(
        workers,
        PROMPTS,
        tmp_path / "many",
        LocalPool(),
        pads_S=pads,
        progress=lambda answered, done, total: made.append((answered.name, done, total)),
    )
    assert made == [("1", 3, 3)]
    (tmp_path / "many" / "chunk1.npz").unlink()
    with pytest.raises(BadCheckpoint, match="differs in model"):
        other = TrajectoryWorkers("zoo:consistency", plan)
        collecting.collect_trajectories(other, PROMPTS, tmp_path / "many", LocalPool(), pads_S=pads)
    assert not (tmp_path / "many" / "chunk1.npz").exists()


def test_samples_by_workers_are_those_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK", 2)
    corpus = Corpus(np.arange(8, 2008), np.arange(8, 208))
    plan = SamplePlan(5, 16, (0.0, 1.0), 3)
    network = load_network("zoo:ar").eval()
    alone = samples.write_samples(network, corpus, plan, tmp_path / "one")
    workers = SampleWorkers("zoo:ar", plan)
    collecting.collect_samples(workers, corpus, tmp_path / "many", LastFirst())
    assert (samples.write_samples(network, corpus, plan, tmp_path / "many") == alone).all()
    assert len(alone) == 5


def test_a_training_run_finds_the_samples_that_the_command_had_written(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK", 2)
    (tmp_path / "code").mkdir()
    for i in range(120):
        (tmp_path / "code" / f"f{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 4)
    (tmp_path / "r.yaml").write_text(
        "objective: distil-drafter\nstart: zoo:ar\ncontext: 16\n"
        "options: {samples: 4, temperatures: [0.0]}\n"
    )
    words = ["samples", "--config", tmp_path / "r.yaml", "--out", tmp_path / "run"]
    done = run(*words, "--data", tmp_path / "code", "--workers", 1)
    assert done.exit_code == 0, done.output
    found = np.load(tmp_path / "run" / "samples" / "samples.npz")["tokens"]
    assert found.shape == (4, 16)
    (tmp_path / "r.yaml").write_text("objective: ar\nstart: zoo:ar\n")
    assert "uses no samples" in str(run(*words, "--data", tmp_path / "code").exception)


def test_an_evaluation_by_workers_has_the_answers_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "ITEMS", 2)
    passages = [{"text": f"x{i} = {i}\ny = x{i} + {i}\nprint(x{i})"} for i in range(5)]
    sums = [{"question": f"{i} + {i}?", "answer": f"so #### {2 * i}"} for i in range(5)]
    questions = []
    for task, lines in (("lambada", passages), ("gsm8k", sums)):
        file = tmp_path / f"{task}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        items = benchmark_named(task).read(Data(str(file), 0, 0, {}))
        questions.append(Question(task, items, {"data": task}))
    plan = EvaluatePlan(
        LoadPlan("zoo:ar", lanes=2, max_context=128), Style(max_tokens=8), examiner={}
    )
    choices = [MethodChoice("ar"), MethodChoice("lookup")]
    many = evaluating.evaluate(plan, questions, choices, tmp_path / "many", LastFirst())
    one = evaluating.evaluate(plan, questions, choices, tmp_path / "one", LocalPool())
    assert [len(of_task) for of_task in one] == [1, 2], "where nothing is decoded, one way"
    model = plan.load.model()
    for question, ours, theirs in zip(questions, many, one, strict=True):
        benchmark = benchmark_named(question.task)
        plainly = Evaluation(
            model, benchmark, question.items, tmp_path / "plain", plan.style, shown=question.shown
        ).run(choices)
        for a, b, plain in zip(ours, theirs, plainly, strict=True):
            assert a.settings == b.settings == plain.settings
            assert answers(a) == answers(b), "bit for bit"
            assert a.scores == b.scores and len(a.scores) == 5
            texts = [record.answer.text for record in plain.records.values()]
            assert sorted(record.answer.text for record in a.records.values()) == sorted(texts)
            assert len(a.file.read_text().splitlines()) == len(plain.file.read_text().splitlines())
    assert not [*(tmp_path / "many").glob("*.part")]


def answers(file):
    return {key: record.answer for key, record in file.records.items()}


@pytest.mark.parametrize(
    "words, said",
    [
        (["evaluate", "lambada", "--workers", "2", "--data", "{}"], "need --method"),
        (["generate", "hello", "--workers", "2"], "take --prompts FILE and --output FILE"),
        (["generate", "--prompts", "{}", "-o", "{}", "--workers", "2"], "exists already"),
        (["generate", "--prompts", "{}", "-o", "{}/x/y", "--workers", "2"], "no folder"),
        (["generate", "--prompts", "{}", "-o", "{}.out", "--workers", "0"], "workers=0"),
    ],
)
def test_what_workers_cannot_do_is_refused_before_anything_is_written(tmp_path, words, said):
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "a b", "prompt": "a"}\n')
    done = run(*(word.replace("{}", str(file)) for word in words))
    assert isinstance(done.exception, BadOption) and said in str(done.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["p.jsonl"]
