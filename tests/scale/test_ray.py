"""On a Ray cluster of this machine: what is killed loses nothing, what is served stays served, and
what is wrong is said in a line. Needs `forerun[ray]`; `make scale` runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

pytest.importorskip("ray")

import httpx
import numpy as np
import torch

from forerun.errors import BadCheckpoint, BadOption, ForerunError, NoRoom
from forerun.evaluate.asking import Style
from forerun.evaluate.benchmarks.base import Data
from forerun.evaluate.benchmarks.catalogue import benchmark_named
from forerun.evaluate.tasks import MethodChoice
from forerun.scale import cluster, collecting, evaluating, serving
from forerun.scale.collecting import SampleWorkers, TrajectoryWorkers
from forerun.scale.evaluating import EvaluatePlan, Question
from forerun.scale.generating import GenerateJob, GeneratePlan, generate
from forerun.scale.loading import LoadPlan
from forerun.scale.local import LocalPool
from forerun.scale.work import Part, WorkersLost
from forerun.serve.settings import Settings
from forerun.train import samples, trajectories
from forerun.train.data import Corpus
from forerun.train.samples import SamplePlan
from forerun.train.trajectories import TrajectoryPlan
from tests.helpers import ROOT, run
from tests.scale.dying import Dying
from tests.scale.test_collecting import answers
from tests.scale.test_generating import job_in

FAKE = "__version__ = '0.0.1'\n"


@pytest.fixture(scope="module")
def joined():
    import ray

    cluster.connect(cluster.LOCAL, cpus=4)
    cluster.check_nodes()
    yield ray
    ray.shutdown()


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class KillsFirst:
    """Kills whoever answers first."""

    def __init__(self):
        self.killed = None

    def __call__(self, answered, done, total):
        if self.killed is None:
            assert answered.pid != os.getpid()
            os.kill(answered.pid, signal.SIGKILL)
            self.killed = answered.pid


def two_actors():
    return cluster.RayPool.of(2, 1, None)


def test_a_killed_actor_loses_and_repeats_nothing(joined, tmp_path):
    alone = generate(job_in(tmp_path, "alone.jsonl"), LocalPool())
    kill = KillsFirst()
    totals = generate(job_in(tmp_path, "ray.jsonl"), two_actors(), progress=kill)
    assert kill.killed and totals == alone
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_an_evaluation_with_a_killed_actor_has_the_answers_of_one_process(
    joined, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluating, "ITEMS", 1)
    lines = [{"question": f"{i} + {i}?", "answer": f"so #### {2 * i}"} for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = benchmark_named("gsm8k").read(Data(str(tmp_path / "sums.jsonl"), 0, 0, {}))
    asked = [Question("gsm8k", items, {})]
    plan = EvaluatePlan(LoadPlan("zoo:ar", lanes=2, max_context=128), Style(max_tokens=6))
    ways = [MethodChoice("ar"), MethodChoice("auto")]
    alone = evaluating.evaluate(plan, asked, ways, tmp_path / "one", LocalPool())
    kill = KillsFirst()
    many = evaluating.evaluate(plan, asked, ways, tmp_path / "many", two_actors(), kill)
    assert kill.killed
    for one, other in zip(alone[0], many[0], strict=True):
        assert one.settings == other.settings and one.scores == other.scores
        assert answers(one) == answers(other) and len(answers(one)) == 6
        assert len(other.file.read_text().splitlines()) == len(one.file.read_text().splitlines())
    assert not [*(tmp_path / "many").glob("*.part")]


def test_training_data_with_a_killed_actor_is_that_of_one_process(joined, tmp_path, monkeypatch):
    monkeypatch.setattr(trajectories, "CHUNK", 2)
    monkeypatch.setattr(samples, "CHUNK", 2)
    prompts = torch.randint(8, 4000, (8, 6), generator=torch.Generator().manual_seed(2))
    makers = TrajectoryWorkers("zoo:ar", TrajectoryPlan(2, 4, "random"))
    collecting.collect_trajectories(makers, prompts, tmp_path / "t1", LocalPool())
    kill = KillsFirst()
    collecting.collect_trajectories(makers, prompts, tmp_path / "t2", two_actors(), progress=kill)
    assert kill.killed and same_arrays(tmp_path / "t1", tmp_path / "t2") == 4
    corpus = Corpus(np.arange(8, 2008), np.arange(8, 208))
    writers = SampleWorkers("zoo:ar", SamplePlan(8, 16, (0.0, 1.0), 3))
    collecting.collect_samples(writers, corpus, tmp_path / "s1", LocalPool())
    again = KillsFirst()
    collecting.collect_samples(writers, corpus, tmp_path / "s2", two_actors(), again)
    assert again.killed and same_arrays(tmp_path / "s1", tmp_path / "s2") >= 1


def same_arrays(one, other):
    """How many files of arrays two folders have, which are the same."""
    names = sorted(file.name for file in one.glob("*.np[yz]"))
    assert names == sorted(file.name for file in other.glob("*.np[yz]"))
    for name in names:
        held, there = np.load(one / name), np.load(other / name)
        if name.endswith("y"):
            held, there = {"": held}, {"": there}
        assert set(held) == set(there)
        for key in held:
            assert (held[key] == there[key]).all(), (name, key)
    return len(names)


class HasNoRoom:
    """A worker's model for which there is no memory."""

    def make(self):
        from forerun.errors import NoRoom

        raise NoRoom("a worker on there: 'big' takes 14.2 GiB in 16 bits, and 1.0 are free.")


