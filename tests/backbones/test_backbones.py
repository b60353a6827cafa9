"""Rows over slots give the logits of the library's own forward, for every architecture, however the
rows are split and packed."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forerun
from forerun.backbones import attention, lean, library, proof
from forerun.backbones.dit import DiTBackbone, DiTShape, tensor_shapes
from forerun.backbones.table import TableBackbone
from forerun.backbones.translated import TranslatedBackbone
from forerun.checkpoints import hub, tiny
from forerun.engine.backbone import Backbone
from forerun.engine.pack import Batch
from forerun.errors import NotAble
from forerun.families.causal import Causal
from tests.helpers import ARCHITECTURES, network

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}


def own_logits(arch, dtype, tokens):
    with torch.inference_mode():
        return network(arch, dtype)(torch.tensor([list(tokens)])).logits[0]


def backbone(arch, dtype):
    return hub.backbone_of(tiny.build(arch, 0, dtype), tiny.VOCAB, 160)


def plan(text, *chains):
    return Causal.after(np.array(text, np.int32), chains or ((),))


def run(b, slots, *work):
    with torch.inference_mode():
        return b.forward(Batch(work, 160, b.device), slots)


def close(a, b, dtype, arch):
    # The library computes norms, rotations and GPT-Neo's scores in float32 whatever the weights
    # are; only GPT-2 is all float64.
    tolerance = DTYPES[dtype] if arch == "gpt2" else DTYPES[torch.float32]
    return torch.allclose(a, b, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
class TestEveryArchitecture:
    def test_one_pass_gives_the_conditionals_of_a_chain(self, arch, dtype):
        text = list(range(20, 60))
        chain = [3, 1, 4, 1, 5]
        b = backbone(arch, dtype)
        ours = run(b, b.make_slots(1, 160), (0, plan(text, chain), 0))
        assert close(ours, own_logits(arch, dtype, text + chain)[len(text) - 1 :], dtype, arch)

    def test_rows_in_pieces_over_slots_give_the_same(self, arch, dtype):
        text = list(range(20, 60))
        b = backbone(arch, dtype)
        slots = b.make_slots(3, 160)
        for start, end in ((0, 17), (17, 18), (18, 40)):
            ours = run(b, slots, (2, plan(text[:end]), start))
        assert close(ours, own_logits(arch, dtype, text)[-1:], dtype, arch)

    def test_rows_in_pieces_equal_one_pass_to_the_last_digits(self, arch, dtype):
        text = list(range(20, 60))
        b = backbone(arch, dtype)
        whole = run(b, b.make_slots(1, 160), (0, plan(text), 0))
        slots = b.make_slots(2, 160)
        for start, end in ((0, 25), (25, 26), (26, 40)):
            pieces = run(b, slots, (1, plan(text[:end]), start))
        assert torch.allclose(pieces, whole, atol=DTYPES[dtype] * float(whole.abs().max()))

    @pytest.mark.parametrize("function", ["_one_by_one", "_side_by_side"])
    def test_sequences_of_all_lengths_in_one_batch_do_not_touch_each_other(
        self, arch, dtype, function, monkeypatch
    ):
        monkeypatch.setattr(attention, "_one_by_one", getattr(attention, function))
        texts = [list(range(10, 45)), [7], [9, 8, 7]]
        b = backbone(arch, dtype)
        slots = b.make_slots(4, 160)
        run(b, slots, (3, plan(texts[0][:30]), 0))
        ours = run(
            b,
            slots,
            (3, plan(texts[0]), 30),
            (0, plan(texts[1]), 0),
            (1, plan(texts[2], [5, 6]), 0),
        )
        expected = [
            own_logits(arch, dtype, texts[0])[-1:],
            own_logits(arch, dtype, texts[1]),
            own_logits(arch, dtype, [9, 8, 7, 5, 6])[2:],
        ]
        assert close(ours, torch.cat(expected), dtype, arch)

    def test_branches_share_the_text_and_equal_chains_alone(self, arch, dtype):
        text = list(range(20, 45))
        chains = [[1, 2, 3], [4, 5], [1, 9, 9, 9]]
        b = backbone(arch, dtype)
        slots = b.make_slots(1, 160)
        run(b, slots, (0, plan(text[:-1]), 0))
        ours = run(b, slots, (0, plan(text, *chains), len(text) - 1))
        expected = [own_logits(arch, dtype, text + chain)[len(text) - 1 :] for chain in chains]
        assert close(ours, torch.cat(expected), dtype, arch)


def test_every_backbone_declares_all_that_the_engine_reads():
    shape = DiTShape(vocab=60, hidden=16, conditioning=12, layers=2, heads=2, context=32)
    weights = {name: torch.zeros(size) for name, size in tensor_shapes(shape).items()}
    llama = backbone("llama", torch.float32)
    backbones = [
        llama,
        backbone("gpt2", torch.float32),
        backbone("xlnet", torch.float32),
        DiTBackbone(weights, shape.heads, shape.vocab, shape.context),
        TableBackbone(),
        TranslatedBackbone(llama, torch.arange(20), mask=None),
    ]
    assert len({type(b) for b in backbones}) == len(backbones)
    for b in backbones:
        missing = [name for name in Backbone.__annotations__ if not hasattr(b, name)]
        assert not missing, type(b).__name__
        assert b.heads % b.key_heads == 0
        assert b.bytes_per_lane(10) == 10 * b.bytes_per_lane(1) > 0


def test_the_llama_shape_runs_lean_and_the_others_run_the_library():
    kinds = {arch: type(backbone(arch, torch.float32)) for arch in ARCHITECTURES}
    assert {a for a, kind in kinds.items() if kind is lean.LeanBackbone} == {
        "llama",
        "qwen2",
        "qwen3",
    }
    assert {a for a, kind in kinds.items() if kind is library.LibraryBackbone} == {
        "gpt2",
        "gpt_neo",
    }


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_library_path_serves_the_llama_shape_too(arch):
    b = library.LibraryBackbone(tiny.build(arch), tiny.VOCAB, 160)
    text = list(range(30, 50))
    ours = run(b, b.make_slots(1, 160), (0, plan(text, [4, 2]), 0))
    assert close(
        ours, own_logits(arch, torch.float32, [*text, 4, 2])[len(text) - 1 :], torch.float32, arch
    )


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}, {"head_dim": 32}],
)
def test_lean_follows_the_options_of_its_config(changes):
    net = tiny.build("llama", **changes)
    text = list(range(30, 50))
    with torch.inference_mode():
        expected = net(torch.tensor([text])).logits[0, -1:]
    b = lean.LeanBackbone(net, tiny.VOCAB, 160)
    assert close(run(b, b.make_slots(1, 160), (0, plan(text), 0)), expected, torch.float32, "llama")


def test_lean_follows_scaled_rotary_embeddings():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    net = tiny.build("llama", rope_parameters=rope)
    text = list(range(30, 130))
    with torch.inference_mode():
        expected = net(torch.tensor([text])).logits[0, -1:]
    b = lean.LeanBackbone(net, tiny.VOCAB, 160)
    assert close(run(b, b.make_slots(1, 160), (0, plan(text), 0)), expected, torch.float32, "llama")


def small_config(model_type, **changes):
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return AutoConfig.for_model(
        model_type, **{**shape, "pad_token_id": None, "max_position_embeddings": 64, **changes}
    )


@pytest.mark.parametrize("model_type", ["olmo2", "granite", "phi3"])
def test_an_architecture_nobody_listed_runs_if_it_proves_itself(model_type):
    config = small_config(model_type)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.inference_mode():
        expected = net(tokens).logits[0, -1:]
    b = hub.backbone_of(net, 50, 64)
    assert torch.allclose(
        run(b, b.make_slots(1, 160), (0, plan(tokens[0].tolist()), 0)), expected, atol=1e-4
    )


@pytest.mark.parametrize(
    "model_type, changes, word",
    [
        ("qwen3_next", {}, "linear attention"),
        ("llama4_text", {"attention_chunk_size": 16}, "in chunks.*max_context=16"),
        ("deepseek_v32", {"index_topk": 24}, "an index of.*max_context=24"),
        ("deepseek_v4", {}, "compressed"),
        ("bert", {}, "an encoder"),
    ],
)
def test_attention_that_rows_do_not_express_is_refused_by_its_name(model_type, changes, word):
    with pytest.raises(NotAble, match=f"'{model_type}'.*{word}"):
        hub.check_attention(small_config(model_type, **changes), None)


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("llama4_text", {"attention_chunk_size": 16}),
        ("deepseek_v32", {"index_topk": 16}),
        ("bert", {"is_decoder": True}),
        ("gpt_neox", {}),
    ],
)
def test_attention_that_is_full_within_the_context_is_not_refused(model_type, changes):
    hub.check_attention(small_config(model_type, **changes), max_context=16)


@pytest.mark.parametrize(
    "model_type, word",
    [
        ("t5", "an encoder with a decoder"),
        ("bart", "an encoder with a decoder"),
        ("vit", "a model of images"),
        ("llava", "a model of images"),
        ("distilbert", "no language model"),
    ],
)
def test_what_does_not_write_from_left_to_right_is_refused_as_that(model_type, word):
    with pytest.raises(NotAble, match=f"'{model_type}' is {word}"):
        hub.check_causal(AutoConfig.for_model(model_type))


def test_a_model_that_fills_blanks_may_not_slide():
    config = small_config("mistral", sliding_window=16, forerun={"family": "masked"})
    with pytest.raises(NotAble, match=r"fills blanks.*max_context=16"):
        hub.check_attention(config, None)
    hub.check_attention(config, max_context=16)


def test_mamba_is_refused_by_name():
    with pytest.raises(NotAble, match="'mamba'"):
        hub.check_attention(AutoConfig.for_model("mamba"), None)


@pytest.mark.parametrize("window, kind", [(16, library.LibraryBackbone), (160, lean.LeanBackbone)])
def test_a_window_that_never_bites_is_full_attention(window, kind):
    net = AutoModelForCausalLM.from_config(small_config("mistral", sliding_window=window)).eval()
    assert type(hub.backbone_of(net, 50, 160)) is kind


class PackedLinear(torch.nn.Linear):
    """Stands for a quantised layer: its weight is packed, and only its forward can read it."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        self.weight = torch.nn.Parameter(plain.weight.to(torch.bfloat16).view(torch.uint8), False)
        self.bias = plain.bias

    def forward(self, x):
        return torch.nn.functional.linear(
            x, self.weight.view(torch.bfloat16).to(x.dtype), self.bias
        )


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_quantised_weights_do_not_go_to_the_lean_decoder(arch):
    net = tiny.build(arch)
    for layer in net.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(block, name, PackedLinear(child))
    text = list(range(30, 50))
    with torch.inference_mode():
        expected = net(torch.tensor([text])).logits[0, -1:]
    b = hub.backbone_of(net, tiny.VOCAB, 160)
    assert type(b) is library.LibraryBackbone
    ours = run(b, b.make_slots(1, 160), (0, plan(text), 0))
    assert close(ours, expected, torch.float32, arch)


def test_a_config_that_names_a_quantisation_is_enough():
    net = tiny.build("llama")
    net.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert not lean.fits(net, 160)
    b = library.LibraryBackbone(net, tiny.VOCAB, 160)
    assert proof.largest_error(b) == proof.LARGEST_ROUNDED_ERROR


@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "llama"])
def test_a_network_still_works_on_its_own_and_for_a_second_model(arch):
    network = tiny.build(arch)
    ids = torch.tensor([[5, 6, 7, 8]])
    how = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    before = network.generate(ids, **how)
    first = forerun.from_network(network, None, max_context=64)
    expected = first.generate([5, 6, 7, 8], method="ar", max_tokens=5).token_ids
    assert torch.equal(network.generate(ids, **how), before)
    second = forerun.from_network(network, None, max_context=64)
    for m in (second, first):
        assert m.generate([5, 6, 7, 8], method="ar", max_tokens=5).token_ids == expected
    assert torch.equal(network.generate(ids, **how), before)
