"""C++ on a CPU: what torch computes with the same weights, and the same bits in any company."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import forerun
from forerun.backbones import native, products
from forerun.backbones.blocks import KINDS as IN_BLOCKS
from forerun.backbones.blocks import Blocks
from forerun.backbones.lean import LeanBackbone
from forerun.backbones.native import rounds, structures
from forerun.backbones.quantised import Quantised
from forerun.checkpoints import tiny
from forerun.engine.pack import Batch
from forerun.sequence.rows import Plan, causal_rows
from tests.backbones.test_products import CPU, TEXT, loaded, logits_in_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def compiled(folder, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(folder))
    native.compiled_in.cache_clear()
    if "no C++ compiler" in native.compiled().words:
        pytest.skip("no C++ compiler here")
    assert native.library() is not None, native.compiled().words
    yield
    native.compiled_in.cache_clear()


KINDS = ["int4", "int8", None]


@pytest.mark.parametrize("bits,most", [("int4", 0.15), ("int8", 0.015), (None, 1e-6)])
@pytest.mark.parametrize("outputs,inputs", [(4, 32), (49, 64), (30, 576)])
def test_products_are_near_what_their_weights_say(bits, most, outputs, inputs):
    torch.manual_seed(0)
    weight_OI = torch.randn(outputs, inputs)
    bias = torch.randn(outputs)
    x_TI = torch.randn(13, inputs)
    product = native.native_product(weight_OI, bias, bits)
    expected = x_TI @ weight_OI.t() + bias
    assert (product(x_TI) - expected).norm() / expected.norm() < most
    assert products.keeps_bits(product, inputs)


def in_groups(product, outputs, inputs):
    """Codes, scales and what a code of 0 stands for of a product of 4 bits, by output and group."""
    side = product.functions.side()
    blocks = product._blocks.view(-1, inputs // 32, 20 * side)[:, :, None]
    lower, upper = blocks[..., : 16 * side] & 15, blocks[..., : 16 * side] >> 4
    codes = torch.cat([half.unflatten(-1, (4, side, 4)) for half in (lower, upper)], -3)
    codes = codes[:, :, 0].permute(0, 3, 1, 2, 4).reshape(-1, inputs // 32, 32)
    numbers = blocks[:, :, 0, 16 * side :].contiguous().view(torch.bfloat16).float()
    scales, lowest = numbers.unflatten(-1, (2, side)).permute(2, 0, 3, 1).flatten(1, 2)
    return codes[:outputs].float(), scales[:outputs, :, None], lowest[:outputs, :, None]


@pytest.mark.parametrize("outputs,inputs", [(4, 32), (49, 64), (30, 576)])
def test_codes_are_the_nearest_of_their_grid_and_of_the_nearer_grid(outputs, inputs):
    weight_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    product = native.native_product(weight_OI, None, "int4")
    codes, step, lowest = in_groups(product, outputs, inputs)
    w = weight_OI.unflatten(1, (-1, 32))
    places = ((w - lowest) / step).clamp(0, 15)
    assert ((codes - places).abs() <= 0.51 + (lowest / step).abs() * 2**-8).all()
    low, high = w.aminmax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    errors = []
    for apart, first in (((high - low) / 15, low), (largest / -8, largest)):
        apart = apart.bfloat16().float()
        near = ((w - first) / apart).round().clamp(0, 15) * apart + first
        errors.append((near - w).square().sum(-1))
    best = torch.minimum(*errors)
    error = (codes * step + lowest - w).square().sum(-1)
    assert (error <= 1.1 * best + 1e-3).all()


def test_8_bits_and_floats_lie_as_their_definition_says():
    weight_OI = torch.randn(49, 96, generator=torch.Generator().manual_seed(2))
    product = native.native_product(weight_OI, None, "int8")
    codes = products.quantised(weight_OI, products.BYTE, products.GROUP)
    blocks = native._blocks(codes, None, 8, product.functions.side())
    assert torch.equal(product._blocks.flatten(), blocks.flatten())
    strips = native.native_product(weight_OI, None, None)._blocks.view(torch.float32)
    strips = strips.view(-1, 96, 16).transpose(1, 2).reshape(-1, 96)
    assert torch.equal(strips[:49], weight_OI) and not strips[49:].any()


def in_random_blocks(kind, outputs, groups):
    """Blocks of every number in half precision: of all sizes, too small for a float's own among
    them, and zeros of both signs."""
    size = IN_BLOCKS[kind].size
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.integers(0, 256, (outputs, groups * size), np.uint8))
    halves = rows.view(-1, size).view(torch.int16)
    for at in IN_BLOCKS[kind].halves:
        halves[:, at // 2] &= ~0x4000
        halves[::3, at // 2] &= ~0x7C00
        halves[::7, at // 2] &= ~0x7FFF
    return Blocks(kind, rows)


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("outputs,groups", [(49, 2), (5, 1), (16, 3)])
@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_blocks_of_a_file_become_what_their_values_would(
    kind, outputs, groups, flushed, monkeypatch
):
    """Bit for bit, in parts or at once, also where a processor takes the smallest floats as 0."""
    weight = in_random_blocks(kind, outputs, groups)
    inputs = groups * IN_BLOCKS[kind].values
    assert weight.is_finite() and weight.shape == (outputs, inputs)
    values = weight.widened()
    packed = {bits: native.native_product(values, None, bits)._blocks for bits in KINDS}
    torch.set_flush_denormal(flushed)
    try:
        for most in (native.WEIGHTS_AT_ONCE, 1000):
            monkeypatch.setattr(native, "WEIGHTS_AT_ONCE", most)
            assert same_bits(native.widened(weight), values)
            for bits in KINDS:
                found = native.native_product(weight, None, bits)._blocks
                assert torch.equal(found, packed[bits])
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", IN_BLOCKS)
def test_blocks_with_a_number_that_is_none_say_so(kind):
    for at in IN_BLOCKS[kind].halves:
        weight = in_random_blocks(kind, 20, 1)
        weight.rows_OB.view(-1, IN_BLOCKS[kind].size).view(torch.int16)[17, at // 2] |= 0x7C00
        assert not weight.is_finite()


def test_codes_and_offsets_of_a_checkpoint_are_kept():
    torch.manual_seed(0)
    codes_OI = torch.randint(-8, 8, (12, 128), dtype=torch.int8)
    scales = (torch.rand(12, 2) + 0.5).bfloat16()
    zeros = torch.randint(-8, 8, (12, 2)).float()
    matrix = Quantised("int4", codes_OI, scales, zeros)
    x_TI = torch.randn(3, 128)
    expected = x_TI @ matrix.widened().t()
    found = native.native_product_of(matrix, None)(x_TI)
    assert (found - expected).norm() / expected.norm() < 0.01


def built_for(processor, *instructions):
    """Flags for another processor, where this one has its instructions."""
    cpu = Path("/proc/cpuinfo")
    has_all = cpu.exists() and {*instructions} <= set(cpu.read_text().split())
    here = pytest.mark.skipif(not has_all, reason=f"no {instructions} here")
    return pytest.param([f"-march={processor}"], marks=here, id=processor)


OTHERS = [
    pytest.param([], id="any"),
    built_for("haswell", "avx2", "fma"),
    built_for("skylake-avx512", "avx512f", "avx512bw"),
    built_for("cascadelake", "avx512f", "avx512bw", "avx512_vnni"),
]


@pytest.mark.parametrize("flags", OTHERS)
def test_code_for_other_processors_gives_the_bits_of_this_ones(flags, monkeypatch, tmp_path):
    torch.manual_seed(0)
    weight_OI, x_TI = torch.randn(42, 96), torch.randn(13, 96)
    own = [native.native_product(weight_OI, None, bits)(x_TI) for bits in KINDS]
    others = [flag for flag in native.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(native, "FLAGS", [*others, *flags])
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    native.compiled_in.cache_clear()
    other = [native.native_product(weight_OI, None, bits)(x_TI) for bits in KINDS]
    assert all(map(torch.equal, own, other))


def test_structures_have_the_sizes_that_they_have_in_cpp():
    functions = native.library()
    of_model, of_rounds = np.zeros(6, np.int64), np.zeros(3, np.int64)
    functions.model_sizes(ctypes.c_void_p(of_model.ctypes.data))
    functions.round_sizes(ctypes.c_void_p(of_rounds.ctypes.data))
    models = ("Matrix", "Layer", "Model", "Rows", "Fusion", "Context")
    in_python = [ctypes.sizeof(getattr(structures, f"{name}Fields")) for name in models]
    assert of_model.tolist() == in_python
    both = (structures.LookingDrafterFields, rounds.RunnerFields, rounds.RoundsFields)
    assert of_rounds.tolist() == [ctypes.sizeof(each) for each in both]
    assert functions.texts_size() == ctypes.sizeof(structures.TextsFields)


def test_who_asks_while_it_is_compiled_waits_for_it(monkeypatch, tmp_path):
    compiled = []
    compile_it = native._compile
    monkeypatch.setattr(native, "_compile", lambda file: compiled.append(compile_it(file)))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    native.begin_compiling(torch.bfloat16, None)  # which does not need it
    assert not compiled
    native.begin_compiling(torch.float32, None)
    assert native.library() is not None
    assert native.library() is native.library() and len(compiled) == 1


def test_what_is_compiled_ahead_is_loaded_by_whoever_needs_it(monkeypatch, tmp_path):
    """A program that ends stops its threads wherever they are: one in torch would take it down."""
    tried = []
    monkeypatch.setattr(native, "_is_right", lambda functions: tried.append(functions) or True)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    native.compiled_in.cache_clear()
    before = set(threading.enumerate())
    native.begin_compiling(torch.float32, None)
    for one in set(threading.enumerate()) - before:
        one.join()
    assert list(tmp_path.rglob("*.so")) and not tried
    assert native.library() is not None and tried


def test_a_program_that_ends_meanwhile_ends_as_it_should(tmp_path, folder):
    """Its checkpoint is not there, say: with an empty cache, and with one that has it."""
    for cache in (tmp_path, folder):
        done = subprocess.run(
            [sys.executable, "-c", "import forerun; forerun.load('/no/such')"],
            env={**os.environ, "FORERUN_CACHE": str(cache)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and "no directory" in done.stderr, done.stderr


@pytest.fixture
def threads():
    """Sets how many threads products have."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("bits", KINDS)
