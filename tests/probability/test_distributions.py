import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.probability.distributions import (
    path_products,
    point_mass,
    prefix_lengths,
    residual,
    tempered,
    total_variation,
)

weights = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)


def law(numbers):
    p = torch.tensor(numbers, dtype=torch.float64)
    return p / p.sum()


def test_the_residual_is_what_is_left_of_p():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])
    assert torch.allclose(residual(p, q), torch.tensor([[1.0, 0.0, 0.0]]))


def test_the_residual_of_equal_laws_is_p():
    p = torch.tensor([[0.5, 0.5]])
    assert torch.equal(residual(p, p.clone()), p)


def test_the_residual_against_nothing_is_p():
    p = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(p, torch.zeros_like(p)), p)


def test_prefix_lengths_of_no_draft_is_certain_of_zero():
    assert prefix_lengths(torch.zeros(2, 0)).tolist() == [[1.0], [1.0]]


def test_prefix_lengths_multiply_acceptances():
    assert torch.allclose(
        prefix_lengths(torch.tensor([[0.5, 0.5]])), torch.tensor([[0.5, 0.25, 0.25]])
    )


def test_a_point_mass_on_nothing_is_zero():
    assert point_mass(torch.tensor([1, -1]), 3).tolist() == [[0, 1, 0], [0, 0, 0]]


@given(weights, weights)
@settings(max_examples=50, deadline=None)
def test_accepting_then_taking_the_residual_gives_p(a, b):
    p, q = law(a), law(b)
    accepted = torch.minimum(p, q)
    whole = accepted + (1 - accepted.sum()) * residual(p[None], q[None])[0]
    assert torch.allclose(whole, p, atol=1e-12)


def test_total_variation_counts_what_only_one_law_has():
    assert total_variation({"a": 1.0}, {"b": 1.0}) == 1.0


def test_a_tempered_law_is_a_power_of_it_made_whole():
    laws = torch.stack([law([1, 2, 4]), law([8, 1, 1])])
    for temperature in (0.5, 2.0):
        power = laws ** (1 / temperature)
        expected = power / power.sum(-1, keepdim=True)
        assert torch.allclose(tempered(laws, temperature), expected, atol=1e-12)
    assert tempered(laws, 1) is laws


def test_a_tempered_point_mass_stays_one_though_powers_vanish():
    cold = torch.tensor([[0.0, 1e-30, 0.0]])
    assert tempered(cold, 0.1).tolist() == [[0.0, 1.0, 0.0]]


def test_a_path_multiplies_all_steps_that_lead_to_it():
    """Node 1 and 2 leave the root, 3 leaves 1, 4 leaves 3, 5 leaves 2."""
    steps = torch.tensor([[0.5, 0.25, 0.5, 0.1, 0.2]], dtype=torch.float64)
    parents = torch.tensor([[0, 0, 1, 3, 2]])
    expected = torch.tensor([[1, 0.5, 0.25, 0.25, 0.025, 0.05]], dtype=torch.float64)
    assert torch.allclose(path_products(steps, parents), expected)
