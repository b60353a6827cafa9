"""Where time goes: floors are worked out from what must be read and done, and the parts of decoding
add up."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from forerun.cli import app
from forerun.engine.clock import Clock
from forerun.engine.pack import Batch
from forerun.errors import BadOption, NoRoom
from forerun.profile.decoding import time_splits
from forerun.profile.forward import Ceilings, TimedForward, floor_of, forwards
from forerun.profile.plots import plot_forwards
from forerun.profile.shapes import SHAPES, random_model
from forerun.sequence.rows import Plan, causal_rows
from tests.helpers import fresh, hears_ctrl_c

runner = CliRunner()
CPU = torch.device("cpu")
SLOW_MEMORY = Ceilings(bytes_per_second=1.0, flops_per_second=1e30)


def test_a_floor_is_the_larger_of_reading_and_arithmetic():
    m = random_model("zoo", CPU, torch.float32, lanes=2, context=64)
    plan = Plan(causal_rows(np.arange(20)), [np.arange(16, 20)], 20)
    batch = Batch([(lane, plan, 16) for lane in range(2)], m.host.slots.table, CPU)
    weights = m.backbone.cost  # tied: the embedding is read whole, as the output's matrix
    kept = 2 * 20 * m.backbone.bytes_per_lane(1)
    slow_memory = floor_of(m.backbone, batch, SLOW_MEMORY)
    assert slow_memory == pytest.approx(4 * weights + kept)
    slow_units = floor_of(m.backbone, batch, Ceilings(1e30, flops_per_second=1.0))
    # two query heads per key head, eight rows of twenty slots
    attention = 2 * 2 * (kept / 2 / 20 / 4) * 8 * 20
    assert slow_units == pytest.approx(2 * weights * 8 + attention)


def test_an_embedding_of_its_own_is_looked_up_and_not_read():
    m = fresh(tie_word_embeddings=False)
    plan = Plan(causal_rows(np.arange(4)), [np.arange(3, 4)], 4)
    batch = Batch([(0, plan, 3)], m.host.slots.table, CPU)
    seconds = floor_of(m.backbone, batch, SLOW_MEMORY)
    assert seconds == pytest.approx(
        4 * (m.backbone.cost - m.backbone.embed.numel()) + 4 * m.backbone.bytes_per_lane(1)
    )


def test_forwards_that_fit_are_timed_and_drawn(tmp_path):
    m = random_model("zoo", CPU, torch.float32, lanes=2, context=64)
    ceilings, timed = forwards(m, [1, 8, 60], [1, 2, 4], [16, 32], turns=1)
    assert {(one.batch, one.context, one.tokens) for one in timed} == {
        (b, c, t) for b in (1, 2) for c in (16, 32) for t in (1, 8)
    }
    assert all(one.seconds > 0 and one.floor > 0 for one in timed)
    assert ceilings.bytes_per_second > 1e8 and ceilings.flops_per_second > 1e8
    assert TimedForward(1, 1, 1, 3.0, 2.0).times == 1.5
    plot_forwards(timed, str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").stat().st_size > 5000
    # slots are clean
    assert (
        m.generate([1, 2, 3], max_tokens=3).token_ids
        == m.generate([1, 2, 3], max_tokens=3).token_ids
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_one_that_the_lean_decoder_takes(shape):
    from transformers import AutoConfig

    from forerun.backbones.lean import SHAPES as LEAN

    config = AutoConfig.for_model(**SHAPES[shape].config_arguments())
    assert config.model_type in LEAN and config.hidden_size % config.num_attention_heads == 0


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("forerun.profile.shapes.available_bytes", lambda device: 1 << 20)
    with pytest.raises(NoRoom, match="smaller shape"):
        random_model("zoo", CPU, torch.float32, 1, 64)
    monkeypatch.undo()
    assert random_model("zoo", CPU, torch.float32, 1, 10**6).context == 16384


def test_the_parts_of_decoding_add_up():
    m = fresh()
    [plain, looked] = time_splits(
        m,
        [("ar", {}), ("lookup", {"k": 3})],
        [[5, 6, 7]] * 2,
        turns=2,
        max_tokens=8,
        ignore_eos=True,
    )
    assert (plain.method, plain.tokens, plain.forwards) == ("ar", 16, 16) and looked.tokens == 16
    for split in (plain, looked):
        assert min(split.forward, split.rules, split.host, split.idle) > 0
        assert split.total == pytest.approx(split.forward + split.rules + split.host + split.idle)
    with pytest.raises(BadOption):
        time_splits(m, [("ar", {})], [[5]], turns=1, max_tokens=10_000)


def test_the_command_line_prints_both_and_refuses_nonsense():
    own = ["bench", "forward", "--tokens", "1,4", "--batch", "1", "--context", "16", "--turns", "1"]
    report = json.loads(runner.invoke(app, [*own, "--json"]).stdout)
    one, four = report["cells"]
    assert (one["tokens"], four["tokens"]) == (1, 4) and report["knees"][0]["tokens"] in (1, 4)
    assert one["break_even"] == 1 and four["break_even"] == four["seconds"] / one["seconds"]
    said = runner.invoke(app, [*own[:-3], "16,16383", "--turns", "1"])
    assert (
        "knee" in said.stdout and "break-even" in said.stdout and "1 of 4 left out" in said.stderr
    )
    rows = json.loads(
        runner.invoke(
            app, ["bench", "decode", "-m", "tiny", "--methods", "ar", "--max-tokens", "4", "--json"]
        ).stdout
    )
    assert rows[0]["method"] == "ar" and rows[0]["tokens/s"] > 0
    for words in (
        ["--shape", "huge"],
        ["--tokens", "1,x"],
        ["--turns", "0"],
        ["--plot", "x.txt"],
        ["--plot", "nowhere/x.png"],
    ):
        assert isinstance(runner.invoke(app, ["bench", "forward", *words]).exception, BadOption)
    assert isinstance(
        runner.invoke(app, ["analyse", "estimators", "--plot", "x.png"]).exception, BadOption
    )


def test_an_interrupted_command_says_so():
    words = [
        "-c",
        "from forerun.cli import main; main()",
        "bench",
        "forward",
        "--shape",
        "smollm2-135m",
        "--turns",
        "99",
    ]
    with subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c
    ) as running:
        time.sleep(8)
        running.send_signal(signal.SIGINT)
        assert "interrupted" in running.communicate(timeout=60)[1] and running.returncode == 130


def test_the_clock_tells_what_the_device_did_from_mark_to_mark(monkeypatch):
    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "the stream of cuda"
            self.at = Event.now

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock, device = Clock(times_device=True), torch.device("cuda")
    clock.forward = clock.rules = 99.0  # what the host thought
    for _ in range(2):
        for name, taken in (("host", 1.0), ("forward", 10.0), ("rules", 3.0)):
            Event.now += taken
            clock.mark(name, device)
    clock.read_device_times()
    assert (clock.forward, clock.rules) == (20.0, 6.0)
    clock.read_device_times()  # nothing new
    assert clock.forward == 20.0