def test_any_number_of_threads_gives_the_same_bits(bits, threads):
    torch.manual_seed(0)
    product = native.native_product(torch.randn(99, 64), None, bits)
    x_TI = torch.randn(5, 64)
    found = []
    for count in (1, 2, 5, 3, 2, 1):
        threads(count)
        found.append(product(x_TI))
    assert all(torch.equal(one, found[0]) for one in found)


def test_who_asks_while_others_are_helped_gets_the_same_bits(threads):
    threads(3)
    torch.manual_seed(0)
    product = native.native_product(torch.randn(99, 64), None, None)
    x_TI = torch.randn(5, 64)
    expected = product(x_TI)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(product, [x_TI] * 400))
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_process_that_was_forked_off_has_helpers_of_its_own(threads):
    threads(2)
    product = native.native_product(torch.eye(64), None, None)
    x_TI = torch.randn(5, 64)
    product(x_TI)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # whoever waits for threads that are not there waits for ever
        os._exit(0 if torch.equal(product(x_TI), x_TI) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_does_not_fit_is_left_to_torch():
    for bits in KINDS:
        assert native.native_product(torch.randn(8, 48), None, bits) is None
    assert not native.NativeShape(2, 2, 6, 1e-6).fits
    half = tiny.build("qwen2", dtype=torch.bfloat16)
    assert isinstance(LeanBackbone(half, 64, 128).head, torch.Tensor)


@torch.inference_mode()
def test_a_model_whose_groups_do_not_fit_runs_in_torch():
    shape = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    narrow = loaded(None, **shape).backbone
    assert narrow._native is None
    plain = LeanBackbone(tiny.build("qwen2", **shape), narrow.vocab, 128, as_tensors=True)
    assert isinstance(plain.head, torch.Tensor)
    expected = logits_in_steps(plain, [40, 1, 8, 3])
    assert torch.allclose(logits_in_steps(narrow, [40, 1, 8, 3]), expected, atol=1e-4)


@pytest.mark.parametrize("quantize", ["int8", None])
@torch.inference_mode()
def test_features_are_torchs_own(quantize):
    """Of a layer in the middle and of the last one, for rows that are read and others."""
    backbone = loaded(quantize).backbone
    last = backbone.layers - 1
    kept = []
    for native_forward in (backbone._native, None):
        backbone._native = native_forward
        slots = backbone.make_slots(1, 128)
        for layers in ([0], [0, last]):  # the second are added later
            slots.add_features(layers, backbone.hidden_size)
            plan = Plan(causal_rows(TEXT[:20]), [np.array([3, 19])], 20, causal=20)
            logits = backbone.forward(Batch([(0, plan, 0)], 128, CPU), slots)
        kept.append([logits, *(slots.features[layer][:20] for layer in (0, last))])
    for found, expected in zip(*kept):
        assert expected.norm() > 0
        assert (found - expected).norm() / expected.norm() < (0.02 if quantize else 1e-5)


SHAPES = [
    ("llama", {}),
    ("qwen2", {"num_key_value_heads": 4}),  # biases
    ("qwen3", {"head_dim": 32}),  # norms of heads
    ("llama", {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}),
    ("llama", {"hidden_size": 192, "num_attention_heads": 6, "head_dim": 128}),  # three share keys
]


@pytest.mark.parametrize("arch,shape", SHAPES)
@pytest.mark.parametrize("quantize", KINDS)
@torch.inference_mode()
def test_a_forward_is_torchs_own_with_the_same_products(arch, shape, quantize):
    backbone = loaded(quantize, arch, **shape).backbone
    assert backbone._native is not None
    found = logits_in_steps(backbone, [40, 1, 8, 3])
    backbone._native = None
    expected = logits_in_steps(backbone, [40, 1, 8, 3])
    # a number near the middle of two codes may become the other one
    most = 0.02 if quantize else 1e-5
    assert (found - expected).norm() / expected.norm() < most


@pytest.mark.parametrize("arch,shape", SHAPES)
@pytest.mark.parametrize("quantize", KINDS)
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(arch, shape, quantize):
    backbone = loaded(quantize, arch, **shape).backbone
    alone = logits_in_steps(backbone, [1] * 70)  # a page, and some of the next
    for sizes in ([2] * 35, [7] * 10, [16] * 4 + [6], [70], [1, 11, 30, 28], [3, 15, 52]):
        assert torch.equal(logits_in_steps(backbone, sizes), alone), sizes


@torch.inference_mode()
def test_a_tail_sees_its_own_rows_and_those_before_it():
    """Two tails after ten rows of text, each judged as if it were the text."""
    backbone = loaded("int4").backbone
    tails = ([5, 6, 7], [8, 9])
    rows = causal_rows(np.concatenate([TEXT[:10], *tails]))
    first = 10
    for tail in tails:
        end = first + len(tail)
        rows[1, first:end] = 10 + np.arange(len(tail))
        rows[2, first:end] = 10
        rows[3, first:end] = first
        rows[4, first:end] = first + 1 + np.arange(len(tail))
        first = end
    plan = Plan(rows, [np.arange(10, 15), np.array([9, 9, 12])], 15)  # some are read again
    slots = backbone.make_slots(1, 128)
    found = backbone.forward(Batch([(0, plan, 0)], 128, CPU), slots)
    assert len(found) == 8
    for reads, tail in ((slice(0, 3), tails[0]), (slice(3, 5), tails[1])):
        text = np.concatenate([TEXT[:10], tail])
        own = Plan(causal_rows(text), [np.arange(10, len(text))], len(text), causal=len(text))
        alone = backbone.forward(Batch([(0, own, 0)], 128, CPU), backbone.make_slots(1, 128))
        assert torch.equal(found[reads], alone)
    assert torch.equal(found[5], found[6]) and torch.equal(found[7], found[2])


@torch.inference_mode()
def test_more_reads_than_rows():
    backbone = loaded("int4").backbone
    plan = Plan(causal_rows(TEXT[:3]), [np.array([2] * 40), np.array([0])], 3, causal=3)
    found = backbone.forward(Batch([(0, plan, 0)], 128, CPU), backbone.make_slots(1, 128))
    assert len(found) == 41 and torch.equal(found[0], found[39])
    assert not torch.equal(found[0], found[40])


def test_what_is_no_number_harms_nobody_else():
    with loaded("int4") as m:
        prompts = [[5, 6, 7], [9] * 20]
        expected = [r.token_ids for r in m.generate(prompts, max_tokens=6, ignore_eos=True)]
        m.host.forget()
        for layer in range(m.backbone.layers):
            for kept in m.host.slots.flat(layer):
                kept.fill_(torch.nan)
        found = m.generate(prompts, max_tokens=6, ignore_eos=True)
        assert [r.token_ids for r in found] == expected


@torch.inference_mode()
def test_a_weight_that_is_no_number_shows():
    backbone = loaded("int4").backbone
    backbone.embed[TEXT[5]] = torch.nan
    found = logits_in_steps(backbone, [8])
    assert found[:5].isfinite().all() and found[5:].isnan().all()


@pytest.mark.parametrize("quantize", KINDS)
def test_exact_methods_write_what_ar_writes(quantize):
    with loaded(quantize) as model:
        prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8], [9, 9, 9]]
        plain = [model.generate(p, max_tokens=24, ignore_eos=True).token_ids for p in prompts]
        options = {"speculative": {"draft": loaded("int8")}}
        for method in ("lookup", "jacobi", "ar", "speculative"):
            own = options.get(method, {})
            results = model.generate(prompts, max_tokens=24, ignore_eos=True, method=method, **own)
            assert [result.token_ids for result in results] == plain, method


