"""What log-likelihood means: for each family, against its definition."""

import itertools
import math

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.evaluate.likelihood import Continuation, Likelihood
from forerun.families.block import BlockSpan
from tests.helpers import ask, model

CONTEXT = [5, 6, 7, 200, 31]
TOKENS = [9, 44, 12]


def marginal_logprobs(m, canvas, positions, truth):
    """The log-probabilities of some blanks, asked one canvas at a time."""
    law = ask(m, canvas, lambda handle, seq: handle.marginals(seq, positions))
    return [math.log(law[i, truth[p]]) for i, p in enumerate(positions)]


def exact_bound(logprobs_of, blanks):
    """The mean over all orders of decoding of the log-likelihood: by enumeration."""
    totals = []
    for order in itertools.permutations(blanks):
        total = 0.0
        for i, position in enumerate(order):
            total += logprobs_of(frozenset(order[:i]))[position]
        totals.append(total)
    return float(np.mean(totals))


@pytest.mark.parametrize("arch", ["llama", "any-subset", "xlnet"])
def test_a_chain_is_scored_by_the_chain_rule(arch):
    m = model(arch, torch.float64)
    [found] = Likelihood(m).continuations([Continuation(CONTEXT, TOKENS)])
    total = 0.0
    for i in range(3):
        canvas = [*CONTEXT, None, None, None]
        law = ask(m, canvas, lambda handle, seq, i=i: handle.next_law(seq, TOKENS[:i]))
        total += math.log(law[TOKENS[i]])
    assert found.logprob == pytest.approx(total, abs=1e-9)


def test_greedy_says_whether_greedy_decoding_writes_it():
    for arch in ("llama", "masked", "block"):
        m = model(arch)
        written = m.generate(CONTEXT, max_tokens=3, ignore_eos=True).token_ids
        other = [(token + 1) % 256 for token in written]
        pairs = [Continuation(CONTEXT, written), Continuation(CONTEXT, other)]
        found = Likelihood(m, draws=1).continuations(pairs)
        assert [one.greedy for one in found] == [True, False]


class TestBound:
    def truth(self, tokens):
        return dict(enumerate([*CONTEXT, *tokens]))

    def masked_bound(self, m, tokens):
        truth = self.truth(tokens)
        blanks = range(len(CONTEXT), len(truth))

        def logprobs_of(known):
            canvas = [truth[p] if p < len(CONTEXT) or p in known else None for p in truth]
            open_ = [p for p in blanks if p not in known]
            return dict(zip(open_, marginal_logprobs(m, canvas, open_, truth)))

        return exact_bound(logprobs_of, blanks)

    @pytest.mark.parametrize("arch", ["masked", "masked-shifted"])
    def test_one_token_has_no_order_to_average_over(self, arch):
        m = model(arch, torch.float64)
        [found] = Likelihood(m, draws=1).continuations([Continuation(CONTEXT, TOKENS[:1])])
        [law] = marginal_logprobs(m, [*CONTEXT, None], [5], self.truth(TOKENS[:1]))
        assert found.logprob == pytest.approx(law, abs=1e-6)

    def test_its_mean_is_that_over_all_orders(self):
        m = model("masked", torch.float64)
        wanted = self.masked_bound(m, TOKENS)
        likelihood = Likelihood(m, draws=600, check_greedy=False)
        [found] = likelihood.continuations([Continuation(CONTEXT, TOKENS)])
        assert found.logprob == pytest.approx(wanted, abs=0.35)
        # without the weights it would be far off
        assert abs(wanted) > 3

    def test_the_seed_decides_and_the_neighbours_do_not(self):
        m = model("masked")
        one = Continuation(CONTEXT, TOKENS)
        other = Continuation([1, 2], [3, 4, 5, 6])
        likelihood = Likelihood(m, draws=4, check_greedy=False)
        [alone] = likelihood.continuations([one])
        _, beside = likelihood.continuations([other, one])
        assert beside.logprob == pytest.approx(alone.logprob, abs=1e-4)
        [another] = Likelihood(m, draws=4, seed=1, check_greedy=False).continuations([one])
        assert abs(another.logprob - alone.logprob) > 1e-3

    def test_a_block_model_is_bound_block_by_block(self):
        m = model("block", torch.float64)
        size = m.handle().block
        context = list(range(20, 20 + size - 1))  # the continuation reaches over two blocks
        tokens = [9, 44, 12]
        whole = [*context, *tokens]

        def block_logprob(known, span, masked):
            canvas = [t if i in known else None for i, t in enumerate(whole[: span.end])]
            [laws] = ask(m, canvas, lambda h, seq: h.blocks(seq, [masked], [()], span))
            return {p: math.log(laws.model_law[i, whole[p]]) for i, p in enumerate(masked)}

        first = BlockSpan(0, size, size)
        total = block_logprob(set(range(size - 1)), first, [size - 1])[size - 1]
        second = BlockSpan(size, size + 2, size)
        before = set(range(size))

        def of_second(known):
            masked = [p for p in (size, size + 1) if p not in known]
            return block_logprob(before | known, second, masked)

        total += exact_bound(of_second, [size, size + 1])
        likelihood = Likelihood(m, draws=400, check_greedy=False)
        [found] = likelihood.continuations([Continuation(context, tokens)])
        assert found.logprob == pytest.approx(total, abs=0.3)
        [chain] = Likelihood(m, chain=True).continuations([Continuation(context, tokens)])
        assert chain.logprob == pytest.approx(m.score(context, [tokens])[0].logprob)
        assert abs(chain.logprob - total) > 0.01, "the two readings are two laws"


class TestTexts:
    def test_a_long_text_is_read_in_windows_and_every_token_counts_once(self):
        m = model("llama")
        text = np.random.default_rng(0).integers(0, 256, 400).tolist()
        likelihood = Likelihood(m)
        windows = list(likelihood.windows(text))
        assert [t for window in windows for t in window.tokens] == text
        assert all(len(w.context) + len(w.tokens) <= m.context for w in windows)
        assert windows[1].context[-1] == windows[0].tokens[-1]
        total = sum(one.logprob for one in likelihood.continuations(windows))
        assert likelihood.text(text) == pytest.approx(total)

    def test_a_long_context_loses_its_beginning(self):
        m = model("llama")
        long = np.random.default_rng(0).integers(0, 256, 300).tolist()
        [found] = Likelihood(m).continuations([Continuation(long, TOKENS)])
        [cut] = m.score(long[-(m.context - 3) :], [TOKENS])
        assert found.logprob == pytest.approx(cut.logprob)
        with pytest.raises(BadOption, match="does not fit"):
            Likelihood(m).continuations([Continuation([1], long)])

    def test_white_space_before_a_continuation_is_its_own(self):
        pair = Likelihood(model("llama")).pair("a b ", "c")
        assert bytes(model("llama").decode(pair.tokens), "utf8") == b" c"
        empty = Likelihood(model("llama")).pair("", "c")
        assert empty.context == [256] and len(empty.tokens) == 1