def test_actors_without_memory_are_given_up_with_one_line(joined, monkeypatch):
    """Told before the model is loaded; and where the kernel kills them while it loads."""
    monkeypatch.setattr(cluster, "MOST_RESTARTS", 1)
    with pytest.raises(NoRoom, match=r"takes 14\.2 GiB"):
        list(two_actors().run(HasNoRoom(), [Part("0", 1)]))
    with pytest.raises(WorkersLost, match="for want of memory perhaps") as lost:
        list(cluster.RayPool.of(1, 1, None).run(Dying(), [Part("0", 1)]))
    assert "\n" not in str(lost.value)


def test_an_error_of_a_worker_comes_back_as_it_is(joined, tmp_path):
    plan = GeneratePlan(LoadPlan(str(tmp_path)), "ar")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    job = GenerateJob(plan, str(tmp_path / "p.jsonl"), str(tmp_path / "o.jsonl"))
    with pytest.raises(BadCheckpoint, match=r"a worker on .*without a config.json"):
        generate(job, cluster.RayPool.of(1, 1, None))
    assert not (tmp_path / "o.jsonl").exists()
    with pytest.raises(BadOption, match="do not fit the cluster"):
        cluster.RayPool.of(64, 1, None)


class Clients:
    """Requests without end, each tried again if a server was lost under it."""

    def __init__(self, address, count):
        self.address = address
        self.over = False
        self.texts = []
        self.failed = []
        self.retried = 0
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over = True
        for thread in self.threads:
            thread.join()

    def _ask(self, number):
        asked = {"model": "zoo:ar", "prompt": f"def f{number}(x):", "max_tokens": 8, "seed": 1}
        asked["temperature"] = 0.5  # at 1, a draw of f0 falls within float32's rounding of two
        with httpx.Client(timeout=60) as client:
            while not self.over:
                for turn in range(4):
                    try:
                        answer = client.post(f"{self.address}/v1/completions", json=asked)
                    except httpx.TransportError as error:
                        answer = error
                    if getattr(answer, "status_code", 0) == 200:
                        self.texts.append((number, answer.json()["choices"][0]["text"]))
                        break
                    self.retried += 1
                    time.sleep(0.2 * 2**turn)
                else:
                    self.failed.append(answer)


