"""Certification by enumeration: the law of whole sequences is the reference's to 1e-12, for every
drafter and parameter."""

from dataclasses import replace

import pytest
import torch

from forerun import registry
from forerun.backbones.table import TableBackbone
from forerun.certify.cases import SAMPLINGS, broad_cases, standard_cases
from forerun.certify.enumeration import Enumeration, method_law, table_model
from forerun.certify.reference import block_context, reference_law
from forerun.errors import NotAble
from forerun.families.block import Block
from forerun.families.masked import Masked
from forerun.methods.routers import RouterDriver, expected_prefix
from tests.certify.definitions import EXACT, certify_each, where_every_pair_meets
from tests.certify.definitions import certify as certify_case
from tests.helpers import every_pair

TARGET = TableBackbone(vocab=3, seed=1)
DRAFTS = {
    "unlike": TableBackbone(vocab=3, seed=2, cost=0.1),
    "alike": TableBackbone(vocab=3, seed=3, like=TARGET, blend=0.7, cost=0.1),
    "lookup": "lookup",
}
SAMPLED = {"-".join(f"{k}={v}" for k, v in each.items()): each for each in SAMPLINGS}
ENDINGS = {f"eos{list(each)}": each for each in [(), (1,), (0, 2)]}


def assert_certified(certificate):
    assert abs(certificate.mass - 1) < 1e-12, certificate
    assert certificate.distance < 1e-12, certificate


@every_pair(sampling=SAMPLED, eos=ENDINGS)
def test_ar_has_the_law_of_its_definition(sampling, eos):
    assert_certified(certify_case("ar", TARGET, [0, 1, 0], eos=eos, max_tokens=4, **sampling))


# of three tokens two can be drafted
@every_pair(sampling=SAMPLED, eos=ENDINGS, k=[1, 2, 9], draft=["unlike", "alike"])
def test_speculative_has_the_law_of_its_target(draft, k, sampling, eos):
    certificate = certify_case(
        "speculative",
        TARGET,
        [0, 1, 0],
        draft=DRAFTS[draft],
        eos=eos,
        method_options={"k": k},
        max_tokens=3,
        **sampling,
    )
    assert_certified(certificate)


