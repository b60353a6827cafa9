import torch

from forerun.probability.acceptance import rejection, sample_token


class Script:
    """A `sample` that answers what it is told and remembers which laws it was shown."""

    def __init__(self, *answers):
        self.answers, self.shown = list(answers), []

    def __call__(self, law):
        self.shown.append(law)
        return torch.tensor(self.answers.pop(0))


# two drafted tokens, three rows
P = torch.tensor([[[0.6, 0.4, 0.0], [0.1, 0.1, 0.8], [0.0, 0.5, 0.5]]])
Q = torch.tensor([[[0.3, 0.7, 0.0], [0.5, 0.5, 0.0]]])
X = torch.tensor([[1, 0]])


def test_a_token_is_accepted_with_probability_p_over_q():
    sample = Script([2], [1])
    rejection(X, Q, P, sample)
    a, b = 0.4 / 0.7, 0.1 / 0.5
    assert torch.allclose(sample.shown[0], torch.tensor([[1 - a, a * (1 - b), a * b]]))


def test_a_rejected_token_is_replaced_from_the_residual_of_its_own_row():
    sample = Script([1], [2])
    verdict = rejection(X, Q, P, sample)
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([1], [2])
    assert torch.allclose(sample.shown[1], torch.tensor([[0.0, 0.0, 1.0]]))


def test_a_draft_accepted_whole_earns_a_bonus_from_the_last_row():
    sample = Script([2], [1])
    rejection(X, Q, P, sample)
    assert torch.equal(sample.shown[1], P[:, 2])


def test_an_empty_draft_is_a_plain_draw():
    sample = Script([0], [1])
    verdict = rejection(torch.zeros(1, 0, dtype=torch.long), None, P[:, :1], sample)
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([0], [1])
    assert torch.equal(sample.shown[1], P[:, 0])


def test_a_shorter_draft_in_a_batch_is_judged_as_if_alone():
    x = torch.tensor([[1, 0], [1, -1]])
    q = torch.cat([Q, torch.cat([Q[:, :1], torch.zeros(1, 1, 3)], 1)])
    p = torch.cat([P, torch.cat([P[:, :2], torch.zeros(1, 1, 3)], 1)])
    sample = Script([2, 1], [1, 2])
    rejection(x, q, p, sample)
    assert sample.shown[0][1, 2] == 0  # it can never accept a token that was not drafted
    assert torch.equal(sample.shown[1][1], P[0, 1])  # its bonus comes from its own last row


def test_a_point_mass_draft_is_accepted_with_probability_p():
    sample = Script([0], [0])
    rejection(torch.tensor([[1, 2]]), None, P, sample)
    assert torch.allclose(sample.shown[0], torch.tensor([[0.6, 0.4 * 0.2, 0.4 * 0.8]]))
    assert torch.allclose(sample.shown[1], torch.tensor([[1.0, 0.0, 0.0]]))


def test_greedy_matching_is_rejection_of_point_masses():
    cold = torch.eye(3)[[1, 2, 0]][None]
    for x, kept, token in (([[1, 2]], 2, 0), ([[1, 0]], 1, 2), ([[0, 2]], 0, 1)):
        verdict = rejection(torch.tensor(x), None, cold, lambda law: law.argmax(-1))
        assert (int(verdict.accepted), int(verdict.token)) == (kept, token)


def test_draw_samples_each_row():
    assert sample_token(P[0], Script([0, 2, 1])).token.tolist() == [0, 2, 1]
