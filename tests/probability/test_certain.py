"""At temperature 0 a rule needs no laws: what it decides from the likeliest tokens is what its
plain code decides from laws that are certain of them."""

import math
import random

import pytest
import torch

from forerun.engine.pack import stack
from forerun.engine.rules import Decided, RuleBatch, Rules, check_same
from forerun.options import Sampling
from forerun.probability import certain
from forerun.probability.acceptance import (
    descend_tree,
    matching,
    rejection,
    sample_each,
    sample_token,
)
from forerun.probability.noise import Noise
from forerun.probability.outcomes import JacobiStep, Outcome, PackedOutcome, Verdict
from forerun.probability.pending import PendingLaws
from forerun.sequence.canvas import Canvas, Draw, TokenHistory

VOCAB = 5
COLD = Sampling(temperature=0.0)


def some_logits(rows: int, chance: random.Random) -> torch.Tensor:
    """Few values, so that many are equal; some impossible, some no numbers."""
    values = [0.0, 0.5, 1.0, 1.0, -math.inf]
    rows_of = [[chance.choice(values) for _ in range(VOCAB)] for _ in range(rows)]
    for row in rows_of:
        if chance.random() < 0.05:
            row[:] = [-math.inf] * VOCAB
        if chance.random() < 0.05:
            row[chance.randrange(VOCAB)] = math.nan
    return torch.tensor(rows_of)


def plain(draw: Draw) -> Outcome | None:
    """What the plain code decides for one sequence."""
    batch = RuleBatch([draw])
    arguments = [stack(column, batch.device) for column in batch.made]
    packed = PackedOutcome(draw.rule(*arguments, Noise(batch.noise)))
    return packed.unpack(packed.tensor[0].tolist())


def canvas(seed: int) -> Canvas:
    tokens = torch.zeros(0, dtype=torch.int32).numpy()
    return Canvas([1, -1], history=TokenHistory(COLD, tokens, VOCAB, frozenset()), seed=seed)


def some_tree(nodes: int, chance: random.Random) -> list:
    """Guesses of which no two follow the same one and are alike, often likely ones; and laws after
    each of them, and some more."""
    p = PendingLaws.of(some_logits(nodes + 3, chance), 0, nodes + 1 + chance.randrange(3), COLD)
    likely = torch.nan_to_num(p.logits_NV).argmax(-1).tolist()
    found: list[tuple[int, int]] = []
    while len(found) < nodes:
        parent = max(0, len(found) - chance.randrange(4))
        token = likely[parent] if chance.random() < 0.6 else chance.randrange(VOCAB)
        if (token, parent) not in found:
            found.append((token, parent))
    return [[token for token, _ in found], [parent for _, parent in found], p]


def draws_of(rule, count: int, chance: random.Random) -> list[Draw]:
    """Draws of a rule that often has something to accept."""
    found = []
    for seed in range(count):
        k = chance.randrange(5)
        p = PendingLaws.of(some_logits(k + 1, chance), 0, k + 1, COLD)
        likely = torch.nan_to_num(p.logits_NV[:k]).argmax(-1).tolist()
        x = [token if chance.random() < 0.7 else chance.randrange(VOCAB) for token in likely]
        if rule is sample_token:
            arguments = [p[0]]
        elif rule is sample_each:
            arguments = [list(range(k + 1)), p]
        elif rule is descend_tree:
            arguments = some_tree(3 * k, chance)
        elif rule is rejection:
            q_KV = some_logits(k, chance)
            for row, token in enumerate(x):
                q_KV[row, token] += chance.choice([0.0, 9.0])
            drafts = k and chance.random() < 0.7
            arguments = [x, PendingLaws.of(q_KV, 0, k, COLD) if drafts else None, p]
        else:
            arguments = [x, p]
        found.append(Draw(rule, tuple(arguments), canvas(seed)))
    return found


@pytest.mark.parametrize("rule", certain.CERTAIN, ids=lambda rule: rule.__name__)
def test_rules_without_chance_decide_what_their_plain_code_decides(rule):
    draws = draws_of(rule, 1500, random.Random(0))
    accepted = set()
    for draw in draws:
        applied = Rules().apply([draw])
        assert isinstance(applied, Decided)
        [outcome] = applied.outcomes()
        assert outcome == plain(draw)
        accepted.add(getattr(outcome, "node", getattr(outcome, "accepted", None)))
    assert len(accepted) > 4 or rule is sample_token  # lengths of every kind, and no outcome


@pytest.mark.parametrize("rule", certain.CERTAIN, ids=lambda rule: rule.__name__)
def test_a_batch_decides_what_each_would_alone(rule):
    draws = draws_of(rule, 24, random.Random(1))
    draws = [draw for draw in draws if draw.arguments[-2:][0] is not None]
    together = Rules().apply(draws).outcomes()
    assert together == [Rules().apply([draw]).outcomes()[0] for draw in draws]


