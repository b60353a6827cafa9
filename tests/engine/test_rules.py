"""Rules as programs over fixed memory do what their plain code does. On a GPU such a program is
captured; here it runs as it is."""

from types import SimpleNamespace

import pytest
import torch

from forerun.engine import engine as engine_file
from forerun.engine import rules as rules_file
from forerun.engine.rules import RuleBatch, RuleProgram, Rules, note
from forerun.errors import NotAble
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.probability.outcomes import Token
from forerun.probability.pending import PendingLaws
from forerun.sequence import question
from tests.helpers import fresh, stepped
from tests.methods.test_steps import CASES, FILE, steps_of


class ByProgram(Rules):
    def __init__(self, sampler, graphs=None):
        super().__init__(sampler, graphs=True)


@pytest.fixture
def programs(monkeypatch):
    """Programs that were run, of all engines."""
    ran = []
    run = RuleProgram.run

    def counted(self, batch):
        ran.append(self.size)
        return run(self, batch)

    monkeypatch.setattr(RuleProgram, "run", counted)
    monkeypatch.setattr(engine_file, "Rules", ByProgram)
    monkeypatch.setattr(rules_file, "SEEN_BEFORE", 0)  # all sizes are captured at once
    monkeypatch.setattr(rules_file, "COVERED_BEFORE", 0)
    return ran


@pytest.mark.parametrize("method", CASES)
def test_every_method_takes_the_same_steps_by_programs(programs, method, caplog):
    expected = [one for one in FILE.read_text().splitlines() if one.split()[0] == method]
    assert list(steps_of(method)) == expected
    assert len(programs) > len(set(programs)) > 0
    assert not caplog.records  # no program said anything else than the plain code


@pytest.mark.parametrize("method", CASES)
def test_programs_for_more_do_for_fewer(programs, method, monkeypatch, caplog):
    """A size that is met for the first time is left to a larger one, if there is any."""
    monkeypatch.setattr(rules_file, "COVERED_BEFORE", 10**6)
    covered = []
    find = Rules._find

    def counted(self, size):
        found = find(self, size)
        covered.append(found is not None and found != size)
        return found

    monkeypatch.setattr(Rules, "_find", counted)
    expected = [one for one in FILE.read_text().splitlines() if one.split()[0] == method]
    assert list(steps_of(method)) == expected
    assert not caplog.records
    assert any(covered) or method not in ("lookup", "specdiff", "ssd", "assd")


def test_rows_of_a_batch_keep_their_own_parameters(programs):
    """Sampling of every kind in one batch, penalties included, and drafts of many lengths."""
    asked = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5, "seed": 1},
        {"temperature": 0.8, "top_p": 0.7, "seed": 2},
        {"temperature": 1.3, "min_p": 0.1, "seed": 3},
        {"temperature": 0.9, "repetition_penalty": 1.3, "seed": 4},
    ]
    how = {"method": "lookup", "max_tokens": 24}
    m = fresh()
    m.engine.rules = Rules()
    plain = [m.generate([1, 2, 3], **how, **options).token_ids for options in asked]
    m = stepped(fresh())
    jobs = [m.submit([1, 2, 3], **how, **options) for options in asked]
    m.engine.run()
    assert [job.results()[0].token_ids for job in jobs] == plain
    assert any(size.warp.cold and size.warp.warm for size in programs)


def test_a_rule_that_draws_without_end_runs_by_its_plain_code(programs, monkeypatch, caplog):
    def greedy_of_many(p_BV, sample):
        tokens = [sample(p_BV) for _ in range(12)]
        return Token.of_batch(token=tokens[-1])

    monkeypatch.setattr(question, "sample_token", greedy_of_many)
    m = fresh()
    assert len(m.generate([1, 2, 3], method="ar", max_tokens=4, ignore_eos=True).token_ids) == 4
    assert "runs by its plain code" in caplog.text


