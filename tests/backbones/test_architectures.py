"""Architectures of the library decode here as in the library: the same tokens, past their windows
and trained contexts too. `bench/architectures.py` tries all of them; here are those that differ in
kind."""

import re

import pytest
import torch
from transformers import GenerationConfig

import forerun
from bench import architectures
from forerun.backbones import attention, interface, proof
from forerun.checkpoints import hub
from forerun.engine.pages import PAGE
from forerun.errors import NotAble
from tests.helpers import ROOT

INTERFACE = architectures.DRIVERS["LibraryBackbone"]
STAND_IN = architectures.DRIVERS["StandInBackbone"]
PROMPT = architectures.PROMPT
LONG = 26  # new tokens, far past a window of 16 and a trained context of 24


@pytest.mark.parametrize(
    "name, driver",
    [
        ("cohere", INTERFACE),  # logits are scaled
        ("deepseek_v3", INTERFACE),  # latent keys; values have another size
        ("gemma2", INTERFACE),  # soft caps, a window in every other layer
        ("gemma3n_text", INTERFACE),  # layers that share keys
        ("gemma4_text", INTERFACE),  # layers of different sizes
        ("gpt_oss", INTERFACE),  # sinks
        ("granite", INTERFACE),
        ("jetmoe", INTERFACE),
        ("llama4_text", INTERFACE),  # queries are scaled by position
        ("mistral", INTERFACE),
        ("nemotron", INTERFACE),
        ("olmo3", INTERFACE),
        ("phi3", INTERFACE),
        ("whisper", INTERFACE),  # its embedding counts positions
        ("bloom", STAND_IN),  # ALiBi
        ("codegen", STAND_IN),
        ("falcon", STAND_IN),
        ("gptj", STAND_IN),
        ("mpt", STAND_IN),  # ALiBi of another shape
    ],
)
def test_it_writes_what_the_library_writes(name, driver):
    assert architectures.judge(name) == architectures.Verdict(name, "equal", driver)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral"])
def test_it_does_so_with_all_sequences_in_one_call_of_attention(name, monkeypatch):
    monkeypatch.setattr(attention, "_one_by_one", attention._side_by_side)
    assert architectures.judge(name).outcome == "equal"


def test_falcon_with_alibi_writes_what_the_library_writes():
    assert architectures.judge("falcon", alibi=True).outcome == "equal"


def test_the_page_of_architectures_has_no_crash_and_nothing_wrong():
    page = (ROOT / "docs" / "models.md").read_text()
    counts = re.search(
        r"Of these (\d+) are equal, (\d+) are refused, (\d+) write something else and (\d+) crash",
        page,
    )
    equal, refused, wrong, crashed = map(int, counts.groups())
    assert equal > 2 * refused and wrong == crashed == 0


def loaded(name, context=80, **changes):
    network = architectures.build(name, **changes)
    return forerun.from_network(network, None, name=name, lanes=4, max_context=context)


def written(model, max_tokens=LONG, **options):
    return model.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, **options).token_ids


def generated(name, **changes):
    network = architectures.build(name, **changes)
    inputs = torch.tensor([PROMPT])
    network.generation_config = GenerationConfig()
    everything = dict(attention_mask=torch.ones_like(inputs), max_new_tokens=LONG, do_sample=False)
    return network.generate(inputs, **everything)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "mpt"])
def test_methods_that_draft_write_past_the_window_what_ar_writes(name):
    model = loaded(name)
    draft = loaded("mistral", sliding_window=8)
    expected = generated(name)
    assert written(model) == expected
    for method in ("lookup", "jacobi"):
        assert written(model, method=method) == expected, method
    assert written(model, method="speculative", draft=draft, k=4) == expected


DYNAMIC = dict(
    rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    max_position_embeddings=24,
)
LONGROPE = dict(
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0 + 0.1 * i for i in range(8)],
        long_factor=[2.0 + 0.5 * i for i in range(8)],
        original_max_position_embeddings=24,
    ),
    max_position_embeddings=128,
    sliding_window=None,
)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", DYNAMIC),
        ("granite", DYNAMIC),
        ("llama", LONGROPE),
        ("phi3", {**LONGROPE, "original_max_position_embeddings": 24}),
    ],
)
def test_rotations_that_change_with_the_text_are_those_of_generate(name, changes):
    model = loaded(name, **changes)
    expected = generated(name, **changes)
    assert written(model) == expected
    assert written(model, method="jacobi") == expected
    assert written(loaded(name, context=24, **changes), max_tokens=12) == expected[:12]


