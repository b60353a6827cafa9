import pytest
import torch

from forerun.options import Sampling
from forerun.probability.logits import row_laws
from forerun.probability.noise import (
    Noise,
    mix,
    pick,
    pick_by_stretches,
    pick_by_sums,
    pick_on_host,
    uniform,
)


def test_the_same_numbers_give_the_same_noise():
    assert uniform(7, 1, 2) == uniform(7, 1, 2)


def test_a_seed_means_the_same_in_every_version():
    assert mix(1, 2, 3) == 7702586659592502839 and mix() == 0
    assert uniform(7, 1, 2) == 0.47514130262246645
    drawn = Noise([(7, 0), (8, 3)]).many(torch.ones(2, 3, 1000))
    assert drawn.tolist() == [[609, 100, 292], [94, 702, 519]]


def test_any_other_number_gives_other_noise():
    base = uniform(7, 1, 2)
    assert len({base, uniform(8, 1, 2), uniform(7, 2, 2), uniform(7, 1, 3), uniform(7, 2, 1)}) == 5


def test_noise_is_uniform():
    u = torch.tensor(
        [uniform(mix(3, 0), i, j) for i in range(5000) for j in range(4)], dtype=torch.float64
    )
    assert u.min() > 0 and u.max() < 1
    histogram = torch.histc(u, 20, 0, 1)
    chi2 = float(((histogram - 1000) ** 2 / 1000).sum())
    assert chi2 < 50  # 19 degrees of freedom: about 1e-4 to exceed


def test_noise_of_neighbouring_draws_is_uncorrelated():
    u = (
        torch.tensor(
            [[uniform(key, d, 0) for d in range(2)] for key in range(20000)], dtype=torch.float64
        )
        - 0.5
    )
    assert abs(float((u[:, 0] * u[:, 1]).mean()) * 12) < 0.03


def test_noise_never_comes_again():
    """Neither after many draws nor after many calls of one draw."""
    by_draw = {uniform(7, draw, 0) for draw in range(5000)}
    by_call = {uniform(7, 0, call) for call in range(5000)}
    by_key = {uniform(key, 0, 0) for key in range(5000)}
    assert len(by_draw | by_call) == 9999 and len(by_key) == 5000


