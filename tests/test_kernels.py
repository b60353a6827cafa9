"""Our kernels and captured forwards: the same numbers as plain code. Without a GPU they run under Triton's interpreter (which
conftest asks for), over the same fixed memory; on one, as they are."""

import os
import subprocess
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import forerun
from forerun.backbones import kernels, lean
from forerun.backbones.attention import _side_by_side
from forerun.checkpoints import tiny
from forerun.engine import graphs
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch, tiled
from forerun.families.causal import Causal
from forerun.rows import Plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter is NumPy


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_norm_and_swiglu():
    x, weight = random(3, 48), random(48, seed=1)
    torch.testing.assert_close(kernels.norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (48,), weight, 1e-5))
    gate_up = random(3, 2 * 1500)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(kernels.swiglu(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads,groups,dim", [(4, 2, 16), (7, 1, 8), (3, 3, 24)])
def test_rotation(heads, groups, dim, normed):
    rows, slots = 3, Slots(1, 2, 5, groups, dim, torch.float32, DEVICE)
    qkv, cos, sin = random(rows, (heads + 2 * groups) * dim), random(9, dim, seed=1), random(9, dim, seed=2)
    norms = (random(dim, seed=3), random(dim, seed=4)) if normed else None
    positions, places = torch.tensor([4, 0, 8], device=DEVICE), torch.tensor([7, 0, slots.nowhere], device=DEVICE)
    q = kernels.rotate_and_keep(0, qkv, norms, cos, sin, positions, places, slots, 1e-5)
    parts = list(qkv.unflatten(1, (-1, dim)).split([heads, groups, groups], 1))
    for i in range(2):
        if norms:
            parts[i] = torch.nn.functional.rms_norm(parts[i], (dim,), norms[i], 1e-5)
        parts[i] = parts[i] * cos[positions][:, None] + parts[i].roll(dim // 2, -1) * sin[positions][:, None]
    torch.testing.assert_close(q, parts[0])
    for kept, expected in zip(slots.flat(0), parts[1:]):
        torch.testing.assert_close(kept[places], expected)
        assert (kept != 0).flatten(1).any(1).sum() == rows  # and nothing else was written


@pytest.mark.parametrize("bias,normed,gated,onto", [(0, 0, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("rows,turned", [(3, False), (3, True), (20, False), (50, True)])
def test_thin_products(bias, normed, gated, onto, rows, turned):
    x, weight = random(rows, 72), random(2 * 40 if gated else 40, 72, seed=1)
    b, w = random(40, seed=2) if bias else None, random(72, seed=3) if normed else None
    to = random(rows, 40, seed=4) if onto else None
    expected = (torch.nn.functional.rms_norm(x, (72,), w, 1e-5) if normed else x) @ weight.T
    if gated:
        expected = torch.nn.functional.silu(expected[:, :40]) * expected[:, 40:]
    expected = expected + (b if bias else 0) + (to if onto else 0)
    how = dict(normed=(w, 1e-5) if normed else None, gated=bool(gated))
    normed_x, blocks = kernels.norm(x, w, 1e-5) if normed else x, kernels.Blocks(16, 32, 2, turned)
    for found in (
        kernels.thin(normed_x, weight, blocks, b, gated=bool(gated), onto=to.clone() if onto else None),
        kernels.product(x, weight.T, b, **how, onto=to),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def plans(rng, count):
    """Plans of every kind of row: causal text, tails, blocks that see themselves whole, queries that nobody sees."""
    for _ in range(count):
        held, n = int(rng.integers(300, 600)), int(rng.integers(1, 30))
        rows = np.zeros((5, held + n), np.int32)
        rows[0], rows[1] = rng.integers(0, 9, held + n), np.arange(held + n)
        rows[2] = rng.integers(0, np.arange(held + n) + 2)
        lo = rng.integers(0, held + n, held + n)
        rows[3], rows[4] = lo, np.minimum(lo + rng.integers(0, 12, held + n), held + n)
        rows[2] = np.maximum(rows[2], rows[4] <= rows[3])  # a row sees something
        yield Plan(rows, [np.arange(held, held + n)], held + n), held


@pytest.mark.parametrize("heads,groups,dim", [(4, 2, 16), (7, 1, 8), (3, 3, 24)])
@pytest.mark.parametrize("programs", [1, 64, 4096])
def test_attention_sees_what_the_five_integers_say(heads, groups, dim, programs):
    rng = np.random.default_rng(heads * programs)
    slots = Slots(1, 4, 700, groups, dim, torch.float32, DEVICE)
    for seed, pair in enumerate(slots.flat(0)):
        pair.copy_(random(*pair.shape, seed=seed))
    seen_splits = set()
    for count in (1, 3):
        batch = Batch([(lane, *pair) for lane, pair in zip(rng.permutation(4), plans(rng, count))], 700, DEVICE)
        q = random(len(batch.slots), heads, dim, seed=9)
        tiles = tiled(batch, heads // groups, groups, programs).to(DEVICE)
        seen_splits.add(tiles.splits)
        expected = _side_by_side(q, slots.keys[0], slots.values[0], batch, 0.3, None)
        torch.testing.assert_close(kernels.attention(0, q, tiles, slots, 0.3), expected, rtol=1e-4, atol=1e-5)
    assert programs == 1 or max(seen_splits) > 1


def test_a_tile_loads_only_what_its_rows_see():
    """Two copies of a block behind a text: neither looks at the other."""
    rows = np.zeros((5, 30), np.int32)
    rows[2] = np.where(np.arange(30) < 10, np.arange(30) + 1, 10)
    rows[3:, 10:20], rows[3:, 20:] = np.array([[10], [20]]), np.array([[20], [30]])
    batch = Batch([(0, Plan(rows, [np.arange(10, 30)], 10), 10)], 32, DEVICE)
    first, size, _, near, lo, far = tiled(batch, 8, 2, 16).numbers
    for one in zip(first, size, near, lo, far):
        copies = {10 if row < 10 else 20 for row in range(one[0], one[0] + one[1])}
        assert one[2] == 10 and one[3] == min(copies) and one[4] == max(copies) + 10


COMPILE = """
from itertools import product
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from forerun.backbones import kernels as k

half, whole, single = "*bf16", "*i64", "*fp32"
rotated = dict.fromkeys(("qkv", "q_norm", "k_norm", "cos", "sin", "queries", "keys", "values"), half)
rotated |= dict(positions=whole, slots=whole, eps="fp32")
looked = dict(q=half, keys=half, values=half, out=half, shares=single, weights=single, scale="fp32", spans=whole, tiles=whole,
              lane_stride="i32", slot_stride="i32", rows="i32", count="i32")
thin = dict(x=half, weight=half, bias=half, out=half, rows="i32", N="i32", K="i32")
JOBS = [
    (k._norm, dict(x=half, weight=half, out=half, size="i32", eps="fp32"), dict(SIZE=4096), dict(num_warps=8)),
    (k._swiglu, dict(gate_up=half, out=half, size="i32"), dict(BLOCK=1024), {}),
    (k._rotate, rotated, dict(H=28, G=4, D=128, NORMED=True, AT_ONCE=4, DIM=128), {}),
    (k._join, dict(shares=single, weights=single, out=half), dict(D=128, DIM=128, SPLITS=16), dict(num_warps=2)),
]
for height, splits in ((16, 16), (64, 1)):
    fixed = dict(G=4, FOLD=7, D=128, DIM=128, SPLITS=splits, HEIGHT=height, SLOTS=k.SLOTS)
    JOBS.append((k._attention, looked, fixed, dict(num_warps=4, num_stages=3)))
for kind, by_rows in k.THIN.items():
    for rows, b in by_rows.items():
        fixed = dict(BIASED=True, GATED=kind == "gated", ADDED=True, TURNED=b.turned, ROWS=rows, BN=b.outputs, BK=b.inputs)
        JOBS.append((k._thin, thin, fixed, dict(num_warps=4, num_stages=b.stages)))
EVEN = {"K", "N", "size", "lane_stride", "slot_stride"}
for (kernel, types, fixed, options), when in product(JOBS, (k.EARLY, k.AND_THE_NEXT)):
    fixed["WHEN"], options["launch_pdl"] = when, True
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*") or name in EVEN]
    source = ASTSource(kernel, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in aligned})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    reads = min(ptx.find(word) % len(ptx) for word in ("ld.global", "cp.async"))
    assert ptx.index("griddepcontrol.wait") < reads, "something is read before the last kernel has written it"
    assert ("griddepcontrol.launch_dependents" in ptx) == (when == k.AND_THE_NEXT)
    print(kernel.__name__, made.metadata.shared, "cp.async" in ptx, "mma" in ptx, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_gpu_that_is_not_there():
    """Machine code for Hopper, without one: matrix units, loads that run ahead, and no more shared memory than there is."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=plain, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 22
    for name, shared, ahead, matrix, size in lines:
        assert int(shared) <= 232448 and int(size) > 1000
        assert (ahead, matrix) == (("True", "True") if name in ("_attention", "_thin") else ("False", "False"))


CASES = [
    ("llama", "ar", {}),
    ("qwen3", "multiblock", {"block": 4, "blocks": 2, "spawn": 0.0}),
    ("qwen2", "speculative", {"k": 3, "draft": "tiny:llama:1"}),
    ("gpt2", "jacobi", {"block": 3, "temperature": 0.8, "seed": 4}),
    ("block", "s2d2-exact", {"k": 4, "max_tokens": 12}),
    ("masked", "ssd", {"block": 4, "max_tokens": 12}),
]


@pytest.mark.parametrize("arch,method,how", CASES)
def test_fixed_forwards_decode_the_same(arch, method, how):
    outputs = []
    for captured in (False, True):
        m = forerun.load(f"tiny:{arch}", device=str(DEVICE), lanes=3, max_context=64, graphs=captured)
        how = {"max_tokens": 6, "ignore_eos": True, **how, "method": method}
        outputs.append([r.token_ids for r in m.generate([[5, 6, 7], [9]], **how)])
        assert all(bool(host.runner.captured) == captured for host in m.engine.hosts)
    assert outputs[0] == outputs[1]


def test_one_capture_serves_every_batch_that_fits():
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=4, max_context=64, graphs=True)
    m.generate([[1, 2, 3]] * 3, method="ar", max_tokens=4, ignore_eos=True)
    assert [(size.rows, size.reads) for size in m.host.runner.captured] == [(4, 4)]  # a token each; the prompts came once
    [(size, held)] = m.host.runner.captured.items()
    m.generate([[7] * 2, [8] * 4, [9] * 4, [1]], method="ar", max_tokens=5, ignore_eos=True)  # eleven rows fit where nine did
    assert [size.rows for size in m.host.runner.captured] == [16, 4] and m.host.runner.captured[size] is held


def test_a_few_captures_serve_all_methods(monkeypatch):
    """Else those that are made for one would push out those of another, and every turn would make them again."""
    m, sizes = forerun.load("tiny:llama", lanes=8, max_context=256), Counter()
    plain = m.host.runner.forward

    def noted(batch, began):
        tiles = tiled(batch, m.backbone.fold, m.backbone.key_heads, 198)
        sizes[graphs.Size.of(batch, tiles)] += 1
        return plain(batch, began)

    monkeypatch.setattr(m.host.runner, "forward", noted)
    for method in ("ar", "jacobi", "multiblock", "lookahead", "lookup"):
        for batch in (1, 3, 8):
            m.generate([[3 + i] * (5 + i) for i in range(batch)], method=method, max_tokens=24, ignore_eos=True)
    assert sizes.total() > 300 and len(sizes) < 40


def test_a_replay_keeps_nothing_of_the_one_before():
    """Batches that share a size but not how their rows fall into tiles, lanes and slots."""
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=4, max_context=64, graphs=True)

    def batch(*lengths):
        plans = [Causal.after(np.arange(n, dtype=np.int32) + 9 * i + n, [()]) for i, n in enumerate(lengths)]
        return Batch([(3 - lane, plan, 0) for lane, plan in enumerate(plans)], m.host.room, DEVICE)

    for lengths in ((3, 3, 3, 3), (3, 3, 3, 3), (4, 4, 3), (1, 4, 1, 4), (4, 4, 4)):
        torch.testing.assert_close(m.host.runner.forward(batch(*lengths)), m.backbone.forward(batch(*lengths), m.host.slots))
    assert len(m.host.runner.captured) == 1


def test_a_capture_that_is_wrong_is_not_used(monkeypatch):
    expected = forerun.load("tiny:llama", lanes=1).generate([3, 4], method="ar", max_tokens=5).token_ids
    right = kernels.swiglu
    monkeypatch.setattr(kernels, "swiglu", lambda x: right(x) * 1.5)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, graphs=True)
    with pytest.warns(UserWarning, match="not captured as graphs.*off"):
        assert m.generate([3, 4], method="ar", max_tokens=5).token_ids == expected
    assert not m.host.runner.captured


def test_what_a_capture_must_equal():
    plain = torch.tensor([[1.0, -torch.inf, 5.0]])
    graphs.check(plain, plain + 1e-4)
    for wrong in (plain + 1, plain.clamp(min=-9), torch.full_like(plain, torch.nan), plain.clamp(max=-torch.inf)):
        with pytest.raises(RuntimeError, match="off"):
            graphs.check(plain, wrong)


def test_numbers_too_large_for_half_precision_are_normed_first():
    x, weight = torch.full((1, 64), 1.2e4, device=DEVICE).half(), torch.full((64,), 6.0, device=DEVICE).half()
    matrix = torch.full((32, 64), 0.01, device=DEVICE).half()
    found = kernels.product(x, matrix.t(), normed=(weight, 1e-5))
    torch.testing.assert_close(found, torch.full((1, 32), 3.84, device=DEVICE).half(), rtol=1e-2, atol=0)


def test_few_rows_in_half_precision_go_through_thin_products(monkeypatch):
    """Their logits pass the check that every capture must pass."""
    monkeypatch.setattr(lean, "_sideways", lambda weight: weight.t())  # the layout that matrices have on a GPU
    used = []
    right = kernels.thin
    monkeypatch.setattr(kernels, "thin", lambda *args, **how: used.append(how) or right(*args, **how))
    m = forerun.load("tiny:qwen2", device=str(DEVICE), dtype="float16", lanes=1, max_context=64, graphs=True)
    m.generate([3, 4, 5], method="ar", max_tokens=4, ignore_eos=True)
    assert len(m.host.runner.captured) == 1 and any(how["gated"] for how in used) and any(how["onto"] is not None for how in used)


def test_what_cannot_be_captured_runs_plainly():
    for arch in ("gpt_neo", "xlnet"):
        m = forerun.load(f"tiny:{arch}", lanes=1, graphs=True)
        assert not m.host.runner.captures
    assert not forerun.load("tiny:llama", dtype="float64", graphs=True).host.runner.captures
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not forerun.load("tiny:llama", device="cpu").host.runner.captures


def test_old_captures_make_room(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    m = forerun.load("tiny:llama", device=str(DEVICE), lanes=1, max_context=64, graphs=True)

    def twice(*sizes):
        for rows in sizes:
            plan = Causal.after(np.arange(rows, dtype=np.int32), [()])
            for _ in range(2):
                m.host.runner.forward(Batch([(0, plan, 0)], m.host.room, DEVICE))
        return [size.rows for size in m.host.runner.captured]

    assert twice(1, 3, 9, 1) == [16, 1]
    monkeypatch.setattr(graphs, "MOST_BYTES", 1)
    assert twice(3) == [4]


def test_tiny_names():
    assert {arch for arch, _, _ in CASES} <= {*tiny.ARCHITECTURES, *tiny.BLOCK, *tiny.MASKED}