def test_rotations_do_not_remember_an_earlier_text():
    network = architectures.build("granite", **DYNAMIC)
    network(torch.arange(60)[None])  # the library stretches its frequencies, and keeps them so
    model = forerun.from_network(network, None, lanes=1, max_context=80)
    assert written(model) == generated("granite", **DYNAMIC)


def test_a_context_that_is_stretched_is_allowed_up_to_its_factor():
    with pytest.raises(forerun.ForerunError, match="max_context=97 is more than the 96"):
        loaded("llama", context=97, **DYNAMIC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_proof_finds_a_cap_that_is_dropped_in_any_precision(dtype, monkeypatch):
    changes = dict(attn_logit_softcapping=2.0)
    network = architectures.build("gemma2", **changes).to(dtype)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert hub.backbone_of(network, architectures.VOCABULARY, 64)
    for name, tensor in network.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])

    def without_cap(scale, window=None, softcap=None, sinks_H=None):
        return options(scale, window, None, sinks_H)

    options = interface.ScoreOptions
    monkeypatch.setattr(interface, "ScoreOptions", without_cap)
    with pytest.raises(NotAble, match=r"'gemma2' is refused.*off its own forward"):
        hub.backbone_of(
            architectures.build("gemma2", **changes).to(dtype), architectures.VOCABULARY, 64
        )


def test_half_precision_alone_is_no_reason_to_refuse():
    network = architectures.build("deepseek_v3").to(torch.bfloat16)
    backbone = hub.backbone_of(network, architectures.VOCABULARY, 64)
    assert backbone.dtype == torch.bfloat16
    assert backbone.make_slots(1, 4).flat(0)[0].dtype == torch.bfloat16


def test_whatever_goes_wrong_in_the_proof_is_a_refusal_with_the_reason(monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not match\nand so on")

    monkeypatch.setattr(proof, "proof_error", fail)
    with pytest.raises(NotAble, match=r"'gpt2' cannot be .* RuntimeError: shapes do not match$"):
        hub.backbone_of(architectures.build("gpt2"), architectures.VOCABULARY, 64)


@pytest.mark.parametrize("name", ["doge", "recurrent_gemma"])
def test_what_depends_on_more_than_attention_is_refused(name):
    verdict = architectures.judge(name)
    assert verdict.outcome == "refused" and "off its own forward" in verdict.why


def test_a_network_that_was_refused_stays_refused():
    network = architectures.build("doge")
    for words in ("off its own forward", "refused before"):
        with pytest.raises(NotAble, match=words):
            hub.backbone_of(network, architectures.VOCABULARY, 64)


def test_a_window_that_only_the_cache_knows_is_refused():
    verdict = architectures.judge("moshi")
    assert verdict.outcome == "refused" and "max_context=16" in verdict.why


@pytest.mark.parametrize("name", ["gpt_oss", "bloom", "gpt_neo", "marian"])
def test_two_models_may_drive_one_network(name):
    network = architectures.build(name)
    short = forerun.from_network(network, None, lanes=1, max_context=20)
    long = forerun.from_network(network, None, lanes=1, max_context=80)
    expected = generated(name)
    assert written(short, max_tokens=8) == expected[:8]
    assert written(long) == expected
    assert written(short, max_tokens=8) == expected[:8]


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mistral"])
def test_a_network_still_works_on_its_own(kind):
    network = architectures.build(kind)
    before = network(torch.tensor([PROMPT])).logits
    m = forerun.from_network(network, None, lanes=1, max_context=20)
    m.generate(PROMPT, method="ar", max_tokens=2)
    assert torch.equal(network(torch.tensor([PROMPT])).logits, before)


def test_slots_are_as_large_as_each_layer_needs():
    backbone = hub.backbone_of(architectures.build("deepseek_v3"), architectures.VOCABULARY, 64)
    slots = backbone.make_slots(2, 10)
    kept = [slots.flat(layer) for layer in range(3)]
    count = 2 * PAGE + 1  # a page for each lane, and the scratch slot
    assert [tuple(keys.shape) for keys, _ in kept] == [(count, 4, 16)] * 3
    assert [tuple(values.shape) for _, values in kept] == [(count, 4, 12)] * 3
    assert backbone.bytes_per_lane(10) == 3 * 10 * 4 * (16 + 12) * 4
