"""A file of prompts becomes a file of answers: each once, the same bits by any number of workers,
whatever is killed on the way."""

import json
import os
import signal

import pytest

from forerun.errors import BadOption, NoRoom
from forerun.scale.generating import GenerateJob, GeneratePlan, generate, read_entries
from forerun.scale.journal import Journal
from forerun.scale.loading import LoadPlan
from forerun.scale.local import LocalPool
from forerun.scale.work import Answered, Part, WorkersLost
from tests.helpers import run
from tests.scale.dying import Dying

PLAN = GeneratePlan(
    LoadPlan("zoo:ar", lanes=2, max_context=64),
    "lookup",
    None,
    {"max_tokens": 8, "temperature": 0.8, "logprobs": 1},
)


def job_in(folder, name, prompts=12):
    lines = [{"id": f"q{i}", "prompt": f"def f{i}(x):\n    return"} for i in range(prompts)]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return GenerateJob(PLAN, str(folder / "p.jsonl"), str(folder / name), batch=2)


class Killed(Exception):
    """Stands for a run that ends in the middle."""


def test_a_run_that_was_stopped_goes_on_and_writes_the_same_bytes(tmp_path):
    whole = generate(job_in(tmp_path, "whole.jsonl"), LocalPool())
    assert (whole.prompts, whole.answers, whole.errors, whole.resumed) == (12, 12, 0, 0)
    stopped = job_in(tmp_path, "stopped.jsonl")

    def stop(answered, done, total):
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        generate(stopped, LocalPool(), progress=stop)
    assert not (tmp_path / "stopped.jsonl").exists(), "nothing half written"
    journal = tmp_path / "stopped.jsonl.part"
    with journal.open("ab") as out:
        out.write(b'{"part": "4", "answer": [[{"te')  # killed while it wrote
    with pytest.raises(BadOption, match="--resume goes on"):
        generate(stopped, LocalPool())
    with pytest.raises(BadOption, match="differs in batch"):
        generate(
            GenerateJob(PLAN, stopped.prompts, stopped.output, batch=3), LocalPool(), resume=True
        )
    again = generate(stopped, LocalPool(), resume=True)
    assert again.resumed == 2 and not journal.exists()
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(12)]
    assert all(row["stats"]["tokens"] and len(row["logprobs"]) for row in rows)
    with pytest.raises(BadOption, match="exists already"):
        generate(stopped, LocalPool(), resume=True)


def test_a_killed_worker_loses_and_repeats_nothing(tmp_path):
    alone = generate(job_in(tmp_path, "alone.jsonl"), LocalPool())
    killed = []

    def kill(answered, done, total):
        if not killed:
            killed.append(answered.pid)
            os.kill(answered.pid, signal.SIGKILL)

    totals = generate(job_in(tmp_path, "two.jsonl"), LocalPool(workers=2), progress=kill)
    assert killed and killed[0] != os.getpid()
    assert totals == alone
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_workers_that_only_die_are_given_up_with_one_line(monkeypatch):
    monkeypatch.setattr("forerun.scale.local.MOST_LOSSES", 1)
    with pytest.raises(WorkersLost, match="is there memory for 2 models"):
        list(LocalPool(workers=2).run(Dying(), [Part("0", 1), Part("1", 2)]))


def test_a_model_that_memory_has_no_room_for_is_refused_by_name(tmp_path, monkeypatch):
    from forerun.checkpoints import tiny
    from forerun.scale import loading

    tiny.build("qwen2").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    numbers = loading.weights_in(tmp_path)
    monkeypatch.setattr(loading, "available_bytes", lambda device: 4 * numbers - 1)
    with pytest.raises(NoRoom, match=r"a worker on .*takes 0.0 GiB in 32 bits"):
        LoadPlan(str(tmp_path), "cpu").model()
    monkeypatch.setattr(loading, "available_bytes", lambda device: 4 * numbers)
    assert LoadPlan(str(tmp_path), "cpu", lanes=1, max_context=32).model().lanes == 1


def test_the_command_writes_a_file_or_says_where_to_go_on(tmp_path):
    (tmp_path / "p.txt").write_text("def f(x):\n\nx = 1\n")
    words = ["generate", "--prompts", tmp_path / "p.txt", "-o", tmp_path / "o.jsonl"]
    words += ["--workers", 1, "--max-tokens", 4, "--n", 2, "--temperature", 1, "-m", "zoo:ar"]
    done = run(*words, "--method", "lookup", "--k", 2)
    assert done.exit_code == 0 and "2 prompts, 16 tokens" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(row["id"], row["sample"]) for row in rows] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert "seconds" not in rows[0]["stats"] and rows[0]["prompt"] == "def f(x):"
    assert "exists already" in str(run(*words, "--resume").exception)


def test_an_answer_is_kept_once(tmp_path):
    journal = Journal(tmp_path / "out", {"by": "test"})
    for answer in ("first", "second"):
        journal.add(Answered("a", answer, 0))
    assert [*journal.answers(["a"])] == ["first"] and len(journal) == 1
    with pytest.raises(BadOption, match="another run writes"):
        Journal(tmp_path / "out", {"by": "test"}, resume=True)


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"prompt": "x"', r"p.jsonl:2 must be a JSON object"),
        ('{"text": "x"}', r"p.jsonl:2 must be"),
        ('{"prompt": 3}', r"p.jsonl:2 must be"),
        ('{"prompt": "x", "id": [1]}', r"p.jsonl:2 must be"),
        ('{"prompt": "x", "id": "a"}', r"p.jsonl:2 has the id 'a' of line 1 again"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "mixes"),
    ],
)
def test_a_broken_line_is_named_before_anything_is_written(tmp_path, line, said):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "id": "a"}\n' + line + "\n")
    with pytest.raises(BadOption, match=said):
        read_entries(str(tmp_path / "p.jsonl"))
    words = ["generate", "--prompts", str(tmp_path / "p.jsonl"), "--workers", "2"]
    done = run(*words, "-o", str(tmp_path / "o.jsonl"))
    assert isinstance(done.exception, BadOption)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.jsonl"]
