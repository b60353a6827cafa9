"""Tuning, latency, the limits of self-drafting, and drafters that adapt or speak another
vocabulary."""

import json

import numpy as np
import pytest
import torch

import forerun
from forerun.backbones.translated import table, translated
from forerun.drafters.adaptive import adaptive_length
from forerun.errors import BadOption, NotAble, TokenizerMismatch
from forerun.evaluate.ssd_limit import Decision, SsdLimit, SsdLimitGrid, count_rounds, ssd_limit
from forerun.options import Sampling
from forerun.probability.distributions import tempered
from forerun.probability.logits import TokenHistory
from forerun.profile import tune
from forerun.profile.equations import expected_speed, expected_tokens, fit_steps
from forerun.profile.latency import forward_seconds, knee, seconds_at
from forerun.profile.plots import plot_tuned
from forerun.profile.surface import Measured, SurfacePeak, surface_peak
from forerun.profile.tune_jacobi import JacobiGrid, tune_jacobi
from forerun.profile.tune_specdiff import SpecdiffGrid, tune_specdiff
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.trace import Event
from tests.helpers import PROMPTS, model, run


def test_equations_2_and_3_by_hand():
    assert expected_tokens(0.0, 5) == 1 and expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_speed(0.5, 2, steps=3, c1=0.1, c2=0.7) == pytest.approx(1.75)


def test_equation_6_recovers_its_constants():
    c4, c5 = fit_steps({t: 1 - 0.1 - 0.3 / t for t in (1, 2, 4)})
    assert (c4, c5) == pytest.approx((0.1, 0.3)) and fit_steps({1: 0.7}) == pytest.approx(
        (0.3, 0.0)
    )


def test_a_surface_finds_a_peak_between_what_was_measured():
    points = [
        Measured(b, c, 100 - (np.log2(b) - np.log2(12)) ** 2 - (c - 2) ** 2)
        for b in (4, 8, 16, 32, 64)
        for c in (0, 1, 3, 5)
    ]
    assert surface_peak(points) == SurfacePeak(degree=2, block=12, candidates=2)


def test_latency_is_measured_and_the_knee_is_where_it_rises():
    seconds = forward_seconds(model(), sizes=(1, 4, 16), turns=2)
    assert set(seconds) == {1, 4, 16} and min(seconds.values()) > 0
    assert knee({1: 1.0, 2: 1.1, 4: 1.2, 8: 3.0}) == 4 and seconds_at({1: 1.0, 3: 2.0}, 2) == 1.5


def test_specdiff_is_tuned_and_its_file_is_used(tmp_path):
    target = forerun.load("zoo:ar", lanes=1)
    draft = forerun.load("zoo:masked", lanes=1)
    lines = []
    found = tune_specdiff(
        target,
        draft,
        ["import os\n\n\ndef main():"],
        tune.TuningSettings(max_tokens=8, temperature=1.0),
        grid=SpecdiffGrid(gammas=(2, 4), steps=(1, 2)),
        report=lines.append,
    )
    assert len(found.rows) == 4 and found.options["k"] in (2, 4) and found.facts.c4 is not None
    assert any("draft_temperature" in line for line in lines)
    found.write(str(tmp_path / "t.json"))
    method, options = tune.read(str(tmp_path / "t.json"))
    assert method == "specdiff" and options["draft"] == "zoo:masked"
    result = run("generate", "def f(", "--tuned", tmp_path / "t.json", "--max-tokens", 4, "--json")
    assert json.loads(result.stdout)["method"] == "specdiff"
    assert "is for method" in str(
        run("generate", "x", "--tuned", tmp_path / "t.json", "--method", "ar").exception
    )