@every_pair(sampling=SAMPLED, eos=ENDINGS, k=[1, 2, 4], ngram=[1, 3])
def test_lookup_has_the_law_of_its_target(ngram, k, sampling, eos):
    options = {"k": k, "ngram": ngram}
    assert_certified(
        certify_case(
            "lookup",
            TARGET,
            [0, 1, 0, 2, 0, 1],
            eos=eos,
            method_options=options,
            max_tokens=4,
            **sampling,
        )
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("prompt", [[2], [0, 0], [2, 1, 0, 2, 1]], ids=str)
def test_every_prompt_length_is_certified(draft, prompt):
    certificate = certify_case(
        "speculative",
        TARGET,
        prompt,
        draft=DRAFTS[draft],
        method_options={"k": 2},
        max_tokens=4,
        temperature=1.0,
        eos=(2,),
    )
    assert_certified(certificate)


def test_stop_tokens_and_ignored_ends_are_certified():
    options = dict(
        draft=DRAFTS["alike"], eos=(1,), method_options={"k": 2}, max_tokens=3, temperature=1.0
    )
    assert_certified(
        certify_case("speculative", TARGET, [0], ignore_eos=True, stop_token_ids=[2], **options)
    )
    assert_certified(
        certify_case("speculative", TARGET, [0], stop_token_ids=[2], min_tokens=2, **options)
    )


@pytest.mark.parametrize("seed", range(6))
def test_other_tables_and_a_larger_vocabulary_are_certified(seed):
    target = TableBackbone(vocab=4, seed=10 + seed, sharpness=3.0)
    draft = TableBackbone(vocab=4, seed=50 + seed, like=target, blend=0.5, cost=0.1)
    assert_certified(
        certify_case(
            "speculative",
            target,
            [seed % 4, 1],
            draft=draft,
            eos=(3,),
            method_options={"k": 2},
            max_tokens=3,
            temperature=0.9,
            top_p=0.85,
            frequency_penalty=0.4,
        )
    )


def test_the_reference_law_does_not_come_from_the_method_under_test():
    law = reference_law(TARGET, [0], max_tokens=2, temperature=1.0)
    assert len(law) == 9 and abs(sum(law.values()) - 1) < 1e-12
    assert method_law("ar", TARGET, [0], max_tokens=2, temperature=1.0).keys() == law.keys()


def test_every_method_that_claims_to_be_exact_is_certified_here():
    certified = {"ar", "speculative", "lookup", "sequential", "assd", "stepwise", "ssd", "specdiff"}
    assert set(EXACT) == certified | {"jacobi", "multiblock", "lookahead", "predicted", "auto"} | {
        "s2d2-exact",
        "block-stepwise",
        "block-ssd",
    }


@pytest.mark.parametrize("method", ["sequential", "assd"])
def test_any_subset_decoding_has_the_law_of_its_definition(method):
    """Theorem 2, and what we added to the algorithm: scattered holes, prefix, suffix, all blank but
    one, nothing given; every k and every outlook; temperatures, top-p, penalties; end tokens; the
    n-gram drafter."""
    for certificate in certify_each(where_every_pair_meets(broad_cases(method))):
        assert_certified(certificate)


@pytest.mark.parametrize("method", ["speculative", "lookup"])
def test_causal_drafters_are_certified_through_holes_too(method):
    target = TableBackbone(vocab=4, seed=1)
    draft = (
        TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
        if method == "speculative"
        else None
    )
    for prompt in ([None, 0, None, None, 1], [1, None, None, 2]):
        if method == "lookup":
            assert_certified(certify_case(method, target, prompt, mask=3, temperature=1.0))
        else:
            assert_certified(
                certify_case(
                    method, target, [0, 1], draft=draft, mask=3, temperature=1.0, max_tokens=3
                )
            )


@pytest.mark.parametrize("method", ["stepwise", "ssd", "specdiff"])
def test_masked_models_and_drafters_that_fill_blanks_are_certified(method):
    """SSD has stepwise decoding's law at every temperature; SpecDiff its target's, in one step and
    from left to right."""
    for certificate in certify_each(where_every_pair_meets(broad_cases(method))):
        assert_certified(certificate)


@pytest.mark.parametrize("method", ["jacobi", "multiblock", "lookahead"])
def test_guessing_and_recycling_are_certified_above_temperature_0_too(method):
    """The papers state it for greedy decoding; a guess is a draft that is certain of itself, and a
    tree of them has a closed law."""
    for certificate in certify_each(where_every_pair_meets(broad_cases(method))):
        assert_certified(certificate)


@pytest.mark.parametrize("method", ["s2d2-exact", "block-stepwise", "block-ssd"])
def test_block_models_are_certified(method):
    """Lossless self-speculation has block-size-1 decoding's law; SSD inside a block has stepwise
    decoding's. Aligned and shifted, for prompts that end before, at and after the end of a block.
    """
    for certificate in certify_each(where_every_pair_meets(broad_cases(method))):
        assert_certified(certificate)


BLOCK_MODELS = [Block(2, 4), Block(2, 4, shifted=True)]


@every_pair(
    family=dict(zip(("aligned", "shifted"), BLOCK_MODELS)),
    block=[2, 3, 4],
    prompt=[[0], [0, 1, 0], [1, 0, 1, 1]],
)
def test_what_s2d2_verifies_has_the_law_of_blocks_of_one_token(family, block, prompt):
    """The local rule: always verified, every token has the law of block size 1 given what came
    before, finished blocks read as such. With all text read at block size 1 that is block-size-1
    decoding: the exact corner."""
    for temperature in (1.0, 0.0):
        for causal, size in (("nothing", block), ("prefix", block), ("text", 1)):
            option = {"block": block, "causal": causal, "router": "span", "span": 1}
            own = dict(
                mask=2,
                family=family,
                size=size,
                method_options=option,
                max_tokens=3,
                temperature=temperature,
            )
            assert_certified(certify_case("s2d2", TARGET, prompt, **own))


def verdicts(**options):
    """Where S2D2 verifies sometimes: how far the first token of a verdict is from its law at block
    size 1, given the text there."""
    enumeration, family = Enumeration(), Block(2, 4)
    target = table_model(TARGET, enumeration, (), family)

    def run(seed, n):
        outcomes = []
        for result in target.generate(
            [[0]], seed=seed, n=n, method="s2d2", max_tokens=6, temperature=1.0, block=3, **options
        ):
            board = {0: 0}
            for event in result.trace:
                first = min(i for i in range(7) if i not in board)
                if event.reason in ("accepted", "resampled") and event.positions:
                    outcomes.append((tuple(board[i] for i in range(first)), event.tokens[0]))
                    break
                board |= dict(zip(event.positions, event.tokens))
            else:
                outcomes.append(((), -1))
        return outcomes

    law = enumeration.law_of(run)
    verified, worst = {}, 0.0
    for (text, token), chance in law.items():
        if text:
            verified.setdefault(text, {})[token] = chance
    for text, chances in verified.items():
        place, digests = block_context(list(enumerate(text)), family, 3)
        p = TARGET.logits(place, digests).clone()
        p[2] = -torch.inf
        total = sum(chances.values())
        worst = max(
            worst, *(abs(chances.get(x, 0.0) / total - float(p.softmax(-1)[x])) for x in (0, 1))
        )
    return worst, sum(law.values()), len(verified)


SOMETIMES = dict(
    router="score", estimator="confidence", strength=1.0, enough=0.5, cost=1.0, threshold=0.0
)


def test_a_router_that_verifies_sometimes_keeps_the_local_rule():
    """It looks at laws and never at the tokens drawn from them: it may choose when to verify, but
    not what comes of it."""
    worst, mass, texts = verdicts(**SOMETIMES)
    # it verifies after one text and not after another
    assert worst < 1e-12 and abs(mass - 1) < 1e-12 and texts > 1


def test_a_router_that_looks_at_the_draft_is_caught(monkeypatch):
    """The planted mistake: what it expects is read off the drawn tokens, as the paper's formulas
    would have it."""
    original = RouterDriver.draft

    async def peeking(self, blanks, laws):
        draft = await original(self, blanks, laws)
        drawn = enumerate(draft.tokens[: draft.view.run])
        chances = [float(laws.model_law[i, token]) for i, token in drawn]
        expected = float(expected_prefix(torch.tensor([chances])))
        return replace(draft, view=replace(draft.view, expected=expected))

    monkeypatch.setattr(RouterDriver, "draft", peeking)
    assert verdicts(**SOMETIMES)[0] > 1e-3


AHEAD = [  # several blocks, and one with drafts two decisions ahead
    [(4, {"drafts": 3}), (2, {"drafts": 0}), (2, {"worth": 1.0})],
    [(4, {"tree": "chain", "drafts": 2}), (2, {"drafts": 0}), (2, {"worth": 1.0})],
]


@pytest.mark.parametrize("family, options", zip(BLOCK_MODELS, AHEAD), ids=["aligned", "shifted"])
def test_canvases_that_are_always_verified_are_stepwise_decoding(family, options):
    for block, option in options:
        certificate = certify_case(
            "s2d2-canvases",
            TARGET,
            [0],
            mask=2,
            family=family,
            max_tokens=3,
            temperature=1.0,
            method_options={"block": block, "span": 1, **option},
        )
        assert_certified(certificate)


def test_a_tempered_ratio_is_not_lossless():
    own = dict(mask=2, family=Block(2, 4), max_tokens=3, temperature=1.0)
    exact = {"block": 4, "causal": "text"}
    assert_certified(certify_case("s2d2", TARGET, [0], method_options=exact, **own))
    for power in (0.5, 1.5):
        assert (
            certify_case(
                "s2d2", TARGET, [0], method_options={**exact, "ratio_power": power}, **own
            ).distance
            > 1e-3
        )


def test_a_drafter_with_more_tokens_than_its_target_is_certified():
    """As MDLM drafts for GPT-2: the draft model's vocabulary goes on where the target's ends."""
    target = TableBackbone(vocab=3, seed=1)
    draft = TableBackbone(vocab=5, seed=2, cost=0.1)
    for sampling in ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 2}):
        how = dict(
            draft=draft, draft_family=Masked(4), max_tokens=3, method_options={"k": 2}, **sampling
        )
        assert_certified(certify_case("specdiff", target, [0, 1], **how))