@pytest.mark.parametrize("rule", certain.CERTAIN_TOGETHER, ids=lambda rule: rule.__name__)
def test_a_program_decides_what_the_plain_code_decides(rule):
    """As on a GPU, from the likeliest tokens of all sequences at once."""
    chance = random.Random(4)
    rules = Rules(graphs=True)
    ran = set()
    for _ in range(40):
        draws = draws_of(rule, chance.randrange(1, 9), chance)
        has_drafts = [draw.arguments[-2:][0] is not None for draw in draws]
        draws = [draw for draw, has in zip(draws, has_drafts) if has == has_drafts[0]]
        expected = [plain(draw) for draw in draws]
        for _ in range(3):  # by plain code, as it is captured, and by the program
            found = rules.apply(draws).outcomes()
        check_same(expected, found)
        ran |= {size for size in rules.programs if size.is_certain}
    assert ran and not rules._not_capturable


@pytest.mark.parametrize("rule", certain.CERTAIN_TOGETHER, ids=lambda rule: rule.__name__)
def test_what_is_too_much_for_a_program_is_decided_as_by_the_plain_code(rule):
    """As on a GPU, by plain launches."""
    chance = random.Random(5)
    for _ in range(40):
        draws = draws_of(rule, chance.randrange(1, 9), chance)
        has_drafts = [draw.arguments[-2:][0] is not None for draw in draws]
        draws = [draw for draw, has in zip(draws, has_drafts) if has == has_drafts[0]]
        packed = PackedOutcome(RuleBatch(draws).decided_together())
        found = [packed.unpack(row) for row in packed.tensor.tolist()]
        check_same([plain(draw) for draw in draws], found)


def test_choices_of_other_sequences_are_caught(monkeypatch):
    right = RuleBatch._choices_or_tokens

    def wrong(batch, column):
        found = right(batch, column)
        return found.roll(1, 0) if isinstance(column[0], PendingLaws) else found

    monkeypatch.setattr(RuleBatch, "_choices_or_tokens", wrong)
    with pytest.raises(RuntimeError):
        test_what_is_too_much_for_a_program_is_decided_as_by_the_plain_code(matching)


def test_a_program_that_keeps_one_token_too_many_is_refused(monkeypatch):
    """Every program is compared with the plain code before it is used."""

    def wrong(x_BK, p_BL):
        columns = certain.keep_foreseen(x_BK, p_BL).columns()
        return Verdict.of_batch(accepted=columns["accepted"] + 1, token=columns["token"])

    monkeypatch.setitem(certain.CERTAIN_TOGETHER, matching, wrong)
    with pytest.raises(AssertionError):
        test_a_program_decides_what_the_plain_code_decides(matching)


def test_a_way_that_skips_a_node_is_refused(monkeypatch):
    def wrong(x_BN, parent_BN, p_BL):
        return certain.certain_descents(x_BN, torch.zeros_like(parent_BN), p_BL)

    monkeypatch.setitem(certain.CERTAIN_TOGETHER, descend_tree, wrong)
    with pytest.raises(AssertionError):
        test_a_program_decides_what_the_plain_code_decides(descend_tree)


def test_chance_is_left_to_the_plain_code():
    logits = some_logits(3, random.Random(2))
    for warm in (PendingLaws.of(logits, 0, 3, Sampling(temperature=1.0)), torch.rand(3, VOCAB)):
        assert RuleBatch([Draw(matching, ([1, 2], warm), canvas(0))]).without_chance() is None


def test_what_is_decided_has_columns_as_others_have():
    """A forward that is begun ahead reads them."""
    decided = Decided([JacobiStep(1, 2, [3, 4], [5]), None], torch.device("cpu"))
    assert decided.type is JacobiStep
    assert decided.column("token").tolist() == [2, -1]
    assert decided.column("likeliest").tolist() == [[3, 4], [-1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_choices_are_what_greedy_laws_are_certain_of(dtype):
    logits = some_logits(500, random.Random(3)).to(dtype)
    assert certain.choices(logits) == certain.likeliest(logits).tolist()


def test_a_rule_that_looks_one_token_too_far_is_caught(monkeypatch):
    def wrong(x, p):
        verdict = certain.certain_matching(x, p)
        return verdict and Verdict(min(verdict.accepted + 1, len(x)), verdict.token)

    monkeypatch.setitem(certain.CERTAIN, matching, wrong)
    with pytest.raises(AssertionError):
        test_rules_without_chance_decide_what_their_plain_code_decides(matching)


def test_a_way_that_any_likely_token_goes_on_is_caught(monkeypatch):
    def wrong(x, parent, p):
        return certain.certain_descent(x, range(len(x)), p)

    monkeypatch.setitem(certain.CERTAIN, descend_tree, wrong)
    with pytest.raises(AssertionError):
        test_rules_without_chance_decide_what_their_plain_code_decides(descend_tree)
