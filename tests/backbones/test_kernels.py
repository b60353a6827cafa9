"""Our kernels and captured forwards give the same numbers as plain code. Without a GPU they run
under Triton's interpreter (which conftest asks for), over the same fixed memory."""

import itertools
import os
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.backbones import lean, products
from forerun.backbones.attention import LayerAttention, _side_by_side
from forerun.backbones.kernels import attention, elementwise, matmul, packed
from forerun.checkpoints import tiny
from forerun.engine import continuation, graphs
from forerun.engine.cache import Slots, SlotShape
from forerun.engine.pack import Batch, Moved, make_tiles
from forerun.errors import NotAble
from forerun.families.causal import Causal
from forerun.sequence.rows import PlainText, Plan, causal_rows
from tests import kernels_in_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cuts off
# the interpreter is NumPy
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def _short_launches(monkeypatch):
    """Every forward of a program takes the interpreter a second."""
    monkeypatch.setattr(continuation, "MOST_TOKENS", 8)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_norm_and_swiglu():
    x = random(3, 48)
    weight = random(48, seed=1)
    torch.testing.assert_close(
        elementwise.norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    )
    gate_up = random(3, 2 * 1500)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(elementwise.swiglu(gate_up), torch.nn.functional.silu(gate) * up)


def test_rows_that_are_given_are_not_normed():
    x, weight, given = random(5, 48, seed=1), random(48, seed=2), random(5, 48, seed=3)
    tokens = torch.tensor([3, 40, 7, 41, 39], device=DEVICE)
    normed = elementwise.norm(x, weight, 1e-5)
    expected = torch.where((tokens >= 40)[:, None], given, normed)
    found = elementwise.norm(x, weight, 1e-5, elementwise.Given(given, tokens, 40))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_are_added_in_their_order(count):
    parts = random(count, 5, 300)
    bias = random(300, seed=1)
    onto = random(5, 300, seed=2)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(elementwise.add_parts(parts, None, onto.clone(), False), total)
    both = total + bias + onto
    assert torch.equal(elementwise.add_parts(parts, bias, onto.clone(), True), both)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads,groups,dim", [(4, 2, 16), (7, 1, 8), (3, 3, 24)])