CUTS = [
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_host_picks_what_sums_say(cut):
    """On the very numbers where one outcome ends and the next begins, too; and where many are
    equal, or a law has no mass."""
    made = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(300, 500, generator=made)
    logits[100:200] = logits[100:200].round()
    logits[200:250, :250] = -torch.inf
    law = row_laws(logits, [Sampling(temperature=0.9, **cut)] * len(logits))
    law[250:260] = 0
    law[260:270] = torch.nan
    ends = law.cumsum(-1, dtype=torch.float64)
    between = ends[torch.arange(300), torch.randint(500, (300,), generator=made)] / ends[:, -1]
    for u in (torch.rand(300, generator=made, dtype=torch.float64), between):
        found = pick_on_host(law, u)
        assert found.tolist() == pick_by_sums(law, u).tolist()
        assert (found[250:270] == -1).all() and (found[:250] >= 0).all()


def test_draws_ahead_are_those_one_by_one():
    made = torch.Generator().manual_seed(0)
    law = torch.rand(2, 4, 6, generator=made)
    draws = [(3, 5), (4, 0)]
    plain = [
        [int(Noise([(key, draw + i)])(law[b, i][None])) for i in range(4)]
        for b, (key, draw) in enumerate(draws)
    ]
    right = torch.tensor([row[:3] for row in plain])
    assert Noise(draws).ahead(right, law).tolist() == plain
    wrong = right.clone()
    wrong[0, 1] = (wrong[0, 1] + 1) % 6
    assert Noise(draws).ahead(wrong, law)[0, :2].tolist() == plain[0][:2]


@pytest.mark.parametrize("find", [pick, pick_by_sums, pick_by_stretches])
def test_a_large_vocabulary_is_added_up_without_rounding(find):
    """One likely token and 131,071 that are rare: beside a sum of 1, float32 knows no number as
    small as theirs."""
    size, rare = 131_072, 2.0**-30
    law = torch.full((1, size), rare)
    law[0, 0] = 1
    wanted = torch.tensor([0, 1, 40_000, 65_537, 98_765, size - 1])
    u = (1 + (wanted.double() - 0.5) * rare) / (1 + (size - 1) * rare)
    assert find(law.expand(len(u), -1), u).tolist() == wanted.tolist()


def test_pick_never_takes_a_token_of_probability_zero():
    law = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u in (1e-15, 0.25, 0.499999, 0.5, 0.75, 1 - 2.0**-49):
        assert int(pick(law, torch.tensor([u], dtype=torch.float64))) in (1, 3)


def test_a_quantile_on_a_boundary_belongs_to_the_next_outcome():
    law = torch.tensor([[0.5, 0.5]])
    assert int(pick(law, torch.tensor([0.5], dtype=torch.float64))) == 1


def test_a_law_without_mass_has_no_outcome():
    for law in ([[0.0, 0.0]], [[float("nan"), 0.5]]):
        assert int(pick(torch.tensor(law), torch.tensor([0.3], dtype=torch.float64))) == -1


def test_noise_is_never_zero(monkeypatch):
    import forerun.probability.noise

    monkeypatch.setattr(forerun.probability.noise, "mix", lambda *numbers: 0)
    assert forerun.probability.noise.uniform(0, 0, 0) > 0


def test_pick_follows_the_law():
    law = torch.tensor([[0.1, 0.2, 0.7]]).expand(20000, 3)
    sample = Noise([(mix(1, i), 0) for i in range(20000)])
    share = torch.bincount(sample(law), minlength=3) / 20000
    assert torch.allclose(share.float(), law[0], atol=0.015)


@pytest.mark.parametrize("size", [1000, 1009, 6000])  # the second has no divisor
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_stretches_find_the_same_outcomes(size, share):
    generator = torch.Generator().manual_seed(size)
    law = torch.rand(400, size, generator=generator) * (
        torch.rand(400, size, generator=generator) < share
    )
    u = torch.rand(400, generator=generator, dtype=torch.float64)
    law[0], u[1], u[2] = 0, 1e-18, 1 - 2.0**-49
    found = pick_by_stretches(law, u)
    assert found.tolist() == pick(law, u).tolist()
    assert found[0] == -1 and (law[1:].gather(1, found[1:, None]) > 0).all()


@pytest.mark.parametrize("spread,first,last,stretches", [(4, 20, 51, 71), (6, 2, 61, 1)])
def test_stretches_never_leave_what_is_possible(spread, first, last, stretches):
    """Quantiles at the very borders of stretches of 71, where what was added up in two ways could
    differ by a rounding."""
    generator = torch.Generator().manual_seed(spread)
    for _ in range(100):
        law = torch.zeros(71, 71)
        law[:stretches, first:last] = torch.exp(
            spread * torch.randn(stretches, last - first, generator=generator)
        )
        law[stretches:, first] = 1e-30  # so that there is something behind
        borders = law.sum(-1, dtype=torch.float64).cumsum(0)
        u = (borders / borders[-1])[: max(1, stretches - 1)]
        nearby = [u]
        for towards in (0.0, 1.0):
            step = u
            for _ in range(3):
                step = torch.nextafter(step, torch.full_like(step, towards))
                nearby.append(step)
        quantiles = torch.cat(nearby).clamp(max=1 - 2.0**-49)
        found = pick_by_stretches(law.view(1, -1).expand(len(quantiles), -1), quantiles)
        assert (law.view(-1)[found] > 0).all()


def test_noise_does_not_depend_on_who_shares_the_batch():
    laws = torch.rand(6, 50)
    together = Noise([(i, 3) for i in range(6)])(laws)
    alone = [int(Noise([(i, 3)])(laws[i : i + 1])) for i in range(6)]
    assert together.tolist() == alone


def test_many_draws_at_once_are_those_of_one_after_the_other():
    law = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    draws = [(11, 0), (12, 4), (13, 2)]
    one, together = Noise(draws), Noise(draws)
    first = one(law[:, 0])
    assert torch.equal(first, together(law[:, 0]))
    assert torch.equal(torch.stack([one(law[:, i]) for i in range(5)], 1), together.many(law))
    # and what comes after is the same again
    assert torch.equal(one(law[:, 1]), together(law[:, 1]))
