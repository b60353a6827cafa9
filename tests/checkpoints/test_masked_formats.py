"""Masked diffusion checkpoints by their real keys, against forwards written out by hand."""

import json

import numpy as np
import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadCheckpoint, NotAble, TokenizerMismatch
from forerun.families.masked import CacheScope
from forerun.sequence.canvas import BLANK
from tests.helpers import ask, model, write_checkpoint

PROMPTS = [[5, 6, 7], list(range(40, 47)), list(range(8)), list(range(30, 39))]
SHAPE = dict(
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    mlp_hidden_size=48,
    max_sequence_length=64,
    rms_norm_eps=1e-5,
)
LLADA = dict(
    model_type="llada",
    vocab_size=300,
    embedding_size=304,
    rope_theta=500000.0,
    weight_tying=False,
    mask_token_id=299,
    eos_token_id=298,
    **SHAPE,
)


@pytest.mark.parametrize("odd", [{"activation_type": "swiglu"}, {"rope": False}, {"alibi": True}])
def test_an_llada_that_is_no_llama_is_refused(odd, tmp_path):
    with pytest.raises(NotAble, match="LLaDA has other norms"):
        forerun.load(write_checkpoint(tmp_path, {**LLADA, **odd}, llada_weights()))


def llada_weights(seed=0):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng) * 0.3
    weights = {
        "wte.weight": draw(304, 32),
        "ln_f.weight": draw(32).abs(),
        "ff_out.weight": draw(304, 32),
    }
    for i in range(2):
        own = {f"{n}_proj.weight": draw(32, 32) for n in "qkv"}
        own |= {
            "attn_out.weight": draw(32, 32),
            "attn_norm.weight": draw(32).abs(),
            "ff_norm.weight": draw(32).abs(),
        }
        own |= {
            "ff_proj.weight": draw(48, 32),
            "up_proj.weight": draw(48, 32),
            "ff_out.weight": draw(32, 48),
        }
        weights |= {f"blocks.{i}.{name}": tensor for name, tensor in own.items()}
    return {f"model.transformer.{name}": tensor for name, tensor in weights.items()}


def llada_by_hand(w, ids):
    """LLaDA as its paper says: RMS norms, rotary attention without a mask, SwiGLU. Written out,
    nothing shared with the adapter."""
    w = {k.removeprefix("model.transformer."): v.double() for k, v in w.items()}
    norm = lambda x, g: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * g
    n, heads, d = len(ids), 4, 8
    angle = torch.outer(torch.arange(n).double(), 500000.0 ** (-torch.arange(0, d, 2).double() / d))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    turn = lambda x: x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
    x = w["wte.weight"][ids]
    for i in range(2):
        own = {
            k.removeprefix(f"blocks.{i}."): v for k, v in w.items() if k.startswith(f"blocks.{i}.")
        }
        h = norm(x, own["attn_norm.weight"])
        q, k, v = ((h @ own[f"{m}_proj.weight"].T).view(n, heads, d).transpose(0, 1) for m in "qkv")
        law = (turn(q) @ turn(k).transpose(1, 2) / d**0.5).softmax(-1)
        x = x + (law @ v).transpose(0, 1).reshape(n, 32) @ own["attn_out.weight"].T
        h = norm(x, own["ff_norm.weight"])
        x = (
            x
            + (
                torch.nn.functional.silu(h @ own["ff_proj.weight"].T)
                * (h @ own["up_proj.weight"].T)
            )
            @ own["ff_out.weight"].T
        )
    return norm(x, w["ln_f.weight"]) @ w["ff_out.weight"].T


def test_llada_checkpoints_load_by_their_real_keys(tmp_path):
    weights = llada_weights()
    m = forerun.load(write_checkpoint(tmp_path / "llada", LLADA, weights), dtype="float64")
    assert (
        m.family.name == "masked"
        and not m.family.shifted
        and m.family.mask_token == 299
        and 298 in m.eos
    )
    canvas = [5, None, 17, None, None, 250]
    ids = [299 if t is None else t for t in canvas]
    expected = llada_by_hand(weights, ids)[[1, 3, 4]]
    expected[:, 299] = -torch.inf
    [(_, own)] = ask(
        m, canvas, lambda target, seq: target.canvases(seq, [[1, 3, 4]], [()], CacheScope())
    )
    assert torch.allclose(own, expected.softmax(-1), atol=1e-6)
    assert len(m.generate([5, 6], max_tokens=6, ignore_eos=True).token_ids) == 6


