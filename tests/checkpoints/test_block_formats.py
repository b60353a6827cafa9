"""Block diffusion checkpoints by their real keys, against forwards written out by hand."""

import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadCheckpoint, NotAble
from forerun.families.block import BlockSpan
from tests.helpers import ask, in_blocks, write_checkpoint


def plain_config(net):
    return {
        k: v
        for k, v in net.config.to_dict().items()
        if isinstance(v, int | float | bool) and v is not None
    }


def says(m, text, blanks):
    """Our laws of the blanks of the block after a text."""
    size = m.family.block
    start = len(text) // size * size
    span = BlockSpan(start, start + size, size)
    [(_, own)] = ask(
        m, [*text, *[None] * (2 * size)], lambda t, s: t.blocks(s, [blanks], [()], span)
    )
    return own


def native(net, text, size, blanks, mask, shifted=False):
    end = (len(text) // size + 1) * size
    ids = torch.tensor([[*text, *[mask] * (end - len(text))]])
    with torch.no_grad():
        logits = net.double()(
            ids, attention_mask=torch.tensor(in_blocks(end, size))[None, None], use_cache=False
        ).logits[0]
    logits = logits[[b - shifted for b in blanks]].clone()
    logits[:, mask] = -torch.inf
    return logits.softmax(-1)


@pytest.mark.parametrize("name, block", [("sdar", 4), ("SDAR-1.7B-Chat-b8", 8)])
def test_sdar_checkpoints_load_by_their_real_keys(tmp_path, name, block):
    net = tiny.build("qwen3", 3)
    config = {
        **plain_config(net),
        "model_type": "sdar",
        "mask_token_id": 255,
        "rope_theta": 10000.0,
        "eos_token_id": [256, 254],
    }
    weights = {
        k: v
        for k, v in net.state_dict().items()
        if not (net.config.tie_word_embeddings and k == "lm_head.weight")
    }
    m = forerun.load(write_checkpoint(tmp_path / name, config, weights), dtype="float64")
    assert (m.family.name, m.family.block, m.family.shifted, m.family.mask_token) == (
        "block",
        block,
        False,
        255,
    ) and m.eos == {
        256,
        254,
    }
    text = list(range(20, 25))
    blanks = [5, 6, 7]
    assert torch.allclose(says(m, text, blanks), native(net, text, block, blanks, 255), atol=1e-6)


def test_sdar_moe_checkpoints_load_by_their_real_keys(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        **tiny.SHAPE,
        "vocab_size": 257,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", **shape, initializer_range=0.2),
        experts_implementation="eager",
    ).eval()
    weights = {}
    for key, tensor in net.state_dict().items():  # on the hub every expert has matrices of its own
        if key.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                own = key.replace("gate_up_proj", f"{e}")
                weights |= {f"{own}.gate_proj.weight": gate, f"{own}.up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            weights |= {
                key.replace("down_proj", f"{e}.down_proj.weight"): down
                for e, down in enumerate(tensor)
            }
        else:
            weights[key] = tensor
    theta = net.config.rope_parameters["rope_theta"]
    config = {
        **plain_config(net),
        **shape,
        "model_type": "sdar_moe",
        "mask_token_id": 255,
        "rope_theta": theta,
        "eos_token_id": 256,
    }
    m = forerun.load(write_checkpoint(tmp_path / "sdar", config, weights), dtype="float64")
    text, blanks = list(range(20, 25)), [5, 6, 7]
    assert torch.allclose(says(m, text, blanks), native(net, text, 4, blanks, 255), atol=1e-6)
    slow, fast = (
        m.generate(text, method=method, max_tokens=8, ignore_eos=True)
        for method in ("ar", "s2d2-exact")
    )
    assert slow.token_ids == fast.token_ids
    weights.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    with pytest.raises(BadCheckpoint, match="missing"):
        forerun.load(write_checkpoint(tmp_path / "bad", config, weights))


def test_rotations_are_not_rounded_to_the_weights_type_and_never_scaled_in_silence(tmp_path):
    net = tiny.build("qwen3", 3)
    config = {
        **plain_config(net),
        "model_type": "sdar",
        "mask_token_id": 255,
        "eos_token_id": 256,
        "rope_theta": 1e6,
    }
    weights = {
        k: v
        for k, v in net.state_dict().items()
        if not (net.config.tie_word_embeddings and k == "lm_head.weight")
    }
    folder = write_checkpoint(tmp_path / "sdar", config, weights)
    fine, coarse = (forerun.load(folder, dtype=dtype).backbone for dtype in ("float32", "bfloat16"))
    # of one rounding, at every one of the positions
    assert (fine.cos_CD - coarse.cos_CD.float()).abs().max() < 0.01
    zoo = [forerun.load("zoo:block", dtype=dtype).backbone for dtype in ("float32", "bfloat16")]
    assert (zoo[0].cos_CD - zoo[1].cos_CD.float()).abs().max() < 0.01
    told = {k: v for k, v in config.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
    }
    assert torch.equal(
        forerun.load(write_checkpoint(tmp_path / "new", told, weights)).backbone.cos_CD, fine.cos_CD
    )
    with pytest.raises(NotAble, match="yarn"):
        forerun.load(
            write_checkpoint(
                tmp_path / "scaled",
                {**config, "rope_scaling": {"type": "yarn", "factor": 4.0}},
                weights,
            )
        )


def test_fast_dllm_v2_checkpoints_load_by_their_real_keys_and_speak_of_the_next_token(tmp_path):
    net = tiny.build("qwen2", 3)
    config = {
        **plain_config(net),
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 4,
        "mask_token_id": 255,
        "rope_theta": 10000.0,
    }
    weights = {
        k: v
        for k, v in net.state_dict().items()
        if not (net.config.tie_word_embeddings and k == "lm_head.weight")
    }
    m = forerun.load(
        write_checkpoint(tmp_path / "v2", {**config, "eos_token_id": 256}, weights), dtype="float64"
    )
    assert (m.family.name, m.family.block, m.family.shifted, m.family.mask_token) == (
        "block",
        4,
        True,
        255,
    )
    text, blanks = list(range(20, 25)), [5, 6, 7]
    assert torch.allclose(
        says(m, text, blanks), native(net, text, 4, blanks, 255, shifted=True), atol=1e-6
    )
    # A prompt that ends with a block: its last row speaks of the next block's first token, and the
    # prompt is not forgotten.
    ends = [
        m.generate(
            [a, 21, 22, 23], method="block", sub_block=2, max_tokens=6, ignore_eos=True
        ).token_ids
        for a in (20, 90, 120)
    ]
    assert len({tuple(e) for e in ends}) > 1


LLADA2 = dict(
    model_type="llada2_moe",
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=16,
    num_experts_per_tok=2,
    num_shared_experts=1,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    partial_rotary_factor=0.5,
    rope_theta=600000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    use_qk_norm=True,
    score_function="sigmoid",
    mask_token_id=119,
    eos_token_id=118,
    block_size=4,
)


def llada2_weights(seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng) * 0.3
    w = {
        "model.word_embeddings.weight": draw(120, 32),
        "model.norm.weight": draw(32).abs(),
        "lm_head.weight": draw(120, 32),
    }

    def mlp(prefix, inner):
        shapes = {"gate": (inner, 32), "up": (inner, 32), "down": (32, inner)}
        return {f"{prefix}.{part}_proj.weight": draw(*shape) for part, shape in shapes.items()}

    for i in range(3):
        own = {
            "attention.query_key_value.weight": draw(64, 32),
            "attention.dense.weight": draw(32, 32),
        }
        own |= {f"attention.{part}_layernorm.weight": draw(8).abs() for part in ("query", "key")}
        own |= {
            "input_layernorm.weight": draw(32).abs(),
            "post_attention_layernorm.weight": draw(32).abs(),
        }
        if i == 0:
            own |= mlp("mlp", 48)
        else:
            own |= {"mlp.gate.weight": draw(16, 32), "mlp.gate.expert_bias": draw(16)} | mlp(
                "mlp.shared_experts", 16
            )
            for e in range(16):
                own |= mlp(f"mlp.experts.{e}", 16)
        w |= {f"model.layers.{i}.{name}": tensor for name, tensor in own.items()}
    return w


def llada2_by_hand(w, ids, sees):
    """LLaDA2 as its card says: half of each head turns, queries and keys are normed, experts are
    chosen by groups with a bias and weighed without it. Written out, nothing shared with the
    adapter."""
    w = {k: v.double() for k, v in w.items()}
    norm = lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * g
    n, d, turned = len(ids), 8, 4
    angle = torch.outer(
        torch.arange(n).double(), 600000.0 ** (-torch.arange(0, turned, 2).double() / turned)
    )
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)

    def turn(x):
        a, rest = x[..., :turned], x[..., turned:]
        return torch.cat([a * cos + torch.cat([-a[..., 2:], a[..., :2]], -1) * sin, rest], -1)

    def mlp(x, prefix):
        inner = torch.nn.functional.silu(x @ w[f"{prefix}.gate_proj.weight"].T) * (
            x @ w[f"{prefix}.up_proj.weight"].T
        )
        return inner @ w[f"{prefix}.down_proj.weight"].T

    def experts(x, prefix):
        score = torch.sigmoid(x @ w[f"{prefix}.gate.weight"].T)
        biased = score + w[f"{prefix}.gate.expert_bias"]
        # a group is as good as its two best experts
        groups = [range(4 * g, 4 * g + 4) for g in range(4)]
        best = sorted(
            groups, key=lambda own: -sum(sorted((float(biased[e]) for e in own), reverse=True)[:2])
        )[:2]
        chosen = sorted((e for own in best for e in own), key=lambda e: -float(biased[e]))[:2]
        total = sum(score[e] for e in chosen)
        return sum(2.5 * score[e] / total * mlp(x, f"{prefix}.experts.{e}") for e in chosen) + mlp(
            x, f"{prefix}.shared_experts"
        )

    x = w["model.word_embeddings.weight"][ids]
    for i in range(3):
        p = f"model.layers.{i}"
        h = norm(x, w[f"{p}.input_layernorm.weight"])
        qkv = (h @ w[f"{p}.attention.query_key_value.weight"].T).view(n, 8, d)
        q = norm(qkv[:, :4], w[f"{p}.attention.query_layernorm.weight"]).transpose(0, 1)
        k = (
            norm(qkv[:, 4:6], w[f"{p}.attention.key_layernorm.weight"])
            .transpose(0, 1)
            .repeat_interleave(2, 0)
        )
        v = qkv[:, 6:].transpose(0, 1).repeat_interleave(2, 0)
        scores = (turn(q) @ turn(k).transpose(1, 2) / d**0.5).masked_fill(
            ~torch.tensor(sees), -torch.inf
        )
        x = (
            x
            + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, 32)
            @ w[f"{p}.attention.dense.weight"].T
        )
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"])
        x = x + (
            mlp(h, f"{p}.mlp") if i == 0 else torch.stack([experts(row, f"{p}.mlp") for row in h])
        )
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_llada2_checkpoints_load_by_their_real_keys(tmp_path):
    weights = llada2_weights()
    m = forerun.load(write_checkpoint(tmp_path / "llada2", LLADA2, weights), dtype="float64")
    assert (m.family.name, m.family.block, m.family.mask_token) == ("block", 4, 119) and m.eos == {
        118
    }
    text, blanks = [5, 17, 3, 40, 9], [5, 6, 7]
    expected = llada2_by_hand(weights, [*text, 119, 119, 119], in_blocks(8, 4))[blanks]
    expected[:, 119] = -torch.inf
    assert torch.allclose(says(m, text, blanks), expected.softmax(-1), atol=1e-5)
    edited = m.generate(text, method="s2d2", edit=0.2, max_tokens=10, ignore_eos=True)
    assert len(edited.token_ids) == 10
    with pytest.raises(NotAble, match="refused"):
        forerun.load(
            write_checkpoint(tmp_path / "other", {**LLADA2, "score_function": "softmax"}, weights)
        )
    # Their gate divides by the sum of the best, whatever the config says.
    ignored = {**LLADA2, "norm_topk_prob": False}
    same = forerun.load(write_checkpoint(tmp_path / "same", ignored, weights), dtype="float64")
    assert torch.equal(says(same, text, blanks), says(m, text, blanks))
    del weights["model.layers.1.attention.dense.weight"]
    with pytest.raises(BadCheckpoint, match="o_proj"):
        forerun.load(write_checkpoint(tmp_path / "bad", LLADA2, weights))