@pytest.mark.parametrize(
    "option",
    [{"draft_temperature": 0.4}, {"draft_temperature": 2.5}, {"adapt": True}, {"first": 2}],
    ids=lambda o: next(iter(o)),
)
def test_whatever_a_drafter_is_told_the_law_is_the_targets(option):
    target = TableBackbone(vocab=4, seed=1)
    draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
    how = dict(
        draft=draft,
        draft_family=Masked(3),
        max_tokens=3,
        logit_bias={3: -1e6},
        method_options={"k": 2, **option},
    )
    assert_certified(certify_case("specdiff", target, [0, 1], temperature=1.0, **how))


@pytest.mark.parametrize("method", ["specdiff-confidence", "specdiff-ddpm"])
def test_a_draft_that_knows_its_right_is_exact_at_temperature_0_and_biased_above(method):
    """The trap: laws as they were when each token was revealed, in an order that is not left to
    right."""
    target = TableBackbone(vocab=4, seed=1)
    draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
    how = dict(
        draft=draft,
        draft_family=Masked(3),
        max_tokens=3,
        logit_bias={3: -1e6},
        method_options={"k": 2, "steps": 2},
    )
    assert_certified(certify_case(method, target, [0, 1], temperature=0.0, **how))
    assert certify_case(method, target, [0, 1], temperature=1.0, **how).distance > 1e-3


@pytest.mark.parametrize(
    "method",
    [
        n
        for n in registry.BUILT_IN["methods"]
        if registry.method_named(n).guarantee == "approximate"
    ],
)
def test_certification_shows_that_an_approximate_method_is_one(method):
    if method == "ancestral":  # its own reference
        with pytest.raises(NotAble, match="no law that it claims"):
            standard_cases(method)
    else:
        assert max(case().distance for case in standard_cases(method)) > 1e-3


def test_a_tolerance_changes_the_law():
    target = TableBackbone(vocab=4, seed=1)
    fair = certify_case(
        "assd-tolerant",
        target,
        [0, None, None, None],
        mask=3,
        temperature=1.0,
        method_options={"tolerance": 0.0},
    )
    assert_certified(fair)
    loose = certify_case(
        "assd-tolerant",
        target,
        [0, None, None, None],
        mask=3,
        temperature=1.0,
        method_options={"tolerance": 0.3},
    )
    assert loose.distance > 1e-3 and abs(loose.mass - 1) < 1e-12