def test_dream_checkpoints_load_by_their_real_keys_and_speak_of_the_next_position(tmp_path):
    net = tiny.build("qwen2", 3)
    raw = {
        k: v
        for k, v in net.config.to_dict().items()
        if isinstance(v, int | float | bool) and v is not None
    }
    config = {
        **raw,
        "model_type": "Dream",
        "mask_token_id": 255,
        "eos_token_id": 256,
        "rope_theta": 10000.0,
    }
    weights = {k: v.contiguous() for k, v in net.state_dict().items()}
    if net.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    m = forerun.load(write_checkpoint(tmp_path / "dream", config, weights), dtype="float64")
    assert m.family.name == "masked" and m.family.shifted and m.family.mask_token == 255
    canvas = [5, None, 17, None, None]
    ids = torch.tensor([[255 if t is None else t for t in canvas]])
    with torch.no_grad():
        logits = net.double()(
            ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool), use_cache=False
        ).logits[0]
    expected = logits[[0, 2, 3]]  # the rows before the blanks
    expected[:, 255] = -torch.inf
    [(_, own)] = ask(
        m, canvas, lambda target, seq: target.canvases(seq, [[1, 3, 4]], [()], CacheScope())
    )
    assert torch.allclose(own, expected.softmax(-1), atol=1e-5)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (
            lambda c, w: w.pop("model.transformer.blocks.1.q_proj.weight"),
            "1 missing .*layers.1.self_attn.q_proj",
        ),
        (
            lambda c, w: w.update({"model.transformer.blocks.0.extra.weight": torch.ones(2)}),
            "extra.weight",
        ),
        (lambda c, w: w.update({"model.transformer.ln_f.weight": torch.ones(31)}), "another shape"),
        (lambda c, w: c.pop("d_model"), "d_model"),
        (lambda c, w: c.update(mask_token_id=999), "mask token 999"),
    ],
)
def test_a_wrong_or_missing_key_is_a_clear_error(tmp_path, spoil, said):
    config, weights = dict(LLADA), llada_weights()
    spoil(config, weights)
    with pytest.raises(BadCheckpoint, match=said):
        forerun.load(write_checkpoint(tmp_path / "bad", config, weights))


MDLM = dict(
    model_type="mdlm",
    vocab_size=60,
    model_length=32,
    hidden_dim=16,
    cond_dim=12,
    n_blocks=2,
    n_heads=2,
    time_conditioning=False,
)


def mdlm_weights(seed=0):
    from forerun.backbones.dit import DiTShape, tensor_shapes

    rng = torch.Generator().manual_seed(seed)
    weights = {
        f"backbone.{name}": torch.randn(*shape, generator=rng) * 0.3
        for name, shape in tensor_shapes(DiTShape(60, 16, 12, 2, 2, 32)).items()
    }
    return weights | {"backbone.rotary_emb.inv_freq": 1 / 10000 ** (torch.arange(0, 8, 2) / 8)}


def mdlm_by_hand(w, ids, sees=None):
    """MDLM as its paper and card say, written out: adaLN on the embedding of level zero, rotary,
    tanh-GELU. BD3-LM is the same network whose rows do not see everything."""
    sees = torch.ones(len(ids), len(ids), dtype=torch.bool) if sees is None else torch.tensor(sees)
    w = {k.removeprefix("backbone."): v.double() for k, v in w.items()}
    line = lambda x, n: x @ w[f"{n}.weight"].T + w.get(f"{n}.bias", 0)
    silu = torch.nn.functional.silu
    level = torch.cat([torch.cos(torch.zeros(128)), torch.sin(torch.zeros(128))]).double()
    c = silu(line(silu(line(level, "sigma_map.mlp.0")), "sigma_map.mlp.2"))

    def norm(x, name, shift, scale):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"] * (1 + scale) + shift

    n, heads, d = len(ids), 2, 8
    angle = torch.outer(torch.arange(n).double(), 10000.0 ** (-torch.arange(0, d, 2).double() / d))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    turn = lambda x: x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
    x = w["vocab_embed.embedding"][ids]
    for i in range(2):
        s1, g1, a1, s2, g2, a2 = line(c, f"blocks.{i}.adaLN_modulation").chunk(6)
        qkv = line(norm(x, f"blocks.{i}.norm1", s1, g1), f"blocks.{i}.attn_qkv").view(
            n, 3, heads, d
        )
        q, k, v = (qkv[:, j].transpose(0, 1) for j in range(3))
        law = (
            (turn(q) @ turn(k).transpose(1, 2) / d**0.5).masked_fill(~sees, -torch.inf).softmax(-1)
        )
        x = x + a1 * line((law @ v).transpose(0, 1).reshape(n, 16), f"blocks.{i}.attn_out")
        inner = torch.nn.functional.gelu(
            line(norm(x, f"blocks.{i}.norm2", s2, g2), f"blocks.{i}.mlp.0"), approximate="tanh"
        )
        x = x + a2 * line(inner, f"blocks.{i}.mlp.2")
    shift, scale = line(c, "output_layer.adaLN_modulation").chunk(2)
    return line(norm(x, "output_layer.norm_final", shift, scale), "output_layer.linear")


