"""`auto` beside fixed methods in a world without noise: `bench/simulated.py` replays texts against
a cost curve, with the real engine on a clock of its own."""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace

import pytest

from forerun.engine.choosing import PROBE_STEPS
from forerun.engine.pace import Pace
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
    scene = simulated.Scene("fills", simulated.Writer(48, varied=True).traps(32), 16, 1)
    row = simulated.simulate(scene, simulated.GPU, [("ar", {})])
    assert row.of_plain >= OF_PLAIN, row


@pytest.mark.parametrize("machine", ["SMALL", "STEPS"])
@pytest.mark.parametrize("name", ["nothing is accepted", "a batch of 8, half of them everything"])
def test_where_text_comes_at_once_drafts_are_compared_with_that(simulated, name, machine):
    """A small model on a GPU: whoever drafts makes all others write token by token, or wait for the
    host."""
    [scene] = [scene for scene in simulated.scenes(96) if scene.name == name]
    row = simulated.simulate(scene, getattr(simulated, machine), [("ar", {})])
    assert row.of_plain >= OF_PLAIN, row


def test_a_named_draft_model_is_tried_once_though_it_costs(simulated):
    """On a machine where the share of the time that trials may take would be over before."""
    curve = {1: 1.5e-3, 8: 1.6e-3, 64: 2e-3, 128: 2.5e-3, 512: 6e-3}
    pair = replace(simulated.STEPS, curve=curve, draft=8e-4)
    scene = simulated.Scene("no copies", simulated.Writer(160).traps(4, 0.3))
    player = simulated.Player(scene, pair)
    text = scene.texts[0]
    out = player.model.generate(
        text.tokens[: text.prompt], draft=player.draft, max_tokens=100, ignore_eos=True
    )
    assert out.stats.choices["draft"] == PROBE_STEPS - 1  # the first waits for a step to end
    row = simulated.simulate(scene, pair, [("ar", {})])
    assert row.of_plain >= OF_PLAIN, row


@pytest.mark.parametrize("share", [0.3, 0.72])
def test_requests_that_come_at_random_are_written_as_fast_as_by_the_best(simulated, share):
    """One to four at a time: each may want the draft model, at a moment of its own."""
    machine = replace(simulated.SEVEN, capture=0.0)
    fixed = [("ar", {}), ("speculative", {"k": 2})]  # one of them is the best here
    row = simulated.simulate(simulated.load("at random", share, 6), machine, fixed)
    assert row.of_plain >= OF_PLAIN and row.of_best >= OF_BEST, row


def test_what_is_drafted_for_the_first_time_is_paid_for_before(simulated):
    """Each length that a draft model drafts is captured. Whoever changed it with the odds would
    have all of them captured, one after the other, while everybody waits."""
    player = simulated.Player(simulated.load("at random", 0.72, 6), simulated.SEVEN)
    player.seconds(("auto", {}))
    drafted = sum(result.stats.choices.get("draft", 0) for result in player.results)
    made = player.model.engine.hosts[1].writer.made
    assert drafted > 100 and 1 <= len(made) <= 2, (drafted, made)


def test_who_has_to_wait_before_it_drafts_still_wants_to(simulated):
    """Beside others a draft model is asked in one step of eight, and where steps are begun ahead
    the draft follows in the next one: it is asked there, too."""
    player = simulated.Player(simulated.load("at random", 0.85, 6), simulated.SEVEN)
    player.seconds(("auto", {}))
    chosen = Counter()
    for result in player.results:
        chosen.update(result.stats.choices)
    assert chosen["draft"] > 2 * chosen["none"], chosen


def test_somebody_who_comes_does_not_keep_a_batch_from_drafting(simulated):
    """A step in which a text begins is plain. The next one need not be."""
    [scene] = [each for each in simulated.scenes(96) if each.name == "a batch of 8, everything"]
    best = [("ar", {}), ("lookup", {"k": 10, "adapt": False})]
    for machine in (simulated.SMALL, simulated.STEPS):
        row = simulated.simulate(scene, machine, best)
        assert row.of_best >= 0.85, row


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


def test_a_draft_model_that_reads_a_long_prompt_holds_up_nobody(simulated):
    """Between two chunks of it others take a step."""
    writer = simulated.Writer(200)
    streams = writer.traps(3)
    long = simulated.Text([9, *[60] * 420], 400, [True] * 421)
    player = simulated.Player(simulated.Scene("long", [*streams, long], 4), simulated.GPU)
    engine = player.model.engine
    for text in streams:
        player.model.submit(text.tokens[: text.prompt], max_tokens=200, method="ar")
    for _ in range(20):
        engine.step()
    reader = player.model.submit(
        long.tokens[: long.prompt], max_tokens=8, method="speculative", k=4, draft=player.draft
    )
    draft_host = engine.hosts[1]
    draft_host.pace = Pace(draft_host.costs, 16)
    gaps = []
    last, tokens = player.now(), engine.running[0].seq.known
    while not reader.finished:
        engine.step()
        known = engine.running[0].seq.known
        if known > tokens:
            gaps.append(player.now() - last)
            last, tokens = player.now(), known
    assert draft_host.work.forwards > 25
    # the draft that is written after the last chunk, and whatever a step with a chunk takes
    assert max(gaps) <= 4 * simulated.GPU.draft + 2 * simulated.GPU.curve[1]
