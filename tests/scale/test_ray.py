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

from forerun.errors import BadCheckpoint, BadOption, ForerunError
from forerun.scale import cluster, serving
from forerun.scale.generating import GenerateJob, GeneratePlan, generate
from forerun.scale.loading import LoadPlan
from forerun.scale.local import LocalPool
from forerun.serve.settings import Settings
from tests.helpers import ROOT
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


def test_a_killed_actor_loses_and_repeats_nothing(joined, tmp_path):
    alone = generate(job_in(tmp_path, "alone.jsonl"), LocalPool())
    killed = []

    def kill(answered, done, total):
        if not killed:
            killed.append(answered.pid)
            os.kill(answered.pid, signal.SIGKILL)

    pool = cluster.RayPool.of(2, 1, None)
    totals = generate(job_in(tmp_path, "ray.jsonl"), pool, progress=kill)
    assert killed and killed[0] != os.getpid() and totals == alone
    assert (tmp_path / "ray.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


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