def test_two_replicas_stream_are_replaced_and_survive_a_kill(joined):
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    settings = Settings(models=["zoo:ar"], lanes=2, max_context=64, grace=10)
    replicas = serving.Replicas(2, 2, cpus=0.5)
    serving.deploy(settings, replicas, "test", "127.0.0.1", port)
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    asked = {"model": "zoo:ar", "prompt": "x =", "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 3
    before = replica_pids()
    assert len(before) == 2
    with Clients(address, 2) as clients:
        serving.deploy(settings, replicas, "test", "127.0.0.1", port)  # a rolling update
        after = replica_pids()
        assert len(after) == 2 and not before & after
        answered = len(clients.texts)
        os.kill(min(after), signal.SIGKILL)
        ends = time.monotonic() + 60
        while len(replica_pids() - after) < 1 and time.monotonic() < ends:
            time.sleep(0.5)
    assert not clients.failed and len(clients.texts) > answered > 0
    assert len(replica_pids() - after) == 1
    for number in range(2):
        assert len({text for who, text in clients.texts if who == number}) == 1
    serving.stop("test")
    with pytest.raises(BadOption, match="nothing of this name"):
        serving.stop("test")


def replica_pids():
    from ray.serve.context import _get_global_client

    told = _get_global_client().get_serve_details()["applications"]["test"]
    replicas = told["deployments"][serving.DEPLOYMENT]["replicas"]
    return {one["pid"] for one in replicas if one["state"] == "RUNNING"}


def test_a_model_that_cannot_be_loaded_is_named(joined, tmp_path):
    settings = Settings(models=[f"wrong={tmp_path}"])
    with pytest.raises(ForerunError, match=r"cannot be served: .*config.json"):
        serving.deploy(settings, serving.Replicas(cpus=0.5), "wrong", "127.0.0.1", free_port())


def test_more_requests_than_the_target_bring_more_replicas():
    told = serving.Replicas(1, 4, target=3).options(Settings())
    assert told["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 4,
        "initial_replicas": 1,
        "target_ongoing_requests": 3,
    }
    assert serving.Replicas(2, 2).options(Settings())["num_replicas"] == 2
    with pytest.raises(BadOption, match="max_replicas=1"):
        serving.Replicas(2, 1)


def command(folder, address):
    words = [sys.executable, "-m", "forerun", "generate", "--ray", address]
    return [*words, "--prompts", str(folder / "p.jsonl"), "-o", str(folder / "o.jsonl")]


def test_an_address_that_answers_not_is_said_at_once(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    for address, said in (
        (f"127.0.0.1:{free_port()}", "nothing answers there"),
        ("nonsense", "must be HOST:PORT"),
    ):
        began = time.monotonic()
        done = subprocess.run(
            command(tmp_path, address),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        assert done.returncode == 2 and said in done.stderr and time.monotonic() - began < 60
        assert len([line for line in done.stderr.splitlines() if "error" in line]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


def test_every_command_says_so_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests have joined
    (tmp_path / "text.jsonl").write_text('{"text": "a b c d"}\n')
    (tmp_path / "code").mkdir()
    for i in range(120):
        (tmp_path / "code" / f"f{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 4)
    (tmp_path / "r.yaml").write_text(
        "objective: distil-drafter\nstart: zoo:ar\ncontext: 16\noptions: {samples: 4}\n"
    )
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "out"
    data = tmp_path / "code"
    for words in (
        ["evaluate", "lambada", "--data", tmp_path / "text.jsonl", "--method", "ar", "--out", out],
        ["trajectories", "collect", "--data", data, "--count", 4, "--given", 8, "--out", out],
        ["samples", "--config", tmp_path / "r.yaml", "--data", data, "--out", out],
        ["serve", "zoo:ar"],
    ):
        done = run(*words, "--ray", f"127.0.0.1:{free_port()}")
        assert isinstance(done.exception, BadOption), (words, done.output)
        assert "nothing answers there" in str(done.exception)
        assert sorted(tmp_path.iterdir()) == before, words


@pytest.mark.parametrize("there", [FAKE, None], ids=["another version", "none"])
def test_a_cluster_with_another_forerun_is_refused(tmp_path, there):
    """A head node whose processes find another package, or an empty one, before ours."""
    package = tmp_path / "site" / "forerun"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(there or "raise ImportError\n")
    port = free_port()
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    words = ["start", "--head", "--port", str(port), "--num-cpus", "1"]
    open_to_all = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # a head asks for a token otherwise
    environment = {**open_to_all, "PYTHONPATH": str(tmp_path / "site")}
    folder = tempfile.mkdtemp(prefix="r")  # the path of a socket must be short
    head = subprocess.Popen(
        [*ray, *words, "--include-dashboard=false", "--temp-dir", folder, "--block"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(120):
            time.sleep(0.5)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
        done = subprocess.run(
            command(tmp_path, f"127.0.0.1:{port}"),
            capture_output=True,
            text=True,
            env={**open_to_all, "PYTHONPATH": str(ROOT / "src")},
            cwd=tmp_path,
        )
        assert done.returncode == 2, done.stderr
        assert ("has forerun 0.0.1" if there else "has no forerun") in done.stderr
        assert not (tmp_path / "o.jsonl").exists()
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # all of the cluster is in its session
        head.wait()
