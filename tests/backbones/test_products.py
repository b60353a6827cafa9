"""Products on a CPU: near the original, the same bits in any company, chosen by measuring."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import forerun
from forerun.backbones import measure, products
from forerun.backbones.threads import (
    FAR_LONGER,
    FEW_TRIED,
    FIRST_PAUSE,
    STRIKES,
    TRIED,
    ThreadChoice,
)
from forerun.checkpoints import tiny
from forerun.engine.pack import Batch
from forerun.errors import BadOption, NotAble
from forerun.sequence.rows import Plan, causal_rows

CPU = torch.device("cpu")
TEXT = np.array([(7 * i + 3) % 200 for i in range(70)])
MAKERS = [make for kinds in products.KINDS.values() for make in kinds.values()]


def loaded(quantize, arch="qwen2", **shape):
    return forerun.from_network(
        tiny.build(arch, **shape), tiny.tokenizer(), lanes=4, max_context=128, quantize=quantize
    )


def logits_in_steps(backbone, sizes):
    """Logits of all rows of a text, run in steps of so many rows."""
    slots = backbone.make_slots(1, 128)
    found = []
    start = 0
    for size in sizes:
        end = start + size
        plan = Plan(causal_rows(TEXT[:end]), [np.arange(start, end)], end, causal=end)
        found.append(backbone.forward(Batch([(0, plan, start)], 128, CPU), slots))
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("key_heads", [2, 4])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(quantize, key_heads):
    backbone = loaded(quantize, num_key_value_heads=key_heads).backbone
    alone = logits_in_steps(backbone, [1] * 64)
    for sizes in ([2] * 32, [8] * 8, [16] * 4, [32, 32], [64], [1, 7, 30, 26]):
        assert torch.equal(logits_in_steps(backbone, sizes), alone), sizes


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_exact_methods_write_what_ar_writes_on_quantised_weights(quantize):
    with loaded(quantize) as model:
        prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8], [9, 9, 9]]
        plain = [model.generate(p, max_tokens=24, ignore_eos=True).token_ids for p in prompts]
        for method in ("lookup", "jacobi", "ar"):
            results = model.generate(prompts, max_tokens=24, ignore_eos=True, method=method)
            assert [result.token_ids for result in results] == plain, method
        drafted = model.generate(
            prompts, max_tokens=24, ignore_eos=True, method="speculative", draft=loaded("int8")
        )
        assert [result.token_ids for result in drafted] == plain


@pytest.mark.parametrize("quantize,most", [("int8", 0.1), ("int4", 0.6)])
@torch.inference_mode()
def test_a_quantised_model_is_near_the_original(quantize, most):
    whole = logits_in_steps(loaded(None).backbone, [64])
    error = (logits_in_steps(loaded(quantize).backbone, [64]) - whole).norm() / whole.norm()
    assert error < most
    assert error > 0  # it is a model of its own


@pytest.mark.parametrize("make", MAKERS)
def test_products_are_near_what_their_weights_say_and_add_their_bias(make):
    torch.manual_seed(0)
    weight_OI = torch.randn(48, 64)
    bias = torch.randn(48)
    x_TI = torch.randn(5, 64)
    expected = x_TI @ weight_OI.t() + bias
    if not products.has_room(make):
        pytest.skip("its sums overflow on this processor, so it is not taken")
    error = (make(weight_OI, bias)(x_TI) - expected).norm() / expected.norm()
    bits = 4 if make in (products.Int4Product, products.widened_4) else 8
    assert error < (0.15 if bits == 4 else 0.02)
    if make not in (products.widened_4, products.widened_8):
        assert products.keeps_bits(make(weight_OI, bias), 64)


def test_a_product_that_looks_at_the_rows_beside_it_is_found_out():
    weight_OI = torch.randn(48, 64)

    def by_the_largest_of_all_rows(x_TI):
        scale = x_TI.abs().max() / 127
        return (x_TI / scale).round() * scale @ weight_OI.t()

    assert not products.keeps_bits(by_the_largest_of_all_rows, 64)


def test_a_product_whose_sums_overflow_is_not_taken(tmp_path):
    class Overflowing(products.WidenedProduct):
        def multiply(self, x_TI):
            return super().multiply(x_TI).clamp_(max=40.0)

    assert all(map(products.has_room, (products.Int4Product, products.Int8ByNibbles)))
    assert not products.has_room(Overflowing)
    kinds = {"overflowing": Overflowing, "nibbles": products.Int8ByNibbles}
    assert measure.Table(tmp_path).fastest("int8", (256, 256), kinds) == "nibbles"


def test_weights_on_a_grid_of_blocks_stay_on_it():
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (16, 64))
    codes[:, ::32] = -8  # the largest of each block stands for the lowest number
    scales = torch.rand(16, 2).add(0.5).bfloat16().float()
    weight_OI = products.Codes(codes.to(torch.int8), scales).widened()
    found = products.quantised(weight_OI, products.NIBBLE, 32)
    assert torch.equal(found.widened(), weight_OI)
    zero = products.quantised(torch.zeros(8, 64), products.NIBBLE, 32).widened()
    assert torch.equal(zero, torch.zeros(8, 64))


@pytest.mark.parametrize("inputs", [64, 576])
def test_weights_on_a_grid_with_offsets_are_kept(inputs):
    torch.manual_seed(0)
    weight_OI = on_a_grid(48, inputs)
    own = products.quantised_with_offsets(weight_OI)
    assert (own.widened() - weight_OI).norm() / weight_OI.norm() < 4e-3
    x_TI = torch.randn(8, inputs)
    expected = x_TI @ weight_OI.t()
    product = products.Int4Product(weight_OI)
    assert (product(x_TI) - expected).norm() / expected.norm() < 0.03
    assert products.keeps_bits(product, inputs)


def on_a_grid(outputs, inputs):
    """Weights as a 4-bit file has them, with a lowest value for every group."""
    codes = torch.randint(0, 16, (outputs, inputs // 32, 32))
    codes[..., 0] = 0
    codes[..., 1] = 15
    scales = torch.rand(outputs, inputs // 32, 1) + 0.5
    lowest = 7 + torch.rand(outputs, inputs // 32, 1)
    return ((codes - lowest) * scales).flatten(1)


def test_a_large_weight_does_not_drown_the_offsets_and_inputs_of_others():
    """Qwen2.5-Coder-0.5B has such weights and such inputs."""
    torch.manual_seed(0)
    weight_OI = on_a_grid(64, 1024)
    weight_OI[:, 64:96] = 0.1 * torch.randn(64, 32)
    weight_OI[:, 70] = 400.0  # the rest of its group is nothing beside it
    weight_OI[:, 288:320] += 30.0  # a group far from zero
    x_TI = torch.randn(16, 1024)
    x_TI[:, 70] *= 0.01
    product = products.Int4Product(weight_OI)
    assert product.layout.groups  # it keeps the grid
    expected = x_TI @ products.quantised_with_offsets(weight_OI).widened().t()
    assert (product(x_TI) - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("quantize", ["int8", "int4", None])
@pytest.mark.parametrize("arch,key_heads", [("qwen2", 2), ("qwen3", 4), ("llama", 4)])
@torch.inference_mode()
def test_sequences_side_by_side_give_what_each_gives_alone(quantize, arch, key_heads):
    """Whether they attend in one call (equally many rows) or one after the other."""
    backbone = loaded(quantize, arch, num_key_value_heads=key_heads).backbone
    slots = backbone.make_slots(4, 128)
    for rows, ends in ((1, (20, 33, 34, 40)), (3, (30, 40, 50, 60)), (1, (9, 40, 100, 20))):
        work = []
        alone = []
        for lane, end in enumerate(ends):
            tokens = (TEXT.repeat(2) * (lane + 1) % 200)[:end]
            for first, last in ((0, end - rows), (end - rows, end)):
                reads = [np.arange(first, last)]
                plan = Plan(causal_rows(tokens[:last]), reads, last, causal=last)
                logits = backbone.forward(Batch([(lane, plan, first)], slots.table, CPU), slots)
            alone.append(logits)
            work.append((lane, plan, end - rows))
        together = backbone.forward(Batch(work, slots.table, CPU), slots)
        if quantize:
            assert torch.equal(together, torch.cat(alone)), (rows, ends)
        else:
            torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_layer_takes_few_operations_at_one_row(arch):
    """At one row each costs a tenth of a product, so that none may creep in."""
    # four heads that share keys: fewer are filled up on some processors
    backbone = loaded("int4", arch, num_key_value_heads=1).backbone
    slots = backbone.make_slots(1, 128)
    plan = Plan(causal_rows(TEXT[:20]), [np.array([19])], 20, causal=20)
    backbone.forward(Batch([(0, plan, 0)], 128, CPU), slots)

    def operations(layers):
        backbone._on_cpu._layers = layers
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            backbone.forward(Batch([(0, plan, 19)], 128, CPU), slots)
        outer = [event for event in profile.events() if event.cpu_parent is None]
        return len(outer)

    layers = list(backbone._on_cpu._layers)
    each = operations(layers) - operations(layers[:1])
    assert each <= (42 if arch == "qwen3" else 30) * (len(layers) - 1)


class TestTable:
    KINDS = measure.LAYOUTS

    def fastest(self, folder):
        return measure.Table(folder).fastest("float32", (64, 32), self.KINDS)

    def test_what_was_measured_is_kept_and_taken(self, tmp_path):
        assert self.fastest(tmp_path) in self.KINDS
        file = tmp_path / "products.json"
        kept = json.loads(file.read_text())
        (times,) = kept["times"].values()
        for kind, rows in times.items():
            times[kind] = dict.fromkeys(rows, 1.0 if kind == "by inputs" else 9.0)
        file.write_text(json.dumps(kept))
        assert self.fastest(tmp_path) == "by inputs"
        for kind, rows in times.items():
            times[kind] = dict.fromkeys(rows, 9.0 if kind == "by inputs" else 1.0)
        file.write_text(json.dumps(kept))
        assert self.fastest(tmp_path) == "by outputs"

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", '{"machine": "another", "times": {}}', '{"machine": 3, "times": 7}'],
    )
    def test_a_bad_or_foreign_file_is_measured_again(self, text, tmp_path):
        (tmp_path / "products.json").write_text(text)
        assert self.fastest(tmp_path) in self.KINDS
        assert json.loads((tmp_path / "products.json").read_text())["machine"] == measure.machine()

    def test_a_file_with_other_values_is_measured_again(self, tmp_path):
        times = {"float32 64x32": {"by inputs": {"1": "fast"}}}
        file = tmp_path / "products.json"
        file.write_text(json.dumps({"machine": measure.machine(), "times": times}))
        assert self.fastest(tmp_path) in self.KINDS
        assert json.loads(file.read_text())["times"] != times

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path):
        (tmp_path / "file").write_text("no folder")
        assert self.fastest(tmp_path / "file") in self.KINDS

    def test_bits_are_given_up_only_for_much_speed(self, tmp_path):
        table = measure.Table(tmp_path)
        for slower, kind in ((8.0, "int4"), (12.0, "widened")):
            rows = {str(n): 1.0 for n in measure.ROWS}
            table.times["int4 64x64"] = {
                "int4": {n: slower * t for n, t in rows.items()},
                "widened": rows,
            }
            assert table.fastest("int4", (64, 64), products.KINDS["int4"]) == kind

    @pytest.mark.parametrize("quantize", ["int8", "int4"])
    def test_a_small_matrix_keeps_its_bits_whatever_a_noisy_machine_measured(
        self, quantize, tmp_path
    ):
        table = measure.Table(tmp_path)
        table.times[f"{quantize} 64x64"] = {"widened": {str(n): 1e-9 for n in measure.ROWS}}
        kind, product = measure.product_for(torch.randn(64, 64), None, quantize, table)
        assert kind != "widened"
        assert products.keeps_bits(product, 64)

    def test_a_kind_that_does_not_run_here_is_left_out(self, tmp_path):
        def broken(weight_OI, bias):
            raise RuntimeError("no such operation")

        kinds = {"broken": broken, **products.KINDS["int4"]}
        assert measure.Table(tmp_path).fastest("int4", (64, 64), kinds) == "int4"


class TestThreads:
    def choice(self, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        self.now = 0.0
        return ThreadChoice(clock=lambda: self.now)

    def forward(self, choice, seconds, rows=1):
        """A forward that takes so long with one thread, and so long with two."""
        used = choice.threads(rows)

        def run():
            self.now += seconds[used - 1]
            return torch.zeros(1)

        choice.run(rows, run)
        return used

    def test_a_busy_neighbour_leaves_one_thread_until_it_is_gone(self, monkeypatch):
        choice = self.choice(monkeypatch)
        calm = (0.015, 0.010)
        busy = (0.020, 0.010 * FAR_LONGER * 2)
        used = [self.forward(choice, calm) for _ in range(40)]
        assert used.count(1) == TRIED
        assert used[-1] == 2
        for _ in range(STRIKES + 2 * FEW_TRIED):
            self.forward(choice, busy)
        assert choice.threads(1) == 1
        until = self.now + 3 * FIRST_PAUSE
        used = []
        while self.now < until:
            used.append(self.forward(choice, busy))
        assert used.count(2) <= 4  # now and then it looks
        while self.now < until + 20 * FIRST_PAUSE:
            used.append(self.forward(choice, calm))
        assert used[-200:].count(1) <= 2 * TRIED

    def test_a_neighbour_that_was_there_first_is_noticed(self, monkeypatch):
        choice = self.choice(monkeypatch)
        used = [self.forward(choice, (0.020, 0.2)) for _ in range(40)]
        assert used.count(2) <= STRIKES + FEW_TRIED

    def test_slow_first_forwards_do_not_leave_one_thread(self, monkeypatch):
        choice = self.choice(monkeypatch)
        for _ in range(STRIKES):
            self.forward(choice, (0.030, 0.030))  # pages and caches are cold
        used = [self.forward(choice, (0.019, 0.010)) for _ in range(40)]
        assert used.count(1) == TRIED and used[-1] == 2

    def test_one_disturbed_forward_does_not_end_a_trial(self, monkeypatch):
        choice = self.choice(monkeypatch)
        for _ in range(STRIKES + 2 * TRIED):
            self.forward(choice, (0.010, 0.012))
        assert choice.threads(1) == 1
        self.now += FIRST_PAUSE
        self.forward(choice, (0.020, 0.010))  # two threads are faster by now
        self.forward(choice, (0.020, 0.050))  # and disturbed once
        used = [self.forward(choice, (0.020, 0.010)) for _ in range(2 * TRIED)]
        assert used[-1] == 2 == choice.threads(1)

    def test_each_kind_of_forward_has_its_own_threads(self, monkeypatch):
        choice = self.choice(monkeypatch)
        used = []
        for _ in range(30):
            used.append(self.forward(choice, (0.001, 0.002)))
            assert self.forward(choice, (0.4, 0.2), rows=128) == 2
        assert used.count(1) > 15

    def test_a_prompt_is_no_place_for_trials(self, monkeypatch):
        choice = self.choice(monkeypatch)
        used = [self.forward(choice, (2.0, 1.0), rows=128) for _ in range(40)]
        assert used.count(1) == 0
        for _ in range(STRIKES + TRIED):  # unless something is wrong
            self.forward(choice, (2.0, 1.0 * FAR_LONGER * 2), rows=128)
        assert choice.threads(128) == 1

    def test_one_slow_forward_changes_nothing(self, monkeypatch):
        choice = self.choice(monkeypatch)
        used = [
            self.forward(choice, (0.015, 0.2 if turn % 10 == 9 else 0.010)) for turn in range(50)
        ]
        assert used.count(1) <= TRIED


def test_what_cannot_be_quantised_is_refused_by_name():
    with pytest.raises(BadOption, match="int8"):
        loaded("int3")
    with pytest.raises(NotAble, match="Llama shape"):
        loaded("int4", arch="gpt2")
    with pytest.raises(NotAble, match="is for a GPU"):
        loaded("fp8")
    with pytest.raises(NotAble, match="float32"):
        forerun.load("tiny", dtype="bfloat16", quantize="int8")


def test_another_folder_has_another_table(monkeypatch, tmp_path):
    """Or models that nothing is kept for would take what was measured for others."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    kept = measure.this_machine()
    monkeypatch.setenv("FORERUN_CACHE", "off")
    assert measure.this_machine() is not kept
    assert measure.this_machine().fastest("int8", (1536, 64), products.KINDS["int8"]) == "nibbles"
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    assert measure.this_machine() is kept