def test_a_draft_model_that_is_named_is_kept_in_8_bits_where_that_changes_no_text():
    model = loaded(None)
    how = {"max_tokens": 16, "ignore_eos": True, "method": "speculative", "draft": "tiny:llama:7"}
    plain = model.generate([1, 2, 3], method="ar", max_tokens=16, ignore_eos=True).token_ids
    assert model.generate([1, 2, 3], **how).token_ids == plain
    assert bits_of_drafts(model) == ["int8"] and model.backbone.quantize is None
    sampled = model.generate([1, 2, 3], temperature=1.0, seed=4, **how).token_ids
    assert bits_of_drafts(model) == ["int8", None]
    as_it_is = {**how, "draft": forerun.load("tiny:llama:7")}
    fresh = loaded(None)
    assert fresh.generate([1, 2, 3], temperature=1.0, seed=4, **as_it_is).token_ids == sampled
    few_bits = loaded("int4")
    few_bits.generate([1, 2, 3], **how)
    assert bits_of_drafts(few_bits) == ["int4"]


def test_a_draft_model_that_cannot_be_quantised_is_one_for_all():
    model = loaded(None)
    for temperature in (0.0, 1.0):
        how = dict(method="speculative", draft="tiny:gpt2:3", temperature=temperature)
        model.generate([1, 2, 3], max_tokens=4, **how)
    assert len(model._draft_hosts) == 1 and len(model.engine.hosts) == 2


