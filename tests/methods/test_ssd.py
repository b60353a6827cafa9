"""What self-speculation of masked models does besides writing the right text."""

import pytest
import torch

from tests.helpers import PROMPTS, fresh, model, stepped


@pytest.mark.parametrize("tree", ["mixed", "chain"])
def test_its_log_probabilities_are_those_of_the_law_that_each_token_was_drawn_from(tree):
    m = model("masked", torch.float64)
    how = dict(max_tokens=16, ignore_eos=True, logprobs=0, block=8)
    for prompt in PROMPTS:
        expected = m.generate(prompt, method="stepwise", **how)
        found = m.generate(prompt, method="ssd", tree=tree, drafts=4, **how)
        assert found.token_ids == expected.token_ids
        pairs = zip(found.logprobs, expected.logprobs, strict=True)
        assert all(a["logprob"] == pytest.approx(b["logprob"], abs=1e-9) for a, b in pairs)


def test_without_drafts_it_draws_no_more_than_stepwise():
    m = stepped(fresh("masked", torch.float64))
    how = dict(max_tokens=8, ignore_eos=True, block=4)
    draws = []
    for options in (dict(method="stepwise"), dict(method="ssd", drafts=0)):
        jobs = m.submit(PROMPTS[0], **options, **how)
        m.engine.run()
        draws.append(jobs.jobs[0].seq.draws)
    assert draws[0] == draws[1]