def test_mdlm_checkpoints_load_by_their_real_keys(tmp_path):
    weights = mdlm_weights()
    m = forerun.load(write_checkpoint(tmp_path / "mdlm", MDLM, weights), dtype="float64")
    assert m.family.name == "masked" and m.family.mask_token == 59 and m.context == 32
    canvas = [5, None, 17, None, None, 25]
    expected = mdlm_by_hand(weights, [59 if t is None else t for t in canvas])[[1, 3, 4]]
    expected[:, 59] = -torch.inf  # SUBS: a mask is never predicted
    [(_, own)] = ask(
        m, canvas, lambda target, seq: target.canvases(seq, [[1, 3, 4]], [()], CacheScope())
    )
    assert torch.allclose(own, expected.softmax(-1), atol=1e-6)
    slow, fast = (
        m.generate([5, 6], method=method, max_tokens=8, block=4) for method in ("stepwise", "ssd")
    )
    assert slow.token_ids == fast.token_ids
    plain = forerun.load("tiny", max_context=32)
    with pytest.raises(TokenizerMismatch, match="has no tokenizer"):
        plain.generate([5], method="specdiff", draft=m, max_tokens=8)
    # whoever takes them away says that tokens mean the same; it knows fewer, and drafts those
    plain.tokenizer = None
    drafted = plain.generate([5], method="specdiff", draft=m, max_tokens=8)
    assert drafted.token_ids == plain.generate([5], max_tokens=8).token_ids
    del weights["backbone.blocks.0.norm1.weight"]
    with pytest.raises(BadCheckpoint, match="norm1"):
        forerun.load(write_checkpoint(tmp_path / "bad", MDLM, weights))
    with pytest.raises(NotAble, match="noise level"):
        forerun.load(
            write_checkpoint(
                tmp_path / "timed", {**MDLM, "time_conditioning": True}, mdlm_weights()
            )
        )


SEDD = dict(
    ngpus=8,
    tokens=60,
    graph=dict(type="absorb", file="data", report_all=False),
    noise=dict(type="loglinear", sigma_min=1e-4, sigma_max=20),
    model=dict(
        name="small",
        type="ddit",
        hidden_size=16,
        cond_dim=12,
        length=32,
        n_blocks=2,
        n_heads=2,
        scale_by_sigma=True,
        dropout=0.1,
    ),
)
E, HEADS, HEAD, COND, MASK = 16, 2, 8, 12, 60


def sedd_weights(seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"vocab_embed.embedding": [MASK + 1, E], "output_layer.norm_final.weight": [E]}
    lines = {
        "sigma_map.mlp.0": [COND, 256],
        "sigma_map.mlp.2": [COND, COND],
        "output_layer.linear": [MASK + 1, E],
    }
    lines |= {"output_layer.adaLN_modulation": [2 * E, COND]}
    for i in range(2):
        shapes |= {f"blocks.{i}.{name}.weight": [E] for name in ("norm1", "norm2")}
        shapes |= {f"blocks.{i}.attn_qkv.weight": [3 * E, E], f"blocks.{i}.attn_out.weight": [E, E]}
        lines |= {
            f"blocks.{i}.adaLN_modulation": [6 * E, COND],
            f"blocks.{i}.mlp.0": [4 * E, E],
            f"blocks.{i}.mlp.2": [E, 4 * E],
        }
    shapes |= {f"{name}.weight": shape for name, shape in lines.items()} | {
        f"{name}.bias": [s[0]] for name, s in lines.items()
    }
    weights = {name: torch.randn(*shape, generator=rng) * 0.3 for name, shape in shapes.items()}
    return weights | {"rotary_emb.inv_freq": 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)}


