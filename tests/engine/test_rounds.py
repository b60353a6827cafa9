"""On a CPU a model goes on by itself for several rounds of draft and verdict: the same texts,
traces and memos as if each round had been asked for."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

import forerun
from forerun.backbones import native
from forerun.backbones.threads import ThreadChoice
from forerun.checkpoints import tiny
from forerun.checkpoints.drafters import write_drafter
from forerun.drafters import adaptive
from forerun.drafters.lookup import LookupDrafter
from forerun.engine import rounds
from forerun.engine.cache import Memo
from forerun.engine.costs import FixedCosts, StepCosts, StepWatch
from forerun.engine.host import Host
from forerun.engine.pack import Batch
from forerun.engine.rounds import Rounds
from forerun.methods import sources
from forerun.sequence.rows import PlainText
from tests.drafters.test_features import make_drafter
from tests.helpers import stepped

WORDS = 12
ORIGINAL_HAND_OVER = Rounds._hand_over  # that looks at nothing
BACK = 0.07
LONG = [*range(40, 60), 7, 8, 9, *range(100, 120), 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def compiled(folder, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(folder))
    monkeypatch.setattr(rounds, "MOST_ROUNDS", 6)
    monkeypatch.setattr(rounds, "AHEAD", 24)
    native.compiled_in.cache_clear()
    if native.library() is None:
        pytest.skip(native.compiled().words)
    yield
    native.compiled_in.cache_clear()


def model(arch="llama", lanes=4, page=8, slots=None, noise=0.0, in_rounds=True):
    """A tiny model with small pages, stepped by hand. It knows few words and looks back so little
    that its texts repeat themselves. With noise it is a draft model that is often right."""
    network = tiny.build(arch)
    with torch.no_grad():
        network.lm_head.weight[WORDS:] *= 0.1
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight *= BACK
        torch.manual_seed(1)
        for weight in network.parameters():
            weight += noise * torch.randn_like(weight)
    m = stepped(forerun.from_network(network, tiny.tokenizer(), lanes=lanes, max_context=128))
    m.engine.page = page
    m.engine.slots = slots
    if not in_rounds:
        m.engine._go_on = lambda *_: None
    return m


@pytest.fixture
def launches(monkeypatch):
    """What every launch made; each is looked at, before and after."""
    made = []
    claim, hand_over = Rounds._claim, Rounds._hand_over

    def claim_and_keep(self, each):
        claim(self, each)
        self.before = {id(host): everything(host) for host in self._hosts}

    def look_at(self, answer):
        for host in self._hosts:
            untouched_elsewhere(self, host, self.before[id(host)])
        hand_over(self, answer)
        for host in self._hosts:
            host.pool.check([memo.pages for memo in host.memos])
            for memo in host.memos:
                holds_what_it_says(host, memo)
        made.append(answer)

    monkeypatch.setattr(Rounds, "_claim", claim_and_keep)
    monkeypatch.setattr(Rounds, "_hand_over", look_at)
    return made


def step_until_launched(m, launches):
    while not launches:
        assert m.engine.busy, "all texts ended without a launch"
        m.engine.step()


def everything(host):
    """What all slots of all layers hold, [layer, slot, N]."""
    layers = range(host.backbone.layers)
    both = [torch.stack(list(host.slots.flat(layer)), 1).flatten(1) for layer in layers]
    return torch.stack(both)


def untouched_elsewhere(made, host, before):
    """Only slots that were claimed may be written."""
    claimed = np.zeros(before.shape[1], bool)
    for each in made._drafting:
        if host is made.host or host is each.drafter:
            slots = np.arange(made._first(each, host), made._room(each, host))
            claimed[host.slots.table.places(np.array(each.one.lane), slots)] = True
    kept = torch.from_numpy(~claimed)
    assert torch.equal(everything(host)[:, kept], before[:, kept])


def holds_what_it_says(host, memo):
    """The slots of a lane hold what a fresh forward writes for those rows."""
    held = memo.held
    if not held.shape[1] or memo._causal < held.shape[1]:
        return
    plan = PlainText.of(held[0].copy(), held.shape[1] - 1)
    slots = host.backbone.make_slots(1, host.room)
    host.backbone.forward(Batch([(0, plan, 0)], slots.table, host.device), slots)
    places = host.slots.table.places(np.array(memo._lane), np.arange(held.shape[1]))
    for layer in range(host.backbone.layers):
        for own, fresh in zip(host.slots.flat(layer), slots.flat(layer)):
            torch.testing.assert_close(own[places], fresh[: held.shape[1]])


def said(results):
    return [
        (r.token_ids, r.finish_reason, str(r.trace), r.stats.forwards, r.stats.draft_forwards)
        for r in results
    ]


def scenario(seed):
    """Prompts and how they go on, at random."""
    chance = random.Random(seed)
    shared = [chance.randrange(1, 250) for _ in range(chance.randrange(20))]
    prompts = []
    for _ in range(chance.randrange(1, 5)):
        own = [chance.randrange(1, 250) for _ in range(chance.randrange(1, 20))]
        prompts.append((shared + own * chance.choice([1, 1, 2]))[:60])
    how = dict(
        max_tokens=[chance.randrange(1, 60) for _ in prompts],
        stop_token_ids=[chance.randrange(WORDS) for _ in range(chance.choice([0, 0, 1]))],
        ignore_eos=chance.random() < 0.5,
        k=chance.choice([1, 2, 5, 12]),
        adapt=chance.random() < 0.7,
        ngram=chance.choice([1, 3, 4]),
    )
    return prompts, how


def write_all(m, prompts, how, **more):
    """All of them at once, each as long as it is to be."""
    how = dict(how)
    lengths = how.pop("max_tokens")
    jobs = [m.submit(p, max_tokens=n, **how, **more) for p, n in zip(prompts, lengths)]
    m.engine.run()
    return [result for job in jobs for result in job.results()]


@pytest.mark.parametrize("seed", range(40))
def test_copies_in_rounds_are_those_made_one_by_one(seed, launches):
    prompts, how = scenario(seed)
    with_rounds, without = model(), model(in_rounds=False)
    found = write_all(with_rounds, prompts, how, method="lookup")
    count = len(launches)
    assert said(found) == said(write_all(without, prompts, how, method="lookup"))
    assert len(launches) == count
    plain = write_all(without, prompts, only_text(how), method="ar")
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]


@pytest.mark.parametrize("noise", [0.0, 0.015])
@pytest.mark.parametrize("seed", range(15))
def test_drafts_of_a_model_in_rounds_are_those_written_one_by_one(seed, noise, launches):
    prompts, how = scenario(seed)
    how = {**only_text(how), "k": how["k"], "method": "speculative"}
    found = []
    for in_rounds in (True, False):
        m = model(in_rounds=in_rounds)
        found.append(said(write_all(m, prompts, how, draft=model(noise=noise))))
    assert found[0] == found[1]


@pytest.mark.parametrize("arch", ["block", "block-shifted"])
@pytest.mark.parametrize("seed", range(15))
def test_blanks_filled_in_rounds_are_those_filled_one_by_one(seed, arch, launches):
    prompts, how = scenario(seed)
    how = {**only_text(how), "k": how["k"], "method": "specdiff"}
    found = []
    for in_rounds in (True, False):
        m = model(in_rounds=in_rounds)
        found.append(said(write_all(m, prompts, how, draft=model(arch))))
    assert found[0] == found[1]


LOOKING = [
    dict(markov_rank=32, draft_vocab=40),
    dict(markov_rank=32),
    dict(draft_vocab=40, feature_norms=True),
    {},
]


def looking_drafter(folder, kind):
    """One that looks into the target of `model`. A correction by the token before makes it say what
    mostly follows there."""
    folder.mkdir(exist_ok=True)
    drafter, network = make_drafter(folder, **kind)
    markov = drafter.markov_head
    if markov is not None:
        if drafter.shape.draft_vocab:
            drafter.draft_only(torch.arange(drafter.shape.draft_vocab))
        with torch.no_grad():
            drafter.norm.weight *= 0.05  # what the text says counts little
            markov.markov_w1.weight.zero_()
            markov.markov_w1.weight[range(WORDS), range(WORDS)] = 1.0
            for word, follower in followers().items():
                markov.markov_w2.weight[follower, word] = 30.0
        write_drafter(folder, drafter, network.config, "tiny")
    return str(folder)


def followers():
    """What mostly follows each word in texts of `model`."""
    target = model(in_rounds=False)
    counts = {}
    for seed in range(8):
        for prompt in scenario(seed)[0]:
            text = target.generate(prompt, max_tokens=40, ignore_eos=True).token_ids
            for word, follower in pairwise(text):
                counts.setdefault(word, Counter())[follower] += 1
    return {word: most.most_common(1)[0][0] for word, most in counts.items() if word < WORDS}


@pytest.mark.parametrize("kind", LOOKING, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("seed", range(12))
def test_looks_into_a_target_in_rounds_are_those_taken_one_by_one(seed, kind, launches, tmp_path):
    prompts, how = scenario(seed)
    how = {**only_text(how), "k": how["k"], "method": "specdiff"}
    draft = looking_drafter(tmp_path, kind)
    found = []
    for in_rounds in (True, False):
        m = model(in_rounds=in_rounds)
        found.append(said(write_all(m, prompts, how, draft=draft)))
    assert found[0] == found[1]


@pytest.mark.parametrize("mistake", ["a token is skipped", "a block is too short"])
def test_a_look_that_goes_wrong_is_seen(mistake, launches, monkeypatch, tmp_path):
    asked = Rounds._asked

    def asked_wrongly(self, each):
        text = asked(self, each)
        if mistake == "a token is skipped":
            return text._replace(held=min(text.held + 1, len(text.tokens) - 1))
        return text._replace(block=text.block - 1)

    kind = dict(draft_vocab=40, feature_norms=True)
    draft = looking_drafter(tmp_path, kind)
    right, wrong = [], []
    for seed in range(6):
        prompts, how = scenario(seed)
        how = {**only_text(how), "k": how["k"], "method": "specdiff", "draft": draft}
        right += said(write_all(model(), prompts, how))
        with monkeypatch.context() as patched:
            patched.setattr(Rounds, "_asked", asked_wrongly)
            patched.setattr(Rounds, "_hand_over", ORIGINAL_HAND_OVER)
            wrong += said(write_all(model(), prompts, how))
    assert launches and wrong != right


def only_text(how):
    return {name: how[name] for name in ("max_tokens", "stop_token_ids", "ignore_eos")}


def test_these_scenarios_have_launches_of_many_rounds_and_all_their_ends(launches, tmp_path):
    """Else they would test little."""
    kinds = []
    for seed in range(12):
        prompts, how = scenario(seed)
        of_models = {**only_text(how), "k": how["k"]}
        for kind, more in {
            "lookup": how,
            "speculative": of_models | dict(draft=model(noise=0.015)),
            "specdiff": of_models | dict(draft=model("block-shifted")),
            "looking": of_models | dict(draft=looking_drafter(tmp_path, LOOKING[seed % 2])),
        }.items():
            method = "specdiff" if kind == "looking" else kind
            write_all(model(), prompts, more, method=method)
            kinds += [kind] * (len(launches) - len(kinds))
    for kind in ("lookup", "speculative", "specdiff", "looking"):
        those = [made for own, made in zip(kinds, launches) if own == kind]
        lengths = {max(map(len, made.rounds)) for made in those}
        assert len(those) > 20 and min(lengths) < 3 and max(lengths) == 6
        every = [one for made in those for text in made.rounds for one in text]
        assert {0, 1, 2, 3} <= {one.accepted for one in every}
        assert any(0 < one.accepted < len(one.drafted) for one in every)


def test_a_second_text_finds_what_the_first_has_written(launches):
    m = model(lanes=2)
    how = dict(method="lookup", ignore_eos=True, max_tokens=50)
    first = m.generate(LONG, **how)
    work = m.host.work.rows
    again = m.generate([*LONG, *first.token_ids[:40]], method="lookup", max_tokens=10)
    assert m.host.work.rows - work < 40 and launches
    assert again.token_ids == first.token_ids[40:]


@pytest.mark.parametrize("method", ["lookup", "speculative"])
def test_where_pages_run_out_texts_are_the_same(method, launches):
    how = dict(method=method, ignore_eos=True, max_tokens=40, k=3)
    if method == "speculative":
        how |= dict(draft=model(noise=0.015))
    prompts = [[*range(9 * i, 9 * i + 12), *range(9 * i, 9 * i + 6)] for i in range(4)]
    scarce = model(slots=13 * 8)
    alone = [model(lanes=1).generate(prompt, **how).token_ids for prompt in prompts]
    del launches[:]
    assert [r.token_ids for r in scarce.generate(prompts, **how)] == alone
    assert scarce.host.pool.stats.taken_back and launches


@pytest.mark.parametrize("seed", range(12))
def test_who_joins_or_goes_at_any_time_has_the_text_written_alone(seed, launches):
    chance = random.Random(seed)
    m = model(lanes=3, slots=chance.choice([None, 22 * 8]))
    draft = model(noise=0.015)
    draft.backbone.cost /= 2  # a draft model is asked first: so all are judged together
    asked, jobs, gone = [], [], []
    m.engine.has_messages = lambda: chance.random() < 0.1
    while m.engine.busy or len(jobs) < 8:
        if len(jobs) < 8 and chance.random() < 0.4:
            [prompt, *_], _ = scenario(chance.randrange(1000))
            how = dict(max_tokens=chance.randrange(1, 50), ignore_eos=True, k=chance.choice([2, 4]))
            drafter = dict(method="lookup")
            if chance.random() < seed % 3 / 2:  # nobody, some, or all have a draft model
                drafter = dict(method="speculative", draft=draft)
            asked.append((prompt, {**how, **drafter}))
            jobs.append(m.submit(prompt, **how, **drafter))
        if jobs and chance.random() < 0.05:
            gone.append(chance.randrange(len(jobs)))
            jobs[gone[-1]].cancel()
        m.engine.step()
    alone = model(lanes=1, in_rounds=False)
    for number, (job, (prompt, how)) in enumerate(zip(jobs, asked)):
        text = alone.generate(prompt, **how).token_ids
        own = job.results()[0].token_ids
        assert own == (text[: len(own)] if number in gone else text)
    assert launches


def test_what_a_request_and_the_engine_count_is_what_was_run(launches):
    m = model()
    results = m.generate([LONG, [5, 6]], method="lookup", ignore_eos=True, max_tokens=40, k=4)
    assert m.engine.clock.forwards == m.host.work.forwards
    assert max(r.stats.forwards for r in results) == m.host.work.forwards
    assert launches


def test_a_launch_that_is_stopped_ends_early_and_changes_no_text(launches):
    m = model()
    how = dict(method="lookup", ignore_eos=True, max_tokens=40, k=4)
    whole = said(m.generate([LONG, [5, 6]], **how))
    del launches[:]
    m.engine.has_messages = lambda: True
    assert said(m.generate([LONG, [5, 6]], **how)) == whole
    assert not launches


def test_who_joins_waits_for_one_round_only(launches, monkeypatch):
    m = model()
    how = dict(method="lookup", ignore_eos=True, max_tokens=40, k=4)
    alone = [m.generate(prompt, **how).token_ids for prompt in (LONG, [5, 6])]
    m = model()
    joined = []
    go_on = m.host.go_on

    def go_on_as_another_comes(asked, drafter):
        if not joined:
            joined.append(m.submit([5, 6], **how))
            m.engine.stop.set()  # as a driver's thread does
        return go_on(asked, drafter)

    monkeypatch.setattr(m.host, "go_on", go_on_as_another_comes)
    del launches[:]
    first = m.generate(LONG, **how).token_ids
    m.engine.run()
    assert [first, joined[0].results()[0].token_ids] == alone
    assert launches[0].rounds == [[]] and len(launches[1].rounds) == 2


def test_who_waits_for_a_lane_gets_it_as_soon_as_one_text_has_ended(launches):
    m = model(lanes=2)
    how = dict(method="lookup", ignore_eos=True)
    prompts = [LONG, [5, 6], [9, 9]]
    jobs = [m.submit(p, max_tokens=n, **how) for p, n in zip(prompts, (60, 8, 30))]
    m.engine.run()
    alone = [
        model().generate(p, max_tokens=n, **how).token_ids for p, n in zip(prompts, (60, 8, 30))
    ]
    assert [job.results()[0].token_ids for job in jobs] == alone
    short = next(made for made in launches if len(made.rounds) == 2)
    assert len(short.rounds[0]) == len(short.rounds[1])


def test_a_request_that_is_cancelled_between_launches_leaves_the_others(launches):
    m = model()
    how = dict(method="lookup", ignore_eos=True, max_tokens=60)
    alone = model().generate(LONG, **how).token_ids
    kept, gone = m.submit(LONG, **how), m.submit([5, 6, 5], **how)
    step_until_launched(m, launches)
    gone.cancel()
    m.engine.run()
    assert kept.results()[0].token_ids == alone
    assert gone.results()[0].finish_reason == "cancelled"


@pytest.mark.parametrize(
    "more",
    [
        dict(temperature=0.8, seed=1),
        dict(frequency_penalty=0.5),
        dict(logprobs=2),
        dict(record=True),
        dict(regex="[0-9]+"),
    ],
    ids=["sampled", "penalised", "with logprobs", "recorded", "constrained"],
)
def test_who_looks_at_every_verdict_gets_every_verdict(more, launches):
    m = model()
    m.generate(LONG, method="lookup", max_tokens=20, **more)
    assert not launches


def test_beside_somebody_who_does_something_else_nobody_goes_on(launches):
    m = model()
    m.submit(LONG, method="lookup", ignore_eos=True, max_tokens=60)
    m.submit([5, 6], method="ar", ignore_eos=True, max_tokens=20)
    step_until_launched(m, launches)
    assert len(m.engine.running) < 2
    m.engine.run()


def test_a_launch_is_no_part_of_the_next_step_and_its_tokens_are_each_rounds_own():
    now = [0.0]
    watch = StepWatch(lambda: now[0])
    costs = StepCosts()
    costs.curve = {1: 1e-3, 8: 2e-3}
    seen = []
    costs.observe = lambda rows, drafting, forwards, seconds: seen.append(seconds)
    costs.observe_pace = lambda tokens, sequences: seen.append((tokens, sequences))

    def step(seconds):
        watch.forward(costs, [4], [4], drafting=False)
        watch.drawing()
        now[0] += seconds
        watch.arrived()

    step(1.0)
    now[0] += 25.0
    watch.went_on(costs, [3, 2])
    watch.tokens += 4 + 3 + 2  # as the method goes on
    step(2.0)
    assert seen == [(3, 1), (2, 1), 2.0, (4, 1)]


def test_forwards_of_a_launch_count_as_one_of_their_kind():
    times = iter(range(100))
    choice = ThreadChoice(lambda: float(next(times)))
    choice._most = 2
    choice.note([0, 4, 0, 1], [0.0, 8.0, 0.0, 5.0])
    assert [list(choice._kinds[rows]._times) for rows in (1, 3)] == [[2.0], [5.0]]


def test_a_large_model_is_asked_round_by_round(launches):
    m = model()
    m.backbone.read_bytes = 10**9
    m.generate(LONG, method="lookup", ignore_eos=True, max_tokens=20)
    assert not launches


def test_a_text_that_ends_with_words_ends_there(launches):
    how = dict(method="lookup", ignore_eos=True, max_tokens=60)
    m = model()
    text = m.generate(LONG, **how).text
    stop = text[len(text) // 2 :][:2]
    with_rounds = m.generate(LONG, stop=[stop], **how)
    without = model(in_rounds=False).generate(LONG, stop=[stop], **how)
    assert said([with_rounds]) == said([without]) and launches


def test_copies_that_never_grow_change_the_trace(monkeypatch):
    """So the tests above would see it."""
    drafting = rounds._drafting

    def of_one_token(one, verdict):
        found = drafting(one, verdict)
        if found is not None:
            found.reach = 1
        return found

    right = [traces_of(seed, in_rounds=False) for seed in range(8)]
    monkeypatch.setattr(rounds, "_drafting", of_one_token)
    assert [traces_of(seed) for seed in range(8)] != right


def traces_of(seed, **how_made):
    prompts, how = scenario(seed)
    how |= dict(adapt=True, k=8)
    return said(write_all(model(**how_made), prompts, how, method="lookup"))


def test_a_verdict_that_accepts_what_the_model_does_not_say_changes_the_text(monkeypatch, launches):
    made = rounds.Drafting.round

    def one_too_many(self, text_round):
        found = made(self, text_round)
        return found._replace(accepted=min(found.accepted + 1, len(found.drafted)))

    how = dict(ignore_eos=True, max_tokens=60)
    plain = [model().generate(prompt, method="ar", **how).token_ids for prompt in (LONG, [5, 6])]
    monkeypatch.setattr(rounds.Drafting, "round", one_too_many)
    m = model()
    wrong = [m.generate(prompt, method="lookup", k=4, **how).token_ids for prompt in (LONG, [5, 6])]
    assert launches and wrong != plain


def test_a_memo_that_claims_what_was_rejected_is_seen(monkeypatch, launches):
    wrote = Memo.wrote

    def one_row_more(self, start, tokens):
        wrote(self, start, [*tokens, 3])

    monkeypatch.setattr(Memo, "wrote", one_row_more)
    with pytest.raises(AssertionError):
        model().generate(LONG, method="lookup", ignore_eos=True, max_tokens=60, k=8)


def test_a_forward_that_writes_past_its_slots_is_seen(monkeypatch, launches):
    room = Rounds._room
    asked = Rounds._asked

    def asked_for_more(self, each):
        return asked(self, each)._replace(room=room(self, each, self.host) + 8)

    monkeypatch.setattr(Rounds, "_asked", asked_for_more)
    monkeypatch.setattr(rounds, "AHEAD", 8)
    monkeypatch.setattr(LookupDrafter, "adapt", False, raising=False)
    with pytest.raises(AssertionError):
        model().generate(
            LONG, method="lookup", ignore_eos=True, max_tokens=60, k=8, adapt=False, ngram=1
        )


@pytest.mark.parametrize("first_draft", ["lookup", "model"])
def test_a_drafter_that_changes_its_ways_is_asked_each_time(first_draft, launches):
    found = []
    for in_rounds in (True, False):
        first = model(noise=0.015) if first_draft == "model" else first_draft
        how = dict(method="specdiff", draft=stepped(forerun.load("tiny:masked")), first=4, k=4)
        m = model(in_rounds=in_rounds)
        found += m.generate([LONG], first_draft=first, max_tokens=30, ignore_eos=True, **how)
    assert said(found[:1]) == said(found[1:]) and not launches


@pytest.mark.parametrize("method", ["lookup", "speculative"])
def test_lengths_that_follow_costs_are_those_of_single_steps(method, launches, monkeypatch):
    monkeypatch.setattr(adaptive, "REVISED_AT_MOST", 8)  # the text is short
    costs = {1: 1e-3, 2: 1.1e-3, 4: 1.3e-3, 8: 1.7e-3, 16: 2.5e-3, 32: 4e-3}
    found = []
    for in_rounds in (True, False):
        m = model(in_rounds=in_rounds)
        m.backbone.step_costs = costs
        drafted = {}
        if method == "speculative":
            drafted["draft"] = model(noise=0.015)
            drafted["draft"].backbone.step_costs = {rows: t / 5 for rows, t in costs.items()}
        found += m.generate([LONG], method=method, max_tokens=80, ignore_eos=True, **drafted)
    lengths = [[len(e.drafted) for e in result.trace if e.drafted] for result in found]
    assert lengths[0] == lengths[1] and launches
    if method == "speculative":
        assert len(set(lengths[0])) > 2, "lengths do not follow what is accepted"


def test_a_launch_that_fails_leaves_what_was_decided(monkeypatch, caplog):
    def fail(self, *_):
        raise MemoryError("no room for logits")

    how = dict(method="lookup", ignore_eos=True, max_tokens=30)
    expected = model(in_rounds=False).generate(LONG, **how)
    monkeypatch.setattr(Host, "go_on", fail)
    found = model().generate(LONG, **how)
    assert said([found]) == said([expected]) and "no room for logits" in caplog.text


def test_a_draft_model_that_says_no_number_drafts_less(monkeypatch):
    """Its token would be looked up in front of the embedding."""
    least = []
    call = native.NativeForward.__call__

    def look(self, batch, slots):
        least.append(int(batch.rows_5T[0].min()))
        return call(self, batch, slots)

    monkeypatch.setattr(native.NativeForward, "__call__", look)
    how = dict(method="speculative", k=4, ignore_eos=True, max_tokens=20)
    for in_rounds in (True, False):
        draft = model()
        draft.backbone.embed[7] = float("nan")
        m = model(in_rounds=in_rounds)
        [found] = m.generate([[5, 7, 8, 7]], draft=draft, **how)
        assert (
            found.token_ids
            == m.generate([5, 7, 8, 7], method="ar", **without_drafts(how)).token_ids
        )
    assert min(least) >= 0


@pytest.mark.parametrize("arch", ["block", "block-shifted"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_fills_blanks_with_no_numbers_drafts_nothing(arch, temperature):
    how = dict(k=4, ignore_eos=True, max_tokens=20, temperature=temperature)
    for in_rounds in (True, False):
        draft = model(arch)
        draft.backbone.embed[7] = float("nan")
        m = model(in_rounds=in_rounds)
        [found] = m.generate([[5, 7, 8, 7]], method="specdiff", draft=draft, **how)
        assert found.error is None and len(found.token_ids) == 20
        if not temperature:
            plain = m.generate([5, 7, 8, 7], method="ar", **without_drafts(how))
            assert found.token_ids == plain.token_ids


def without_drafts(how):
    return {name: how[name] for name in ("ignore_eos", "max_tokens")}


def test_a_launch_uses_as_many_threads_as_are_set_now(monkeypatch, launches):
    used = []
    go_on = native.NativeForward.go_on

    def note(self, target, drafter, asked):
        used.append(set(target._threads.tolist()))
        return go_on(self, target, drafter, asked)

    monkeypatch.setattr(native.NativeForward, "go_on", note)
    before = torch.get_num_threads()
    m = model()
    m.backbone._threads._most = 2  # as found when it was loaded
    try:
        torch.set_num_threads(1)
        m.generate(LONG, method="lookup", ignore_eos=True, max_tokens=40)
    finally:
        torch.set_num_threads(before)
    assert used and all(threads == {1} for threads in used)


def test_tokens_that_nobody_got_have_no_pace():
    watch = StepWatch(lambda: 0.0)
    costs = StepCosts()
    costs.curve = {1: 1e-3, 8: 2e-3}
    seen = []
    costs.observe_pace = lambda tokens, sequences: seen.append(tokens)
    for _ in range(2):
        watch.forward(costs, [4], [4], drafting=False)
        watch.drawing()
        watch.arrived()
        watch.went_on(costs, [3, 2])  # of a text that a stop string has ended
    assert min(seen) > 0


@pytest.mark.parametrize("launch", [0.0, 0.025])
def test_auto_counts_on_the_rounds_that_follow_a_copy(launch, launches, monkeypatch):
    """Alone a draft never pays here; with what follows it, it does."""
    costs = {1: 1e-3, 2: 1.05e-3, 4: 1.1e-3, 8: 1.2e-3, 16: 1.4e-3, 128: 4e-3}
    monkeypatch.setattr(StepCosts, "rows_are_cheap", property(lambda self: False))
    steps_with = FixedCosts.steps_with

    def with_host(self, others, drafting, most):
        plain, *drafting = steps_with(self, others, drafting, most)
        return [plain, *(12e-3 + seconds for seconds in drafting)]

    monkeypatch.setattr(FixedCosts, "steps_with", with_host)
    m = model()
    m.backbone.step_costs = costs
    m.host.costs.launch = launch
    how = dict(max_tokens=70, ignore_eos=True)
    found = m.generate(LONG, method="auto", **how)
    assert found.token_ids == m.generate(LONG, method="ar", **how).token_ids
    assert bool(launches) == bool(launch)
    assert bool(found.stats.choices.get("lookup")) == bool(launch), found.stats.choices


@pytest.mark.parametrize("kind", ["model", "looking"])
def test_auto_has_a_draft_model_draft_on_and_learns_from_every_verdict(
    kind, launches, monkeypatch, tmp_path
):
    monkeypatch.setattr(StepCosts, "rows_are_cheap", property(lambda self: False))
    counted = []
    learn = sources.Drafted.learn
    monkeypatch.setattr(
        sources.Drafted, "learn", lambda self, *seen: counted.append(seen) or learn(self, *seen)
    )
    m = model()
    m.backbone.step_costs = {1: 1e-3, 2: 1.01e-3, 8: 1.02e-3, 128: 4e-3}
    m.host.costs.launch = 2.5e-2
    draft = model(noise=0.002)
    if kind == "looking":
        draft = m._loaded_draft(looking_drafter(tmp_path, LOOKING[1]), greedy=True)
    m.draft_model(draft).backbone.step_costs = {1: 1e-5, 128: 2e-5}
    how = dict(max_tokens=90, ignore_eos=True)
    prompt = [*range(100, 130)]  # of which nothing is copied at first
    found = m.generate(prompt, method="auto", draft=draft, **how)
    assert found.token_ids == model().generate(prompt, method="ar", **how).token_ids
    assert found.stats.choices.get("draft") and any(made.drafting for made in launches)
    drafts = [event for event in found.trace if event.drafted]
    rounds = [one for made in launches if made.drafting for one in made.rounds[0]]
    assert len(rounds) > 5 and len(counted) > len(rounds)
    assert len(counted) <= len(drafts)


@pytest.fixture
def expected(monkeypatch):
    """What copies expect of the rounds behind a draft: (verdicts without any, a round)."""
    monkeypatch.setattr(StepCosts, "rows_are_cheap", property(lambda self: False))
    asked = []
    behind = sources.Copies.round_behind

    def note(self, k, tokens):
        asked.append((self._alone, behind(self, k, tokens)))
        return asked[-1][1]

    monkeypatch.setattr(sources.Copies, "round_behind", note)
    return asked


def auto_with_costs():
    m = model()
    m.backbone.step_costs = {1: 1e-3, 2: 1.05e-3, 8: 1.2e-3, 128: 4e-3}
    return m


def test_auto_counts_on_no_rounds_where_none_came(expected, monkeypatch):
    monkeypatch.setattr(Rounds, "after", lambda *_: None)
    auto_with_costs().generate(LONG, method="auto", max_tokens=60, ignore_eos=True)
    assert max(alone for alone, _ in expected) >= sources.GIVE_UP
    assert all((each is None) == (alone >= sources.GIVE_UP) for alone, each in expected)


def fixed_costs(curve, launch=0.0):
    costs = StepCosts("cpu")
    costs.curve = curve
    costs.corrects = False
    costs.launch = launch
    return costs


def test_auto_counts_on_rounds_again_when_others_have_gone(expected):
    m = model()
    m.host.costs = fixed_costs({1: 1e-3, 2: 1.05e-3, 8: 1.2e-3, 128: 4e-3}, launch=2.5e-2)
    how = dict(method="auto", max_tokens=60, ignore_eos=True)
    for first in range(1, 6):  # what they hoped for is added up, and taken away again
        m.generate([LONG, [*LONG[first:], 9, 7, 8]], **how)
    expected.clear()
    m.generate(LONG, **how)
    assert any(each is not None for _, each in expected)


@pytest.fixture
def asked(monkeypatch):
    """How many tokens a named drafter is asked for, each time."""
    found = []
    propose = sources.Drafted.propose
    monkeypatch.setattr(
        sources.Drafted, "propose", lambda self, k: found.append(k) or propose(self, k)
    )
    return found


def test_auto_tries_a_drafter_with_no_more_than_it_drafts(tmp_path, asked):
    m = model()
    m.host.costs = fixed_costs({1: 1e-3, 2: 1.9e-3, 8: 7.5e-3, 128: 0.1})  # drafts do not pay
    draft = m._loaded_draft(looking_drafter(tmp_path, {"block": 3}), greedy=True)
    m.draft_model(draft)
    m._draft_hosts[draft][1].costs = fixed_costs({1: 3e-3, 128: 4e-3})
    m.generate([*range(100, 130)], method="auto", draft=draft, max_tokens=90, ignore_eos=True)
    assert asked and max(asked) == 2


@pytest.mark.parametrize("how", [{"presence_penalty": 0.1}, {"temperature": 0.01}])
def test_auto_counts_on_no_rounds_where_none_can_come(how, expected, launches):
    auto_with_costs().generate(LONG, method="auto", max_tokens=60, ignore_eos=True, **how)
    assert expected and not launches
    assert all(each is None for _, each in expected)


def test_auto_asks_no_drafter_for_more_than_it_drafts(tmp_path, asked):
    m = auto_with_costs()
    m.host.costs.launch = 2.5e-2
    draft = m._loaded_draft(looking_drafter(tmp_path, LOOKING[1]), greedy=True)
    m.draft_model(draft).backbone.step_costs = {1: 1e-5, 128: 2e-5}
    m.generate([*range(100, 130)], method="auto", draft=draft, max_tokens=90, ignore_eos=True)
    assert asked and max(asked) <= draft.family.block - 1
