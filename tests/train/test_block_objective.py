"""The block-diffusion loss, against its definition, and what is distilled into it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.train.block import BlockObjective, clean_and_masked
from forerun.train.distil import DistilBlockObjective
from forerun.train.objectives import make_objective
from tests.helpers import network

MASK = 7


def tokens(rows=4, length=14):
    return torch.randint(8, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def by_definition(net, batch, shifted):
    """Every token in a forward of its own block after the clean text before it, as decoding would
    see it."""
    clean, seen, block, causal, weight = batch[:5]
    total = 0.0
    for b in range(len(clean)):
        for i in np.flatnonzero(weight[b].numpy()):
            own = block[b] == block[b, i]
            start = int(own.nonzero()[0])
            first = start == i and shifted  # the block before speaks of a block's first token
            end = start if first else int(own.nonzero()[-1]) + 1
            ids = torch.cat([clean[b, :start], seen[b, start:end]])
            group = block[b, :end]
            sees = group[None] <= group[:, None]
            if causal[b]:
                sees[:start] = torch.ones_like(sees).tril()[:start]
            logits = net(ids[None], attention_mask=sees[None, None], use_cache=False).logits[
                0, i - shifted
            ]
            logits[MASK] = -torch.inf
            total -= float(weight[b, i] * logits.log_softmax(-1)[clean[b, i]])
    return total / len(clean)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(sizes=(4,), ar=0.0),
        dict(sizes=(2, 5), ar=0.3, causal=0.5, whole=0.5),
        dict(sizes=(3,), ar=1.0),
        dict(sizes=(14,), ar=0.0, rates=(1.0, 1.0)),
    ],
    ids=str,
)
def test_the_loss_is_that_of_every_block_on_its_own(options, shifted):
    net = network("llama", torch.float64)
    objective = BlockObjective(mask_token=MASK, shifted=shifted, **options)
    batch = objective.prepare(tokens(), np.random.default_rng(3), 0)
    with torch.no_grad():
        packed = float(objective.loss(net, *batch))
        assert packed == pytest.approx(by_definition(net, batch, shifted), abs=1e-4)
        shares = [float(objective.loss(net, *(x[b : b + 1] for x in batch))) for b in range(4)]
    assert np.mean(shares) == pytest.approx(packed, abs=1e-5)


def test_blocks_of_one_token_in_a_shifted_model_are_plain_left_to_right_training():
    net = network("llama", torch.float64)
    objective = BlockObjective(mask_token=MASK, shifted=True, ar=1.0, sizes=(4,))
    text = tokens()
    text[text == MASK] = MASK + 1
    with torch.no_grad():
        ours = objective.loss(net, *objective.prepare(text, np.random.default_rng(0), 0))
        logits = net(text[:, :-1]).logits.float()
        logits[..., MASK] = -1e9
        plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert float(ours) * 14 / 13 == pytest.approx(float(plain), abs=1e-5)


def test_every_token_counts_once_on_average_and_rates_are_clipped():
    objective = BlockObjective(sizes=(8,), rates=(0.3, 0.8), whole=0.0, ar=0.0)
    text = torch.full((600, 64), 9)
    _, seen, block, _, weight = objective.prepare(text, np.random.default_rng(0), 0)
    assert float(weight.sum(1).mean()) == pytest.approx(1, abs=0.03)
    share = (seen == 1).float().view(600, 8, 8).mean(-1)
    assert 0.5 < share.mean() < 0.6 and float(weight.max()) <= 1 / 0.3 / 64 + 1e-6
    assert (block.view(600, 8, 8) == torch.arange(8)[None, :, None]).all()


def test_larger_blocks_join_one_after_the_other():
    objective = BlockObjective(sizes=(16, 4, 8), curriculum=300)
    assert [objective.sizes_at(step) for step in (0, 99, 100, 250, 300)] == [
        (4,),
        (4,),
        (4, 8),
        (4, 8, 16),
        (4, 8, 16),
    ]
    assert objective.family_settings == {
        "family": "block",
        "mask_token": 1,
        "block": 16,
        "shifted": False,
    }


def test_causal_text_is_read_token_by_token_and_its_blocks_begin_anywhere():
    objective = BlockObjective(sizes=(4,), ar=0.0, causal=1.0)
    _, _, block, causal, _ = objective.prepare(tokens(64), np.random.default_rng(0), 0)
    assert causal.all() and len({int((row == 0).sum()) for row in block}) == 4
    sees = clean_and_masked(block[:1], causal[:1])[0]
    assert (
        torch.equal(sees[:14, :14], torch.ones(14, 14, dtype=torch.bool).tril())
        and not sees[:14, 14:].any()
    )


def test_edited_sequences_have_wrong_tokens_among_the_visible_and_predict_all_of_them():
    objective = BlockObjective(sizes=(4,), ar=0.0, edits=1.0, edited=0.5)
    text = tokens(64, 32)
    _, seen, _, _, weight = objective.prepare(text, np.random.default_rng(0), 0)
    visible = seen != 1
    wrong = visible & (seen != text)
    assert 0.1 < float(wrong.sum() / visible.sum()) < 0.4 and bool(
        (weight[visible] == 1 / 32).all()
    )
    plain = replace(objective, edits=0.0)
    _, seen, _, _, weight = plain.prepare(text, np.random.default_rng(0), 0)
    assert not ((seen != 1) & (seen != text)).any() and not weight[seen != 1].any()


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(sizes=()), "sizes"),
        (dict(sizes=8), "sizes=8 must be a list"),
        (dict(sizes=(0,)), "sizes"),
        (dict(rates=(0.0, 1.0)), "rates"),
        (dict(rates=(0.5, 0.2)), "rates"),
        (dict(whole=2), "whole"),
        (dict(shifted=1), "shifted"),
        (dict(shifted=True, edits=0.1), "edits"),
        (dict(curriculum=-1), "curriculum"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        make_objective("block", options)


def test_a_block_longer_than_the_text_and_text_shorter_than_the_context_are_refused():
    from forerun.train.data import Corpus

    with pytest.raises(BadOption, match="longer than context=14"):
        BlockObjective(sizes=(4, 16)).prepare(tokens(), np.random.default_rng(0), 0)
    with pytest.raises(BadOption, match="smaller context"):
        Corpus(np.arange(50), np.arange(5)).held_out(4, 8)


def test_what_is_taught_is_the_teachers_law_left_to_right_and_in_drafts():
    """A student that says exactly what its teacher says is at the teacher's own entropy; any other
    is above."""
    objective = DistilBlockObjective(
        mask_token=1, taught=1.0, drafts=0.0, sampled=0.0, samples=0, sizes=(4,)
    )
    text = torch.randint(2, 4000, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = objective.prepare(text, np.random.default_rng(0), 0)
    _, seen, block, causal, weight, taught = batch
    assert taught.all() and causal.all() and (seen == 1).all()
    assert torch.equal(block, torch.arange(12).expand(2, 12)) and (weight[:, 0] == 0).all()
    assert weight.sum(1).tolist() == pytest.approx([1, 1])
    law = objective.target_laws(text, weight > 0, 4096, 1)
    assert law.shape == (22, 4096) and float(law[:, 1].max()) == 0
    drafts = replace(objective, drafts=1.0, discount=0.5)
    _, _, block, _, weight, _ = drafts.prepare(text, np.random.default_rng(2), 0)
    for row, shares in zip(block, weight):
        for n in range(1, int(row[-1])):
            own = shares[row == n]
            assert torch.allclose(own[1:] / own[:-1], torch.tensor(0.5))
    plain = replace(objective, taught=0.0)
    assert not plain.prepare(text, np.random.default_rng(0), 0)[-1].any()
    held = objective.held_out()
    assert type(held) is BlockObjective and held.sizes == (4,)


def test_a_left_to_right_checkpoint_becomes_a_block_model_by_one_recipe(tmp_path):
    import forerun
    from forerun.train.recipe import Recipe
    from forerun.train.run import run

    for i in range(60):
        (tmp_path / f"f{i}.py").write_text(f"value_{i} = {i}\n" * 8)
    options = {"sizes": [2, 4], "ar": 0.3, "causal": 0.3}
    recipe = Recipe(
        "block",
        options,
        start="zoo:drafter",
        context=16,
        batch=4,
        steps=2,
        warmup=1,
        validate_every=2,
    )
    m = forerun.load(run(recipe, str(tmp_path), tmp_path / "run"))
    assert (m.family.name, m.family.block, m.family.mask_token) == ("block", 4, 1)
    slow, fast = (
        m.generate("value_1 =", method=method, max_tokens=9, ignore_eos=True)
        for method in ("ar", "s2d2-exact")
    )
    assert slow.token_ids == fast.token_ids and len(slow.token_ids) == 9