def test_pending_laws_are_a_tensor():
    torch.manual_seed(0)
    logits = torch.randn(6, 11)
    sampling = Sampling(temperature=0.7)
    laws = PendingLaws.of(logits, 1, 4, sampling)
    dense = (logits[1:5] / 0.7).softmax(-1)
    torch.testing.assert_close(laws.tensor, dense)
    assert len(laws) == 4 and laws.shape == dense.shape
    torch.testing.assert_close(laws[1:3].tensor, dense[1:3])
    torch.testing.assert_close(laws[-1].tensor, dense[-1])
    torch.testing.assert_close(laws[[2, 0]].tensor, dense[[2, 0]])
    torch.testing.assert_close(laws[::2].tensor, dense[::2])
    torch.testing.assert_close(laws[1::2].tensor, dense[1::2])
    torch.testing.assert_close(laws[::2][1:].tensor, dense[::2][1:])
    torch.testing.assert_close(torch.cat([laws[:1], laws[1::2]]).tensor, dense[[0, 1, 3]])
    joined = torch.cat([laws[2:], laws[:2]])
    torch.testing.assert_close(joined[1::2].tensor, dense[[3, 1]])
    torch.testing.assert_close(laws[4::3].tensor, dense[4::3])
    assert laws[4:].tensor.shape == (0, 11) and len(laws[4:]) == 0
    torch.testing.assert_close(torch.cat([laws[:1], laws[2:]]).tensor, dense[[0, 2, 3]])
    torch.testing.assert_close(torch.stack([laws[0], laws[3]]).tensor, dense[[0, 3]])
    torch.testing.assert_close(torch.cat([laws, dense]), torch.cat([dense, dense]))
    torch.testing.assert_close(1 - laws / 2, 1 - dense / 2)
    torch.testing.assert_close(dense * laws, dense * dense)
    assert laws.argmax(-1).tolist() == dense.argmax(-1).tolist()
    own = PendingLaws.of(logits, 0, 6, None)
    torch.testing.assert_close(own.tensor, logits.softmax(-1))
    torch.testing.assert_close(torch.cat([own, laws]), torch.cat([logits.softmax(-1), dense]))


def test_a_rule_must_return_an_outcome_of_every_sequence():
    rules = Rules()
    law = PendingLaws.of(torch.randn(1, 5), 0, 1, Sampling())

    class Seq:
        noise_key = 0
        draws = 0

    class Asked:
        seq = Seq()
        arguments = (law,)

        def __init__(self, rule):
            self.rule = rule

    with pytest.raises(NotAble, match="must return an Outcome"):
        rules.apply([Asked(lambda p, sample: 3)])
    with pytest.raises(NotAble, match="one row per sequence"):
        rules.apply([Asked(lambda p, sample: Token.of_batch(token=torch.zeros(2)))])


def test_rules_that_came_and_went_are_not_kept():
    seen = set()
    for number in range(3000):
        note(seen, number)
    assert 2999 in seen and len(seen) <= 1024


def test_what_is_certain_is_not_drawn(monkeypatch):
    """At temperature 0 plain decoding takes the likeliest token, as the rule would, ties and rows
    without any possible token included."""
    logits_RV = torch.randn(6, 50)
    logits_RV[1, [7, 30]] = 9.0
    logits_RV[2] = -torch.inf
    logits_RV[3, 4] = torch.nan
    cold = Sampling(temperature=0.0)
    canvas = SimpleNamespace(noise_key=1, draws=0)

    def draws():
        laws = [PendingLaws.of(logits_RV, row, 1, cold)[0] for row in (0, 1, 2, 3, 5)]
        return [SimpleNamespace(rule=sample_token, arguments=(p_V,), seq=canvas) for p_V in laws]

    found = Rules().apply(draws()).outcomes()
    with monkeypatch.context() as patched:
        patched.setattr(RuleBatch, "without_chance", lambda batch: None)
        assert Rules().apply(draws()).outcomes() == found
    assert [outcome is None for outcome in found] == [False, False, True, True, False]
    monkeypatch.setattr(RuleBatch, "made", None)  # no law was needed
    assert Rules().apply(draws()).outcomes() == found