def test_rotation(heads, groups, dim, normed):
    rows = 3
    slots = Slots(SlotShape(1, 2, 5, groups, dim), torch.float32, DEVICE)
    qkv = random(rows, (heads + 2 * groups) * dim)
    cos = random(9, dim, seed=1)
    sin = random(9, dim, seed=2)
    norms = [random(dim, seed=3), random(dim, seed=4)] if normed else [None, None]
    positions = torch.tensor([4, 0, 8], device=DEVICE)
    places = torch.tensor([7, 0, slots.scratch_slot], device=DEVICE)
    batch = SimpleNamespace(positions_T=positions, slots_T=places)
    rotary = elementwise.Rotary(cos, sin, 1e-5, *norms)
    q = elementwise.rotate_and_keep(0, qkv, rotary, batch, slots)
    parts = list(qkv.unflatten(1, (-1, dim)).split([heads, groups, groups], 1))
    for i in range(2):
        if normed:
            parts[i] = torch.nn.functional.rms_norm(parts[i], (dim,), norms[i], 1e-5)
        parts[i] = (
            parts[i] * cos[positions][:, None]
            + parts[i].roll(dim // 2, -1) * sin[positions][:, None]
        )
    torch.testing.assert_close(q, parts[0])
    for kept, expected in zip(slots.flat(0), parts[1:]):
        torch.testing.assert_close(kept[places], expected)
        assert (kept != 0).flatten(1).any(1).sum() == rows  # and nothing else was written


@pytest.mark.parametrize(
    "bias,normed,gated,onto", [(0, 0, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0), (0, 0, 0, 1)]
)
@pytest.mark.parametrize("rows,transposed", [(3, False), (3, True), (20, False), (50, True)])
@pytest.mark.parametrize("parts", [1, 2])
def test_fixed_products(bias, normed, gated, onto, rows, transposed, parts, monkeypatch):
    monkeypatch.setattr(matmul, "LEAST_PART", 72 // parts)
    assert matmul.parts_of(40, 72, False)[0] == parts
    x = random(rows, 72)
    weight = random(2 * 40 if gated else 40, 72, seed=1)
    b = random(len(weight), seed=2) if bias else None
    w = random(72, seed=3) if normed else None
    to = random(rows, 40, seed=4) if onto else None
    expected = (torch.nn.functional.rms_norm(x, (72,), w, 1e-5) if normed else x) @ weight.T
    expected = expected + (b if bias else 0)
    if gated:
        expected = torch.nn.functional.silu(expected[:, :40]) * expected[:, 40:]
    expected = expected + (to if onto else 0)
    tiling = matmul.ProductTiling(32, 16, 32, 2, transposed)
    ours = matmul.fixed_product(
        elementwise.norm(x, w, 1e-5) if normed else x,
        weight,
        tiling,
        b,
        gated=bool(gated),
        onto=to.clone() if onto else None,
    )
    for fixed in (False, True):
        found = matmul.product(
            x,
            weight.T,
            b,
            normed=elementwise.RMSNorm(w, 1e-5) if normed else None,
            gated=bool(gated),
            onto=to.clone() if onto else None,
            fixed=fixed,
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def packed_matrix(kind, outputs, inputs, dtype=torch.float32):
    """A packed matrix, and the plain one that it stands for, by arithmetic of its own."""
    g = torch.Generator().manual_seed(5)
    bits, _, group = kind.partition(" ")
    group = int(group or inputs)
    scales = torch.rand(outputs, inputs // group, generator=g).bfloat16().to(DEVICE)
    zeros = None
    if bits == "fp8":
        codes = torch.randn(outputs, inputs, generator=g).mul(40).to(packed.FP8).to(DEVICE)
        made = packed.packed_8(codes, scales, dtype)
    elif bits == "int8":
        codes = torch.randint(-127, 128, (outputs, inputs), generator=g).to(torch.int8).to(DEVICE)
        made = packed.packed_8(codes, scales, dtype)
    else:
        codes = torch.randint(-8, 8, (outputs, inputs), generator=g).to(torch.int8).to(DEVICE)
        if bits == "zeros":
            zeros = torch.randint(-8, 8, scales.shape, generator=g).to(DEVICE)
        made = packed.packed_4(codes, scales, dtype, zeros)
    less = 0 if zeros is None else zeros.repeat_interleave(group, 1)
    plain = (codes.float() - less) * scales.float().repeat_interleave(group, 1)
    return made, plain.to(dtype)


PACKED = [(kind, HALF) for kind in ("int4 32", "zeros 64", "int8", "int8 32", "fp8")]


@pytest.mark.parametrize("kind,dtype", [*PACKED, ("int4 64", torch.float32)])
def test_a_packed_matrix_stands_for_a_plain_one_bit_for_bit(kind, dtype, monkeypatch):
    m, plain = packed_matrix(kind, 40, 192, dtype)
    assert m.shape == (192, 40) and m.nbytes < 48 * 192 * 1.1  # in tiles of 16 outputs
    assert torch.equal(m.widened(), plain)
    for part in ("LEAST_PART", "PACKED_LEAST_PART"):
        monkeypatch.setattr(matmul, part, 72)  # cut alike
    for rows, gated, transposed in ((1, False, True), (5, True, True), (5, False, False)):
        x = random(rows, 192).to(dtype)
        tiling = matmul.ProductTiling(16, 32, 64, 2, transposed)
        found, wanted = (
            matmul.fixed_product(x, matrix, tiling, gated=gated) for matrix in (m, plain)
        )
        assert torch.equal(found, wanted)


def test_many_rows_meet_a_packed_matrix_in_the_same_bits():
    m, plain = packed_matrix("int4 32", 40, 64)
    x = random(matmul.PACKED_ROWS + 1, 64)
    wanted = x @ plain.T
    for fixed in (False, True):
        found = matmul.product(x, m, fixed=fixed)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert torch.equal(found[:3], matmul.product(x[:3], m, fixed=True))


def test_a_gated_product_in_parts_adds_up_both_of_its_halves(monkeypatch):
    m, plain = packed_matrix("int8 64", 64, 384)
    x = random(3, 384)
    monkeypatch.setattr(matmul, "PACKED_GATED_PARTS", 2)
    found = matmul.product(x, m, gated=True, fixed=True)
    gate, up = (x @ plain.T).chunk(2, 1)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-3)


def test_an_8_bit_float_takes_the_scale_of_its_largest_weight():
    weight = random(16, 64)
    m = packed.packed_fp8(weight)
    error = (m.widened() - weight).abs().max(1).values
    assert (error <= weight.abs().max(1).values / 16).all()
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    every[[0x7F, 0xFF]] = 0  # no numbers
    codes = every.view(packed.FP8).view(4, 64)
    one = torch.ones(4, 1, device=DEVICE)
    assert torch.equal(packed.packed_8(codes, one, torch.float32).widened(), codes.float())


SMALL = dict(num_hidden_layers=1, intermediate_size=128)


def widened_network(backbone):
    """A network with the matrices that a packed backbone stands for."""
    network = tiny.build("qwen2", **SMALL, tie_word_embeddings=False)
    network.lm_head.weight.data[: backbone.vocab] = backbone.head.widened()
    for own, layer in zip(network.model.layers, backbone.stack, strict=True):
        attn, mlp = own.self_attn, own.mlp
        sizes = [len(part.weight) for part in (attn.q_proj, attn.k_proj, attn.v_proj)]
        parts = dict(zip((attn.q_proj, attn.k_proj, attn.v_proj), layer.qkv.widened().split(sizes)))
        parts |= dict(zip((mlp.gate_proj, mlp.up_proj), layer.gate_up.widened().chunk(2)))
        parts |= {attn.o_proj: layer.out.widened(), mlp.down_proj: layer.down.widened()}
        for linear, weight in parts.items():
            linear.weight.data = weight
    return network.to(DEVICE)


@torch.inference_mode()
def test_a_packed_model_has_the_bits_of_the_plain_one_that_it_stands_for(monkeypatch):
    quantize = "int4"  # and a head of int8
    kernels_in_torch.use(monkeypatch)  # all but the products
    monkeypatch.setattr(lean, "packs_on", lambda device: True)
    tiling = matmul.ProductTiling(16, 32, 64, 2)
    monkeypatch.setattr(matmul, "FLOAT32_TILING", tiling)
    monkeypatch.setattr(matmul, "PACKED_LEAST_PART", matmul.LEAST_PART)
    network = tiny.build("qwen2", **SMALL, tie_word_embeddings=False).to(DEVICE)
    backbones = [lean.LeanBackbone(network, tiny.VOCAB, 64, quantize)]
    backbones.append(lean.LeanBackbone(widened_network(backbones[0]), tiny.VOCAB, 64))
    plan = Plan(causal_rows(np.arange(5)), [np.arange(5)], 5)
    found = []
    for backbone in backbones:
        backbone.deterministic = True
        slots = backbone.make_slots(1, 64)
        batch = Batch([(0, plan, 0)], slots.table, DEVICE)
        batch.tiles = make_tiles(batch, 4, 2, 64).to(DEVICE)
        found.append(backbone.forward(batch, slots))
    assert torch.equal(*found)
    packed_model, plain_model = backbones
    assert packed_model.capturable and packed_model.has_fixed_kernels
    assert packed_model.weight_bytes < 0.6 * plain_model.weight_bytes
    # without kernels: the same numbers, by the library
    batch.tiles = None
    plain = packed_model.forward(batch, packed_model.make_slots(1, 64))
    wanted = plain_model.forward(batch, plain_model.make_slots(1, 64))
    torch.testing.assert_close(plain, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_exact_methods_on_packed_weights_write_what_ar_writes(quantize, monkeypatch):
    monkeypatch.setattr(lean, "packs_on", lambda device: True)
    # once per matrix: the interpreter is slow
    once = lru_cache(packed.PackedMatrix.widened)
    monkeypatch.setattr(packed.PackedMatrix, "widened", lambda matrix: once(matrix))
    monkeypatch.setattr(packed.PackedMatrix, "__hash__", object.__hash__)
    monkeypatch.setattr(packed.PackedMatrix, "__eq__", object.__eq__)
    network = tiny.build("qwen2", **SMALL).to(DEVICE)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8]]
    m = forerun.from_network(
        network, tiny.tokenizer(), lanes=2, max_context=64, quantize=quantize, graphs=False
    )
    assert set(m.backbone.kinds.values()) == {"packed"}
    plain = [m.generate(p, max_tokens=5, ignore_eos=True, method="ar") for p in prompts]
    results = m.generate(prompts, max_tokens=5, ignore_eos=True, method="jacobi")
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert quantize in plain[0].reference


def plans(rng, count):
    """Plans of every kind of row: causal text, tails, blocks that see themselves whole, queries
    that nobody sees."""
    for _ in range(count):
        held = int(rng.integers(300, 600))
        n = int(rng.integers(1, 30))
        rows = np.zeros((5, held + n), np.int32)
        rows[0] = rng.integers(0, 9, held + n)
        rows[1] = np.arange(held + n)
        rows[2] = rng.integers(0, np.arange(held + n) + 2)
        rows[3] = rng.integers(0, held + n, held + n)
        rows[4] = np.minimum(rows[3] + rng.integers(0, 12, held + n), held + n)
        rows[2] = np.maximum(rows[2], rows[4] <= rows[3])  # a row sees something
        yield Plan(rows, [np.arange(held, held + n)], held + n), held


@pytest.mark.parametrize("heads,groups,dim", [(4, 2, 16), (7, 1, 8), (3, 3, 24)])
@pytest.mark.parametrize("programs", [1, 64, 4096])
def test_attention_sees_what_the_five_integers_say(heads, groups, dim, programs):
    rng = np.random.default_rng(heads * programs)
    slots = Slots(SlotShape(1, 4, 700, groups, dim), torch.float32, DEVICE)
    for seed, stored in enumerate(slots.flat(0)):
        stored.copy_(random(*stored.shape, seed=seed))
    for place, page in enumerate(rng.permutation(slots.table.count)):  # pages lie anywhere
        slots.table.set(*divmod(place, slots.table.per_lane), page)
    slots.table.to_device()
    seen_splits = set()
    for count in (1, 3):
        batch = Batch(
            [(lane, *pair) for lane, pair in zip(rng.permutation(4), plans(rng, count))],
            slots.table,
            DEVICE,
        )
        q = random(len(batch.slots), heads, dim, seed=9)
        tiles = make_tiles(batch, heads, groups, programs).to(DEVICE)
        seen_splits.add(tiles.splits)
        expected = _side_by_side(q, LayerAttention(0, batch, slots, 0.3))
        found = attention.attention(0, q, tiles, slots, 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert programs < 4096 or max(seen_splits) > 1


@pytest.mark.parametrize("length", [200, 2200])
def test_attention_has_the_same_bits_however_shares_are_spread(monkeypatch, length):
    rows = np.zeros((5, length), np.int32)
    rows[2] = np.arange(length) + 1
    rows[2:, -50:] = [[length - 100], [length - 80], [length]]  # a block, behind a gap
    plan, held = Plan(rows, [np.arange(length - 5, length)], length), length - 5
    short = Causal.after(np.arange(9, dtype=np.int32), [()])
    slots = Slots(SlotShape(1, 2, length + 56, 2, 16), torch.float32, DEVICE)
    for kept in slots.flat(0):
        kept.copy_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(1)))
    batch = Batch([(0, plan, held), (1, short, 6)], slots.table, DEVICE)
    q = random(len(batch.slots), 4, 16, seed=2)
    found = []
    seen = set()
    for programs, at_a_time in ((1, 0), (16, 0), (4096, 0), (4096, 4096)):
        monkeypatch.setattr(attention, "PROGRAMS", at_a_time)
        tiles = make_tiles(batch, 4, 2, programs)
        seen.add((tiles.splits > 1, tiles.by_section))
        found.append(attention.attention(0, q, tiles.to(DEVICE), slots, 0.2))
    assert seen == {(False, False), (True, False)} | ({(True, True)} if length > 1024 else set())
    assert all(torch.equal(found[0], other) for other in found)


def test_a_tile_loads_only_what_its_rows_see():
    """Two copies of a block behind a text: neither looks at the other."""
    rows = np.zeros((5, 30), np.int32)
    rows[2] = np.where(np.arange(30) < 10, np.arange(30) + 1, 10)
    rows[3:, 10:20] = [[10], [20]]
    rows[3:, 20:] = [[20], [30]]
    batch = Batch([(0, Plan(rows, [np.arange(10, 30)], 10), 10)], 32, DEVICE)
    first, size, _, near, lo, far = make_tiles(batch, 16, 2, 16).bounds_6N
    for one in zip(first, size, near, lo, far):
        copies = {10 if row < 10 else 20 for row in range(one[0], one[0] + one[1])}
        assert one[2] == 10 and one[3] == min(copies) and one[4] == max(copies) + 10


COMPILE = """
from itertools import product
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from forerun.backbones.kernels import attention, elementwise, few_rows, launch, matmul
from forerun.engine import pages

half = "*bf16"
whole = "*i64"
single = "*fp32"
normed = dict.fromkeys(("x", "weight", "out", "given"), half)
normed |= dict(tokens=whole, size="i32", eps="fp32", first="i32")
halves = ("qkv", "q_norm", "k_norm", "cos", "sin", "queries", "keys", "values")
rotated = dict.fromkeys(halves, half) | dict(positions=whole, slots=whole, eps="fp32")
heads = dict(H=28, G=4, D=128, NORMED=True, HEADS_AT_ONCE=4, DIM=128)
attended = dict.fromkeys(("q", "keys", "values", "out"), half)
attended |= dict.fromkeys(("shares", "tops", "masses"), single)
attended |= dict(scale="fp32", spans=whole, tiles=whole, table=whole)
attended |= dict.fromkeys(("per_lane", "slot_stride", "rows", "count", "splits"), "i32")
joined = dict(shares=single, tops=single, masses=single, out=half)
multiplied = dict.fromkeys(("x", "weight", "bias", "out"), half)
multiplied |= dict(scales=half, partial_sums=single, arrivals="*i32")
multiplied |= dict.fromkeys(("rows", "N", "K", "part"), "i32")
JOBS = [
    (elementwise._norm, normed, dict(SIZE=4096, GIVEN=False), dict(num_warps=8)),
    (elementwise._norm, normed, dict(SIZE=1024, GIVEN=True), {}),
    (elementwise._swiglu, dict(gate_up=half, out=half, size="i32"), dict(BLOCK=1024), {}),
    (elementwise._rotate, rotated, heads, {}),
    (attention._join, joined, dict(D=128, DIM=128, SPLITS=24, SECTION=16, RAGGED=False),
     dict(num_warps=1)),
    (attention._join, joined, dict(D=128, DIM=128, SPLITS=6, SECTION=1, RAGGED=True),
     dict(num_warps=1)),
]
for height, split, by_section in ((16, 4, False), (64, 0, False), (64, 0, True)):
    fixed = dict(G=4, FOLD=7, D=128, DIM=128, SPLIT=split, HEIGHT=height)
    fixed |= dict(SLOTS=attention.SLOTS, AT_ONCE=4, PAGE=pages.PAGE)
    fixed |= dict(SECTION=attention.SECTION, BY_SECTION=by_section)
    warps = 4 if height <= 32 else 8
    JOBS.append((attention._attention, attended, fixed, dict(num_warps=warps, num_stages=3)))
by_kind = [*matmul.TILINGS.items()]
for small in matmul.SMALL_TILINGS.values():
    by_kind += small.items()
for kind, tilings in by_kind:
    for tiling in tilings.values():
        fixed = dict(BIASED=True, GATED=kind == "gated", ADDED=True, TRANSPOSED=tiling.transposed)
        fixed |= dict(BM=tiling.rows, BN=tiling.outputs, BK=tiling.inputs)
        fixed |= dict(PARTS=3 if kind == "plain" else 1, BITS=16, GROUP=1)
        options = dict(num_warps=tiling.warps, num_stages=tiling.stages)
        JOBS.append((matmul._product, multiplied, fixed, options))
PACKED = [
    ("plain", 4, 32, half), ("gated", 4, 32, half), ("wide", 5, 64, half),
    ("plain", 8, 0, half), ("gated", 9, 0, half), ("plain", 9, 64, single),
]  # fmt: skip
for kind, bits, group, scales in PACKED:
    tiling = matmul.packed_tiling(kind, 16, torch.bfloat16)
    fixed = dict(BIASED=True, GATED=kind == "gated", ADDED=True, TRANSPOSED=tiling.transposed)
    fixed |= dict(BM=tiling.rows, BN=tiling.outputs, BK=tiling.inputs)
    fixed |= dict(PARTS=3 if kind == "plain" else 1, BITS=bits, GROUP=group)
    options = dict(num_warps=tiling.warps, num_stages=tiling.stages)
    types = multiplied | dict(weight="*i32", scales=scales)
    JOBS.append((matmul._product, types, fixed, options))
in_gluon = multiplied | dict(x="*i32", codes="*i32")
FEW = [
    ("plain", 4, 32, half), ("gated", 5, 64, single), ("wide", 8, 0, half), ("plain", 9, 0, half)
]
for kind, bits, group, scales in FEW:
    for tiling in matmul.FEW_ROWS_TILINGS[4 if bits < 8 else 8][kind].values():
        fixed = dict(BIASED=True, GATED=kind == "gated", ADDED=True, KIND=bits, GROUP=group)
        fixed |= dict(PARTS=3 if kind == "plain" else 1, BM=tiling.rows, BK=tiling.inputs)
        fixed |= dict(TILES=tiling.tiles * tiling.warps, WARPS=tiling.warps, EVEN=kind != "wide")
        options = dict(num_warps=tiling.warps)
        JOBS.append((few_rows._few_rows, in_gluon | dict(scales=scales), fixed, options))
EVEN = {"K", "N", "part", "size", "slot_stride"}
MODES = (launch.OVERLAPPED, launch.OVERLAPPED_BY_NEXT)
for (kernel, types, fixed, options), mode in product(JOBS, MODES):
    few = kernel is few_rows._few_rows  # in Gluon
    if (few or fixed.get("BITS", 16) != 16) and mode != launch.OVERLAPPED_BY_NEXT:
        continue  # as plain ones
    fixed["LAUNCH"] = mode
    options["launch_pdl"] = True
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    aligned = {name for name in names if types.get(name, "").startswith("*")} | EVEN
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned}
    source = (GluonASTSource if few else ASTSource)(kernel, signature, fixed, divisible)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    first_read = min(ptx.find(word) % len(ptx) for word in ("ld.global", "cp.async"))
    # read before the last kernel has written: codes and scales only
    assert (ptx.index("griddepcontrol.wait") < first_read) != few
    lets_next_begin = "griddepcontrol.launch_dependents" in ptx
    assert lets_next_begin == (mode == launch.OVERLAPPED_BY_NEXT)
    if fixed.get("BITS", 16) != 16:
        # codes go from where they were loaded to the matrix unit in one thread's registers, in the
        # order in which those of a plain matrix go
        loop = made.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert "local_alloc" not in loop and "kWidth = 4" not in loop, fixed
    size = len(made.asm["cubin"])
    print(kernel.__name__, made.metadata.shared, "cp.async" in ptx, "mma" in ptx, size)
"""


def test_kernels_compile_for_a_gpu_that_is_not_there():
    """Machine code for Hopper, without one: matrix units, loads that run ahead, and no more shared
    memory than there is."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=plain, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    small = [tilings for of_rows in matmul.SMALL_TILINGS.values() for tilings in of_rows.values()]
    tilings = sum(map(len, [*matmul.TILINGS.values(), *small]))
    assert len(lines) == 14 + 6 + 2 * (4 + 2 + tilings)
    for name, shared, ahead, matrix, size in lines:
        assert int(shared) <= 232448 and int(size) > 1000
        # Two tiles of keys and of values are on their way while one is worked on: a look-up of a
        # page inside the loop would halve that.
        assert name != "_attention" or int(shared) >= 4 * 64 * 128 * 2
        assert name != "_few_rows" or int(shared) <= 4  # of one flag: weights stay in registers
        assert ahead == str(name in ("_attention", "_product"))
        assert matrix == str(name in ("_attention", "_product", "_few_rows"))


CASES = [
    ("llama", "ar", {}),
    ("qwen3", "multiblock", {"block": 4, "blocks": 2, "spawn": 0.0}),
    ("qwen2", "speculative", {"k": 3, "draft": "tiny:llama:1"}),
    ("gpt2", "jacobi", {"block": 3, "temperature": 0.8, "seed": 4}),
    ("block", "s2d2-exact", {"k": 3, "max_tokens": 9}),
    ("masked", "ssd", {"block": 4, "drafts": 2, "max_tokens": 8}),
]


@pytest.mark.parametrize("arch,method,options", CASES)
def test_fixed_forwards_decode_the_same(arch, method, options):
    outputs = []
    for captured in (False, True):
        m = forerun.load(
            f"tiny:{arch}", device=str(DEVICE), lanes=3, max_context=64, graphs=captured
        )
        options = {"max_tokens": 6, "ignore_eos": True, **options, "method": method}
        outputs.append([r.token_ids for r in m.generate([[5, 6, 7], [9]], **options)])
        assert all(bool(host.runner.captured) == captured for host in m.engine.hosts)
    assert outputs[0] == outputs[1]


def test_one_capture_serves_every_batch_that_fits():
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=4, max_context=64, graphs=True)
    m.generate([[1, 2, 3]] * 3, method="ar", max_tokens=4, ignore_eos=True)
    # a token each; the prompts came once
    assert [(size.rows, size.reads) for size in m.host.runner.captured] == [(4, 4)]
    [(size, held)] = m.host.runner.captured.items()
    # eleven rows fit where nine did
    m.generate([[7] * 2, [8] * 4, [9] * 4, [1]], method="ar", max_tokens=5, ignore_eos=True)
    assert {size.rows for size in m.host.runner.captured} == {16, 4}
    assert m.host.runner.captured[size] is held


def test_a_few_captures_serve_all_methods(monkeypatch):
    """Else those that are made for one would push out those of another, and every turn would make
    them again."""
    m = forerun.load("tiny:llama", lanes=8, max_context=256)
    sizes = Counter()
    plain = m.host.runner.forward

    def noted(batch, on_start=lambda: None):
        tiles = make_tiles(batch, m.backbone.heads, m.backbone.key_heads, 198)
        sizes[graphs.CaptureSize.of(batch, tiles)] += 1
        return plain(batch, on_start)

    monkeypatch.setattr(m.host.runner, "forward", noted)
    for method in ("ar", "jacobi", "multiblock", "lookahead", "lookup"):
        for batch in (1, 3, 8):
            m.generate(
                [[3 + i] * (5 + i) for i in range(batch)],
                method=method,
                max_tokens=24,
                ignore_eos=True,
            )
    assert sizes.total() > 150 and len(sizes) <= 40


def test_a_replay_keeps_nothing_of_the_one_before():
    """Batches that share a size but not how their rows fall into tiles, lanes and slots."""
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=4, max_context=64, graphs=True)

    def batch(*lengths):
        plans = [
            Causal.after(np.arange(n, dtype=np.int32) + 9 * i + n, [()])
            for i, n in enumerate(lengths)
        ]
        return Batch(
            [(3 - lane, plan, 0) for lane, plan in enumerate(plans)], m.host.slots.table, DEVICE
        )

    for lengths in ((3, 3, 3, 3), (3, 3, 3, 3), (4, 4, 3), (1, 4, 1, 4), (4, 4, 4)):
        torch.testing.assert_close(
            m.host.runner.forward(batch(*lengths)),
            m.backbone.forward(batch(*lengths), m.host.slots),
            rtol=1e-4,  # the interpreter adds in another order on each kind of processor
            atol=1e-4,
        )
    assert len(m.host.runner.captured) == 1


def test_a_capture_that_is_wrong_is_not_used(monkeypatch):
    expected = (
        forerun.load("tiny:llama", lanes=1).generate([3, 4], method="ar", max_tokens=5).token_ids
    )
    right = matmul.swiglu
    monkeypatch.setattr(matmul, "swiglu", lambda x: right(x) * 1.5)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, graphs=True)
    with pytest.warns(UserWarning, match="not captured as graphs.*off"):
        assert m.generate([3, 4], method="ar", max_tokens=5).token_ids == expected
    assert not m.host.runner.captured


def test_what_a_capture_must_equal():
    plain = torch.tensor([[1.0, -torch.inf, 5.0]])
    graphs.check_logits(plain, plain + 1e-4)
    for wrong in (
        plain + 1,
        plain.clamp(min=-9),
        torch.full_like(plain, torch.nan),
        plain.clamp(max=-torch.inf),
    ):
        with pytest.raises(RuntimeError, match="off"):
            graphs.check_logits(plain, wrong)


def test_rounding_that_spoils_a_row_now_and_then_spoils_no_capture(monkeypatch):
    """Half precision: after some tokens a row is far off, whoever computes it."""

    def generated(off_by):
        """With forwards of which some rows of the captured ones are off by so much."""
        m = forerun.load(
            "tiny:llama", device=str(DEVICE), dtype="float16", lanes=1, max_context=64, graphs=True
        )
        replay = graphs.CapturedForward.replay
        turns = itertools.count()
        monkeypatch.setattr(
            graphs.CapturedForward,
            "replay",
            lambda self, *a, **k: replay(self, *a, **k) + off_by(next(turns)),
        )
        m.generate([3, 4], method="ar", max_tokens=5, ignore_eos=True)
        monkeypatch.undo()
        return m.host.runner

    assert generated(lambda turn: 3.0 * (turn % 4 == 0)).captured
    with pytest.warns(UserWarning, match="not captured as graphs.*half of their logits"):
        assert not generated(lambda turn: 3.0).captured


@pytest.mark.parametrize("row,spoils", [(3, False), (-1, True)], ids=["a short text", "the long"])
def test_one_long_text_among_short_ones_is_checked_on_its_own(row, spoils):
    network = tiny.build("llama", 0, torch.float16, max_position_embeddings=1100)
    m = forerun.from_network(network.to(DEVICE), None, lanes=9, max_context=1100, graphs=True)
    lengths = [5] * 8 + [1050]
    plans = [Causal.after(np.full(n, 7, np.int32), [()]) for n in lengths]
    work = [(lane, plan, plan.length - 1) for lane, plan in enumerate(plans)]
    batch = m.host.batch(work)
    runner = m.host.runner

    def replay(batch, tiles):
        logits = runner._forward_plain(batch).clone()
        logits[row] += 3.0
        return logits

    wrong = SimpleNamespace(replay=replay)
    with pytest.raises(RuntimeError, match="half of their") if spoils else nullcontext():
        runner._check(wrong, batch, runner.tiles(batch))


def test_errors_are_counted_row_by_row():
    plain = torch.tensor([[1.0, -torch.inf, 4.0], [2.0, 1.0, 0.0], [1.0, 2.0, 3.0]])
    replayed = plain + torch.tensor([[0.0], [0.5], [0.0]])
    replayed[2, 0] = -torch.inf
    assert graphs.row_errors(plain, replayed) == [0.0, 0.25, float("inf")]


def test_numbers_too_large_for_half_precision_are_normed_first():
    x = torch.full((1, 64), 1.2e4, device=DEVICE).half()
    weight = torch.full((64,), 6.0, device=DEVICE).half()
    matrix = torch.full((32, 64), 0.01, device=DEVICE).half()
    found = matmul.product(x, matrix.t(), normed=elementwise.RMSNorm(weight, 1e-5))
    expected = torch.full((1, 32), 3.84, device=DEVICE).half()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_few_rows_in_half_precision_go_through_our_product(monkeypatch):
    """Their logits pass the check that every capture must pass."""
    # the layout that matrices have on a GPU
    monkeypatch.setattr(products.FloatLayout, "of", lambda layout, weight: weight.t())
    used = []
    right = matmul.fixed_product

    def noted(*args, **options):
        used.append(options)
        return right(*args, **options)

    monkeypatch.setattr(matmul, "fixed_product", noted)
    m = forerun.load(
        "tiny:qwen2", device=str(DEVICE), dtype="float16", lanes=1, max_context=64, graphs=True
    )
    m.generate([3, 4, 5], method="ar", max_tokens=4, ignore_eos=True)
    assert len(m.host.runner.captured) == 1
    assert any(options["gated"] for options in used)
    assert any(options["onto"] is not None for options in used)


def test_what_cannot_be_captured_runs_plainly():
    for arch in ("gpt_neo", "xlnet"):
        m = forerun.load(f"tiny:{arch}", lanes=1, graphs=True)
        assert not m.host.runner.capture_enabled
    assert not forerun.load("tiny:llama", dtype="float64", graphs=True).host.runner.capture_enabled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not forerun.load("tiny:llama", device="cpu").host.runner.capture_enabled


def test_old_captures_make_room(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, max_context=64, graphs=True)

    def twice(*sizes):
        for rows in sizes:
            plan = Causal.after(np.arange(rows, dtype=np.int32), [()])
            for _ in range(2):
                m.host.runner.forward(Batch([(0, plan, 0)], m.host.slots.table, DEVICE))
        return [size.rows for size in m.host.runner.captured]

    assert twice(1, 3, 9, 1) == [16, 4]  # which serves one row, too
    monkeypatch.setattr(m.host.runner, "_most_bytes", 1)
    assert twice(20) == [32]


def test_a_capture_serves_batches_that_are_not_much_smaller(monkeypatch):
    monkeypatch.setattr(graphs, "COVERED_BEFORE", 3)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, max_context=128, graphs=True)
    runner = m.host.runner

    def forward(rows):
        plan = Causal.after(np.arange(rows, dtype=np.int32), [()])
        batch = Batch([(0, plan, 0)], m.host.slots.table, DEVICE)
        torch.testing.assert_close(
            runner.forward(batch), runner._forward_plain(batch), rtol=1e-3, atol=1e-4
        )
        return [size.rows for size in runner.captured], runner.is_warm

    assert [forward(70) for _ in range(2)] == [([], False), ([80], False)]
    assert [forward(60) for _ in range(4)] == 3 * [([80], True)] + [([80, 64], False)]
    assert forward(40) == ([80, 64], True)  # of 64, too
    assert forward(20) == ([80, 64], True)  # of 32, for which 64 do
    assert forward(100) == ([80, 64], False)


def test_rows_that_the_device_has_moved_on_are_never_captured(monkeypatch):
    """The plain code, by which a capture is checked, does not know where they stand."""
    monkeypatch.setattr(graphs, "COVERED_BEFORE", 0)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, max_context=128, graphs=True)
    runner = m.host.runner
    text = np.arange(5, 100, dtype=np.int32)

    def forward(rows, moved=None):
        """Of the last rows of a text; moved on, if they are said to stand before it."""
        plan = Causal.after(text[: len(text) - (moved or 0)], [()])
        plan = PlainText.of(plan.tokens, plan.length - rows)
        batch = m.host.batch([(0, plan, plan.first_read)], ahead=8)
        if moved is not None:
            batch.drawn_T = torch.from_numpy(text[-rows:]).long().to(DEVICE)
            batch.moved = Moved(torch.tensor([moved], device=DEVICE), 8)
        return runner.forward(batch)

    forward(len(text))
    for _ in range(2):
        forward(70)
    assert [size.rows for size in runner.captured] == [80]
    expected = runner._forward_plain(m.host.batch([(0, PlainText.of(text, 35), 35)]))
    torch.testing.assert_close(forward(60, moved=3), expected, rtol=1e-3, atol=1e-4)
    assert [size.rows for size in runner.captured] == [80] and runner.capture_enabled


def test_tiny_names():
    assert {arch for arch, _, _ in CASES} <= {*tiny.ARCHITECTURES, *tiny.BLOCK, *tiny.MASKED}


def test_deterministic_is_refused_by_name_where_it_cannot_be():
    if DEVICE.type == "cpu":
        for name in ("tiny", "tiny:gpt2"):
            with pytest.raises(NotAble, match=r"deterministic=True: 'tiny.*cannot keep its bits"):
                forerun.load(name, deterministic=True)
    assert not forerun.load("tiny").backbone.deterministic


def test_deterministic_forwards_go_by_fixed_kernels_only(monkeypatch):
    """Prompts, first forwards and captured ones, with graphs and without."""
    monkeypatch.setattr(products.FloatLayout, "of", lambda layout, weight: weight.t())
    expected = forerun.load("tiny:qwen3").generate([3, 4, 5], method="ar", max_tokens=5).token_ids
    right = matmul.product
    how = []

    def noted(*args, fixed=False, **options):
        how.append(fixed)
        return right(*args, fixed=fixed, **options)

    monkeypatch.setattr(matmul, "product", noted)
    real = graphs.can_run_kernels
    monkeypatch.setattr(graphs, "can_run_kernels", lambda b, forced=False: real(b, forced=True))
    for captured in (True, False):
        m = forerun.load(
            "tiny:qwen3", device=str(DEVICE), lanes=1, graphs=captured, deterministic=True
        )
        assert m.generate([3, 4, 5], method="ar", max_tokens=5).token_ids == expected
        assert bool(m.host.runner.captured) == captured
    assert how and all(how)


def test_rows_share_a_tile_only_if_what_they_see_has_the_same_numbers():
    """Two tails that leave a chain at other places, and a query each: four runs, besides the
    chain's own rows."""
    rows = np.zeros((5, 20), np.int32)
    rows[2, :14] = np.arange(14) + 1
    rows[2:, 14:16] = [[6, 6], [14, 14], [15, 16]]
    rows[2:, 16:18] = [[9, 9], [16, 16], [17, 18]]
    rows[2:, 18:] = [[11, 12], [18, 19], [19, 20]]
    batch = Batch([(0, Plan(rows, [np.arange(10, 20)], 14), 10)], 32, DEVICE)
    tiles = make_tiles(batch, 8, 2, 16)
    assert tiles.bounds_6N[0].tolist() == [0, 4, 6, 8, 9]
    assert tiles.bounds_6N[1].tolist() == [4, 2, 2, 1, 1]
    assert tiles.bounds_6N[3].tolist() == [14, 6, 9, 11, 12]