def bits_of_drafts(model):
    return [draft.backbone.quantize for draft in model._draft_hosts]


def test_what_a_process_left_that_ended_while_it_compiled_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    native.compiled_in.cache_clear()
    old, new = tmp_path / "native" / "tmpold", tmp_path / "native" / "tmpnew"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "half.so").touch()
    os.utime(old, (0, 0))
    assert native.library() is not None
    assert not old.exists() and new.exists(), "the new one may be another's that compiles now"


class TestWithout:
    """Without a compiler, or with one that does not work, torch's own operations serve."""

    def absent(self, monkeypatch, folder, why):
        monkeypatch.setenv("FORERUN_CACHE", str(folder))
        native.compiled_in.cache_clear()
        assert native.library() is None
        assert why in native.compiled().words
        assert loaded("int4").backbone._native is None

    def test_nothing_is_kept(self, monkeypatch):
        self.absent(monkeypatch, "off", "keeps nothing")

    def test_no_compiler(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", str(tmp_path / "none"))
        self.absent(monkeypatch, tmp_path, "no C++ compiler")

    def test_a_compiler_that_fails(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", "false")
        self.absent(monkeypatch, tmp_path, "does not compile")
        assert not list(tmp_path.rglob("*.so"))

    def test_a_compiler_that_does_not_know_a_flag(self, monkeypatch, tmp_path):
        strict = tmp_path / "strict"
        strict.write_text(
            f'#!/bin/sh\ncase "$*" in *-loops*) exit 1;; esac\nexec {shutil.which("c++")} "$@"\n'
        )
        strict.chmod(0o755)
        monkeypatch.setenv("CXX", str(strict))
        monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
        native.compiled_in.cache_clear()
        assert native.library() is not None

    def test_a_file_that_is_no_library(self, monkeypatch, tmp_path):
        monkeypatch.setattr(native, "_compile", lambda file: file.write_bytes(b"nothing"))
        (tmp_path / "native").mkdir()
        self.absent(monkeypatch, tmp_path, "not compiled")

    def test_products_that_are_wrong(self, monkeypatch, tmp_path):
        sources = tmp_path / "wrong"
        shutil.copytree(native.SOURCES, sources)
        forward = sources / "forward.cpp"
        forward.write_text(forward.read_text().replace("127.0f / most", "120.0f / most"))
        monkeypatch.setattr(native, "SOURCES", sources)
        self.absent(monkeypatch, tmp_path, "multiplies wrongly")


def test_engines_that_share_weights_do_not_meet():
    """Each runs forwards in a thread of its own, at the same time."""
    model = loaded(None)
    prompts = [list(range(3, 3 + 7 * n)) for n in (1, 2, 3, 4)]
    how = {"method": "lookup", "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    alone = [model.generate(prompt, **how).token_ids for prompt in prompts]
    twins = [model.twin() for _ in prompts]
    with ThreadPoolExecutor(len(twins)) as pool:
        for _ in range(10):
            jobs = [pool.submit(t.generate, p, **how) for t, p in zip(twins, prompts)]
            assert [job.result().token_ids for job in jobs] == alone