def test_bd3lm_checkpoints_load_by_their_real_keys(tmp_path):
    from tests.checkpoints.test_masked_formats import MDLM, mdlm_by_hand, mdlm_weights

    config = {
        **MDLM,
        "model_type": "bd3lm",
        "block_size": 4,
        "cross_attn": True,
        "adaln": True,
        "causal": False,
    }
    weights = mdlm_weights()
    m = forerun.load(write_checkpoint(tmp_path / "bd3", config, weights), dtype="float64")
    assert (m.family.name, m.family.block, m.family.mask_token) == ("block", 4, 59)
    # In the first block nothing comes before, so MDLM's computation of that block alone is the
    # answer.
    expected = mdlm_by_hand(weights, [5, 59, 59, 59])[1:]
    expected[:, 59] = -torch.inf
    assert torch.allclose(says(m, [5], [1, 2, 3]), expected.softmax(-1), atol=1e-6)
    for blocks in ([5, 17, 3, 40, 9], [5, 17, 3, 41, 9]):
        expected = mdlm_by_hand(weights, [*blocks, 59, 59, 59], in_blocks(8, 4))[5:]
        expected[:, 59] = -torch.inf
        assert torch.allclose(says(m, blocks, [5, 6, 7]), expected.softmax(-1), atol=1e-6)
    with pytest.raises(NotAble, match="refused"):
        forerun.load(write_checkpoint(tmp_path / "causal", {**config, "causal": True}, weights))
    with pytest.raises(BadCheckpoint, match="block_size"):
        forerun.load(
            write_checkpoint(
                tmp_path / "none", {k: v for k, v in config.items() if k != "block_size"}, weights
            )
        )