def sedd_law_by_hand(w, canvas):
    """The law at each mask by SEDD's published forward, position by position and head by head, down
    to its log-scores."""
    w = {name: tensor.double() for name, tensor in w.items()}
    ids, n = [MASK if t is None else t for t in canvas], len(canvas)
    sigma = -np.log(1 - min(canvas.count(None) / n, 0.999))

    def line(x, name):
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)

    def silu(x):
        return x / (1 + torch.exp(-x))

    def norm(x, name, shift, scale):
        flat = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        return flat * w[f"{name}.weight"] * (1 + scale) + shift

    def turn(x, position):
        angles = [position / 10000 ** (2 * j / HEAD) for j in range(HEAD // 2)]
        pairs = [(x[j], x[j + HEAD // 2], np.cos(a), np.sin(a)) for j, a in enumerate(angles)]
        return torch.stack(
            [a * c - b * s for a, b, c, s in pairs] + [b * c + a * s for a, b, c, s in pairs]
        )

    waves = [
        f(sigma * np.exp(-np.log(10000) * j / 128)) for f in (np.cos, np.sin) for j in range(128)
    ]
    c = silu(line(silu(line(torch.tensor(waves), "sigma_map.mlp.0")), "sigma_map.mlp.2"))
    x = [w["vocab_embed.embedding"][token] for token in ids]
    for own in ("blocks.0", "blocks.1"):
        shift1, scale1, gate1, shift2, scale2, gate2 = line(c, f"{own}.adaLN_modulation").view(6, E)
        qkv = [
            line(norm(x[p], f"{own}.norm1", shift1, scale1), f"{own}.attn_qkv").view(3, HEADS, HEAD)
            for p in range(n)
        ]
        for p in range(n):
            seen = []
            for h in range(HEADS):
                scores = [
                    turn(qkv[p][0, h], p) @ turn(qkv[o][1, h], o) / HEAD**0.5 for o in range(n)
                ]
                seen.append(
                    sum(a * qkv[o][2, h] for o, a in enumerate(torch.stack(scores).softmax(0)))
                )
            x[p] = x[p] + gate1 * line(torch.cat(seen), f"{own}.attn_out")
            inner = torch.nn.functional.gelu(
                line(norm(x[p], f"{own}.norm2", shift2, scale2), f"{own}.mlp.0"), approximate="tanh"
            )
            x[p] = x[p] + gate2 * line(inner, f"{own}.mlp.2")
    shift, scale = line(c, "output_layer.adaLN_modulation").view(2, E)
    logits = torch.stack(
        [line(norm(y, "output_layer.norm_final", shift, scale), "output_layer.linear") for y in x]
    )
    scores = logits - np.log(np.expm1(sigma)) - np.log(MASK)
    scores[range(n), ids] = 0  # the ratio of a token to itself
    # a mask is what is left, not what was there
    return scores[[p for p in range(n) if canvas[p] is None], :MASK].softmax(-1)


HALF, FEW, ALL = [5, None, 17, None, None, 25], [5, 8, 17, None, 30, 25, 7, 40], [None] * 5


@pytest.mark.parametrize(
    "canvas", [HALF, FEW, ALL], ids=["half masked", "one mask of eight", "all masked"]
)
def test_sedd_checkpoints_load_by_their_real_keys_and_read_the_noise_level_off_the_canvas(
    tmp_path, canvas
):
    weights = sedd_weights()
    m = forerun.load(write_checkpoint(tmp_path / "sedd", SEDD, weights), dtype="float64")
    assert m.family.name == "masked" and m.family.mask_token == MASK and m.context == 32
    at = [p for p, token in enumerate(canvas) if token is None]
    [(_, own)] = ask(m, canvas, lambda target, seq: target.canvases(seq, [at], [()], CacheScope()))
    assert (
        torch.allclose(own[:, :MASK], sedd_law_by_hand(weights, canvas), atol=1e-6)
        and (own[:, MASK] == 0).all()
    )


def test_sedd_knows_the_noise_level_of_every_canvas_in_a_forward(tmp_path):
    weights = sedd_weights()
    m = forerun.load(write_checkpoint(tmp_path / "sedd", SEDD, weights), dtype="float64")
    open_at, placed = [[1, 3, 4], [3, 4], [4]], [(), [(1, 9)], [(1, 9), (3, 2)]]
    answers = ask(m, HALF, lambda target, seq: target.canvases(seq, open_at, placed, CacheScope()))
    for done, (_, own) in zip(placed, answers, strict=True):
        filled = [dict(done).get(p, token) for p, token in enumerate(HALF)]
        assert torch.allclose(own[:, :MASK], sedd_law_by_hand(weights, filled), atol=1e-6)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_sedd_writes_the_same_batched_or_alone_stepwise_or_ssd(tmp_path, cache):
    m = forerun.load(
        write_checkpoint(tmp_path / "sedd", SEDD, sedd_weights()), dtype="float64", lanes=4
    )
    how = dict(max_tokens=9, block=4, cache=cache, refresh=3)
    alone = [m.generate(prompt, method="stepwise", **how).token_ids for prompt in PROMPTS]
    for method in ("stepwise", "ssd"):
        assert [r.token_ids for r in m.generate(PROMPTS, method=method, **how)] == alone


def test_masks_that_a_cache_holds_count_for_the_noise_level():
    from forerun.backbones.dit import noise_levels
    from forerun.engine.pack import Segment
    from forerun.sequence.rows import HI, HORIZON, LO, TOKEN, Plan

    rows = np.zeros((5, 8), np.int32)
    rows[TOKEN], rows[HORIZON] = [MASK, 1, MASK, 3, MASK, MASK, MASK, 7], 4
    rows[LO, 4:6], rows[HI, 4:6] = 4, 6
    rows[LO, 6:], rows[HI, 6:] = 3, 8  # slot 3 is in both intervals, and seen once
    sigma, which = noise_levels([Segment(0, Plan(rows, [np.array([4])], 4), 2, 0)], MASK)
    assert np.allclose(1 - np.exp(-sigma[which]), [2 / 4, 2 / 4, 4 / 6, 4 / 6, 5 / 8, 5 / 8])


def test_sedd_weights_may_be_pickled(tmp_path):
    weights = sedd_weights()
    (tmp_path / "config.json").write_text(json.dumps(SEDD))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    m = forerun.load(str(tmp_path), dtype="float64")
    [(_, own)] = ask(
        m, HALF, lambda target, seq: target.canvases(seq, [[1, 3, 4]], [()], CacheScope())
    )
    assert torch.allclose(own[:, :MASK], sedd_law_by_hand(weights, HALF), atol=1e-6)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (
            lambda c, w: w.pop("blocks.1.adaLN_modulation.bias"),
            r"1 missing \(blocks.1.adaLN_modulation.bias",
        ),
        (
            lambda c, w: w.update({"blocks.2.norm1.weight": torch.ones(E)}),
            r"1 unexpected \(blocks.2.norm1.weight",
        ),
        (
            lambda c, w: w.update({"sigma_map.mlp.0.weight": torch.ones(COND, 128)}),
            r"another shape \(sigma_map.mlp.0.weight",
        ),
        (
            lambda c, w: w.update({"rotary_emb.inv_freq": w["rotary_emb.inv_freq"] * 2}),
            "rotary_emb.inv_freq",
        ),
        (lambda c, w: c.update(graph={"type": "uniform"}), "graph is 'uniform'.*'absorb'"),
        (lambda c, w: c.pop("tokens"), "no 'tokens'"),
        (lambda c, w: c.update(model={"hidden_size": E}), "no 'cond_dim'"),
    ],
    ids=["missing", "unexpected", "shape", "rotation", "uniform", "tokens", "cond_dim"],
)
def test_a_sedd_checkpoint_that_is_wrong_is_a_clear_error(tmp_path, spoil, said):
    config, weights = dict(SEDD), sedd_weights()
    spoil(config, weights)
    with pytest.raises(BadCheckpoint, match=said):
        forerun.load(write_checkpoint(tmp_path / "bad", config, weights))


def test_rows_of_a_canvas_are_shared_only_as_the_policy_says():
    m = model("masked")
    from forerun.options import Sampling
    from forerun.probability.logits import TokenHistory
    from forerun.sequence.canvas import Canvas

    history = TokenHistory(Sampling(), np.zeros(0, np.int64), m.vocab, frozenset())
    seq = Canvas([1, 2, BLANK, BLANK, BLANK, BLANK], history=history)
    plan = m.family.canvases(seq, [[2], [3]], [(), [(2, 9)]], CacheScope("dual", 2, 4, fresh=False))
    # outside the block once, the block per canvas
    assert plan.trusted == 4 and plan.rows.shape[1] == 6 + 2
    assert plan.rows[1].tolist() == [0, 1, 4, 5, 2, 3, 2, 3] and plan.rows[0, 6] == 9
    plan = m.family.canvases(seq, [[2], [3]], [(), [(2, 9)]], CacheScope())
    assert plan.trusted == 0 and plan.rows.shape[1] == 12