def test_jacobi_is_tuned_drawn_and_refused_above_temperature_0(tmp_path):
    found = tune_jacobi(
        model("llama", torch.float32, lanes=1),
        [PROMPTS[0]],
        tune.TuningSettings(max_tokens=8),
        grid=JacobiGrid(blocks=(2, 4), candidates=(0, 2)),
    )
    assert (
        found.method == "multiblock"
        and found.options["block"] in (2, 3, 4)
        and found.facts.knee >= 1
    )
    plot_tuned(found, str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert "greedily" in str(run("tune", "jacobi", "--temperature", 1).exception)
    assert "needs --draft" in str(run("tune", "specdiff").exception)
    assert "rounds=0" in str(run("tune", "jacobi", "--rounds", 0).exception)
    assert "jacobi" in str(run("tune", "jacobian").exception)


def test_a_file_that_tune_did_not_write_is_refused(tmp_path):
    file = tmp_path / "t.json"
    for text in ("", "{}", '{"method": "jacobi", "options": {"blokc": 3}}'):
        file.write_text(text)
        with pytest.raises(BadOption):
            tune.read(str(file))


def test_rounds_of_self_drafting_by_hand():
    decisions = [
        Decision(0, 5, {0: [5], 1: [6], 2: [9, 7]}),
        Decision(1, 6, {}),
        Decision(2, 7, {2: [7], 3: [8]}),
        Decision(3, 8, {}),
    ]
    # token 7 was not the likeliest of its place, but the second
    assert count_rounds(decisions, drafts=3, top=1) == 2
    assert count_rounds(decisions, drafts=3, top=2) == 2  # position 3 was not asked about at first
    assert (
        count_rounds(decisions, drafts=1, top=2) == 2
        and count_rounds(decisions, drafts=0, top=1) == 4
    )
    limit = SsdLimit(3, 1, tokens=4, rounds=2)
    assert limit.reduction == 0.5 and limit.bound == 0.75


def test_ssd_reaches_no_further_than_its_limit():
    m = forerun.load("zoo:masked", lanes=1)
    prompt = "import os\n\n\ndef main():"
    [one] = ssd_limit(m, [prompt], grid=SsdLimitGrid(drafts=(4,), tops=(1,)), max_tokens=16)
    ssd = m.generate(prompt, method="ssd", drafts=4, tree="chain", max_tokens=16, ignore_eos=True)
    assert one.tokens == 16 and one.rounds <= ssd.stats.forwards
    with pytest.raises(NotAble, match="no masked model"):
        ssd_limit(model(), [[1]])
    with pytest.raises(BadOption, match="block=0"):
        ssd_limit(m, [prompt], block=0)
    with pytest.raises(BadOption, match="cache"):
        ssd_limit(m, [prompt], cache="all")
    rows = json.loads(run("analyse", "ssd-limit", "--max-tokens", 4, "--json").stdout)
    assert len(rows) == 15 and all(0 <= row["reduction"] <= row["bound"] + 1e-9 for row in rows)


def canvas_after(*events):
    seq = Canvas(
        [1, *[BLANK] * 9], history=TokenHistory(Sampling(), np.zeros(0, np.int64), 8, frozenset())
    )
    seq.trace.events = [
        Event(1, "accepted", [], [], [1] * drafted, [1] * rejected) for drafted, rejected in events
    ]
    return seq


def test_drafts_grow_while_they_are_accepted_and_shrink_while_they_are_not():
    assert adaptive_length(canvas_after(*[(8, 0)] * 6), 20) == 20
    assert adaptive_length(canvas_after(*[(8, 8)] * 8), 20) == 1
    assert 1 < adaptive_length(canvas_after(*[(4, 2)] * 8), 20) < 10
    assert 1 <= adaptive_length(canvas_after(), 20) <= 20


def test_a_law_at_another_temperature():
    law = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(
        tempered(law, 0.5)[0], torch.tensor([2 / 3, 1 / 6, 1 / 6], dtype=torch.float64)
    )
    assert torch.equal(tempered(law, 3.0)[1], law[1]) and tempered(law, 1.0) is law


@pytest.mark.parametrize(
    "option",
    [
        dict(adapt=True),
        dict(draft_temperature=0.5),
        dict(first=9),
        dict(first=9, first_draft="zoo:drafter"),
        dict(keep=True),
    ],
    ids=str,
)
def test_whatever_drafts_greedy_text_is_the_targets(option):
    m = forerun.load("zoo:ar", lanes=1)
    plain = m.generate("def add(a, b):", max_tokens=24, ignore_eos=True)
    fast = m.generate(
        "def add(a, b):",
        method="specdiff",
        draft="zoo:masked",
        max_tokens=24,
        ignore_eos=True,
        **option,
    )
    assert fast.token_ids == plain.token_ids and fast.stats.forwards < plain.stats.forwards


@pytest.mark.parametrize(
    "bad, said",
    [
        (dict(draft_temperature=0), "draft_temperature=0"),
        (dict(adapt=2), "adapt=2"),
        (dict(first=-1), "first=-1"),
    ],
)
def test_drafters_refuse_what_means_nothing(bad, said):
    with pytest.raises(BadOption, match=said):
        forerun.load("zoo:ar", lanes=1).generate("x", method="specdiff", draft="zoo:masked", **bad)
    with pytest.raises(NotAble, match="first_draft"):
        forerun.load("zoo:ar", lanes=1).generate(
            "x", method="specdiff", draft="zoo:masked", first=3, first_draft="zoo:masked"
        )


class Words:
    """A tokenizer that is nothing but its words."""

    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def batch_decode(self, ids, **_):
        return [self.words[i] for [i] in ids]


def test_tokens_are_matched_by_their_text():
    ours = Words(["a", "b", "c", "\ufffd"])
    theirs = Words(["c", "x", "a", "\ufffd", "b"])
    assert table(ours, theirs, 4, 5, mask=None).tolist() == [2, 4, 0, -1]
    # the mask is never a token of ours
    assert table(ours, theirs, 4, 5, mask=0).tolist() == [2, 4, -1, -1]
    longer = Words(["a", "b", "c", "\ufffd", "d"])
    assert table(ours, longer, 4, 5, mask=4).tolist() == [0, 1, 2, 3] and table(
        longer, ours, 5, 4, None
    ).tolist() == [
        0,
        1,
        2,
        3,
        -1,
    ]


def test_a_draft_with_shuffled_tokens_drafts_as_if_they_were_the_targets():
    """The same network with its vocabulary renumbered: translated, every draft is accepted."""
    target = model("llama", torch.float64)
    size = target.vocab
    # their token i is our token order[i]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    net = forerun.checkpoints.tiny.build("llama", 0, torch.float64)
    with torch.no_grad():
        embed, head = net.model.embed_tokens.weight.clone(), net.lm_head.weight.clone()
        net.model.embed_tokens.weight[:size] = embed[order]
        net.lm_head.weight[:size] = head[order]
    words = [f"w{i}" for i in range(size)]
    draft = forerun.from_network(net, None, name="shuffled", lanes=8, max_context=160)
    target = forerun.from_network(
        forerun.checkpoints.tiny.build("llama", 0, torch.float64), None, lanes=8, max_context=160
    )
    target.tokenizer, draft.tokenizer = Words(words), Words([words[int(i)] for i in order])
    found = translated(target, draft)[1]
    assert found.vocab == size
    ids = dict(max_tokens=16, ignore_eos=True)
    target.tokenizer.decode = lambda *args, **kwargs: ""
    plain = target.generate(PROMPTS[0], **ids)
    fast = target.generate(PROMPTS[0], method="speculative", draft=draft, k=3, **ids)
    assert fast.token_ids == plain.token_ids and fast.stats.forwards == 4


def test_vocabularies_with_nothing_in_common_are_refused():
    target, draft = (
        model(),
        forerun.from_network(
            forerun.checkpoints.tiny.build("llama", 1, torch.float32), None, max_context=160
        ),
    )
    other = forerun.from_network(
        forerun.checkpoints.tiny.build("llama", 0, torch.float32), None, max_context=160
    )
    other.tokenizer, draft.tokenizer = (
        Words([f"a{i}" for i in range(other.vocab)]),
        Words([f"b{i}" for i in range(draft.vocab)]),
    )
    with pytest.raises(TokenizerMismatch, match="share only 0"):
        translated(other, draft)
    assert translated(target, target) == (target.family, target.backbone)


@pytest.mark.parametrize("plain, recommended", [(100.0, True), (300.0, False)])
def test_options_that_are_slower_than_plain_decoding_are_not_recommended(plain, recommended):
    from forerun.cli.tune import verdict

    found = tune.Tuned("specdiff", {"k": 4}, 200.0, plain, [], facts=None, machine="here")
    said = "\n".join(verdict(found, "tuned.json"))
    assert ("use it with" in said) == recommended == ("--method specdiff" in said)
    assert ("--method ar" in said) == (not recommended)
