"""`auto` beside fixed methods in a world without noise: `bench/simulated.py` replays texts against
a cost curve, with the real engine on a clock of its own."""

import importlib.util
import sys

import pytest

from tests.helpers import ROOT

OF_PLAIN = 0.97
OF_BEST = 0.95


@pytest.fixture(scope="module")
def simulated():
    spec = importlib.util.spec_from_file_location("simulated", ROOT / "bench/simulated.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulated"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulated"]


@pytest.mark.parametrize("machine", ["GPU", "CPU"])
@pytest.mark.parametrize("name", ["nothing is accepted", "it changes every 40 tokens"])
def test_it_loses_next_to_nothing_whatever_is_accepted(simulated, name, machine):
    [scene] = [scene for scene in simulated.scenes(96) if scene.name == name]
    fixed = [("ar", {}), ("lookup", {"k": 10, "adapt": False})]  # one of them is the best here
    row = simulated.simulate(scene, getattr(simulated, machine), fixed)
    assert row.of_plain >= OF_PLAIN and row.of_best >= OF_BEST, row


def test_a_full_batch_pays_for_no_drafts_that_nobody_accepts(simulated):
    """A batch that fills from 1 to 16: the host's work for each draft costs more than it brings."""
    scene = simulated.Scene("fills", simulated.Writer(24).traps(24), 16, 2)
    plain = simulated.Player(scene, simulated.GPU).seconds(("ar", {}))
    assert simulated.Player(scene, simulated.GPU).seconds(("auto", {})) <= plain / OF_PLAIN


def test_a_stream_waits_at_most_twice_its_usual_step_beside_a_long_prompt(simulated):
    """Through the whole engine, with the steep curve of a CPU."""
    writer = simulated.Writer(300)
    streams = writer.traps(3)
    long = simulated.Text([9, *[60] * 420], 420, [True] * 421)
    player = simulated.Player(simulated.Scene("long", [*streams, long], 4), simulated.CPU)
    how = dict(method="ar", ignore_eos=True)
    for text in streams:
        player.model.submit(text.tokens[: text.prompt], max_tokens=300, **how)
    gaps = {"alone": [], "beside": []}
    engine = player.model.engine
    last, tokens, reader = player.now(), 0, None
    while reader is None or not reader.finished:
        engine.step()
        known = engine.running[0].seq.known if engine.running else 0
        if known == tokens:
            continue
        gaps["alone" if reader is None else "beside"].append(player.now() - last)
        last, tokens = player.now(), known
        if len(gaps["alone"]) == 15 and reader is None:
            reader = player.model.submit(long.tokens[: long.prompt], max_tokens=1, **how)
    usual = sorted(gaps["alone"])[7]
    assert len(gaps["beside"]) > 5 and max(gaps["beside"]) <= 2 * usual
