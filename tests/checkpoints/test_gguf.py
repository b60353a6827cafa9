"""GGUF files are read quickly, with the values that `transformers` reads, and kept."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import forerun
from forerun.backbones import blocks as block_kinds
from forerun.backbones.blocks import Blocks
from forerun.backbones.plain import KINDS as KINDS_OF_SHAPE
from forerun.backbones.rotary import rotations
from forerun.checkpoints import gguf as ours
from forerun.checkpoints import gguf_plain, resolve
from forerun.checkpoints.files import Source
from forerun.checkpoints.gguf_header import read_header
from forerun.checkpoints.tokenizers import _add_control_tokens, load_tokenizer
from forerun.errors import BadCheckpoint
from forerun.train import networks
from tests.backbones.test_products import logits_in_steps
from tests.checkpoints.gguf_files import write_gguf

gguf = pytest.importorskip("gguf")

KINDS = (*block_kinds.KINDS, "Q5_1", "F16")


@pytest.mark.parametrize("name", KINDS)
def test_blocks_are_widened_to_the_packages_own_bits(name, monkeypatch):
    monkeypatch.setattr(block_kinds, "VALUES_AT_ONCE", 1000)  # so that there are several parts
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 120, (40, 512 // values * size), np.uint8)
    expected = gguf.quants.dequantize(rows, kind)
    found = ours.widen(rows, kind)
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def load_state(path):
    loaded = resolve.load_network(str(path), torch.device("cpu"), torch.float32)
    return loaded, loaded.network.state_dict()


def write_theirs(path):
    """A file that is left to the library."""
    write_gguf(path, scaled=True)


def same_tokenizer(ours, theirs):
    return (
        ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        and ours.special_tokens_map == theirs.special_tokens_map
        and ours.chat_template == theirs.chat_template
        and ours.get_vocab() == theirs.get_vocab()
    )


@pytest.mark.parametrize("without", [" ", "output.weight"])
@pytest.mark.parametrize("arch", KINDS_OF_SHAPE)
def test_a_file_of_the_llama_shape_is_read_as_the_library_reads_it(arch, without, tmp_path):
    from transformers import AutoModelForCausalLM

    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch, without=without)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype="auto")
    ours = gguf_plain.read(path, None)
    assert ours is not None and ours.dtype == theirs.dtype
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (without != " ")
    said = {"head_dim": 64 // 4, **vars(theirs.config), "model_type": theirs.config.model_type}
    assert {name: said[name] for name in vars(ours.config)} == vars(ours.config)
    turns, their_turns = (
        rotations(network.model.rotary_emb, 512, torch.device("cpu")) for network in (ours, theirs)
    )
    assert all(torch.equal(*pair) for pair in zip(turns, their_turns))
    assert gguf_plain.read(path, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("arch", KINDS_OF_SHAPE)
def test_both_ways_to_read_a_file_give_one_text(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch)
    texts = []
    for read in (gguf_plain.read, lambda path, dtype, **_: None):
        monkeypatch.setattr(gguf_plain, "read", read)
        with forerun.load(str(path), lanes=1, max_context=64) as model:
            assert model.backbone.has_fixed_kernels or model.backbone.moves_rows
            texts.append(
                model.generate([1, 2, 3], max_tokens=20, temperature=1.0, seed=1).token_ids
            )
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("arch,blocks,without", [
    ("llama", "Q4_1", " "),
    ("qwen2", "Q5_0", "output.weight"),
    ("qwen3", "Q8_0", "output.weight"),
    ("llama", lambda name: "Q8_0" if "attn_v" in name else "Q4_0", " "),
])  # fmt: skip
@pytest.mark.parametrize("compiles", [True, False])
@torch.inference_mode()
def test_blocks_that_stay_in_the_file_give_the_logits_of_their_values(
    arch, blocks, without, quantize, compiles, tmp_path, monkeypatch
):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path.parent / "kept") if compiles else "off")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch, blocks=blocks, without=without)
    read, found, logits = gguf_plain.read, [], []

    def read_so(in_blocks):
        def reads(path, dtype, **_):
            found.append(read(path, dtype, in_blocks=in_blocks))
            return found[-1]

        return reads

    for in_blocks in (True, False):
        monkeypatch.setattr(gguf_plain, "read", read_so(in_blocks))
        with forerun.load(str(path), lanes=1, max_context=64, quantize=quantize) as model:
            logits.append((model.backbone.cost, logits_in_steps(model.backbone, [3, 5])))
    in_file = [{n for n, w in one.weights() if isinstance(w, Blocks)} for one in found]
    assert len(in_file[0]) == 2 * 7 + (2 if without == " " else 1) and not in_file[1]
    assert logits[0][0] == logits[1][0]
    assert torch.equal(logits[0][1], logits[1][1])


@pytest.mark.parametrize("compiles", [True, False])
@torch.inference_mode()
def test_a_model_that_is_loaded_needs_its_file_no_more(compiles, tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path.parent / "kept") if compiles else "off")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, blocks="Q4_1")
    models = [forerun.load(str(path), lanes=1, max_context=64) for _ in range(2)]
    before = logits_in_steps(models[0].backbone, [8])
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(logits_in_steps(models[1].backbone, [8]), before)
    for model in models:
        model.close()


def test_blocks_that_are_no_numbers_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, blocks="Q4_1")
    data = bytearray(path.read_bytes())
    matrix = next(t for t in read_header(path).tensors if t.kind.name == "Q4_1")
    lowest = data.index(matrix.data[:200].tobytes()) + 2  # of the first block
    data[lowest : lowest + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match="not finite"):
        forerun.load(str(path))


def test_what_is_not_of_the_shape_is_left_to_the_library(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_theirs(path)
    assert gguf_plain.read(path, None) is None
    write_gguf(path, without="blk.1.attn_k")
    assert gguf_plain.read(path, None) is None
    with pytest.raises(BadCheckpoint, match="k_proj"):
        forerun.load(str(path))


def test_a_file_that_is_broken_anywhere_is_left_to_the_library_or_read_as_it_is(tmp_path):
    """Whatever is in its header, no other error gets out."""
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    header = whole.index(b"blk.0.") + 2000
    random = np.random.default_rng(0)
    path = tmp_path / "broken.gguf"
    for length in random.integers(0, header, 30):
        path.write_bytes(whole[:length])
        assert gguf_plain.read(path, None) is None
    for place in random.integers(0, header, 200):
        broken = bytearray(whole)
        broken[place : place + 8] = random.bytes(8)
        path.write_bytes(broken)
        gguf_plain.read(path, None)
    for setting in (b"block_count", b"rope.dimension_count", b"attention.head_count"):
        broken = bytearray(whole)
        place = whole.index(setting) + len(setting) + 4
        broken[place : place + 4] = b"\xff\xff\xff\x7f"
        path.write_bytes(broken)
        assert gguf_plain.read(path, None) is None


def test_a_file_gives_the_librarys_weights_and_tokenizer_read_or_kept(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    write_theirs(tmp_path / "tiny.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    reads = []
    quick = ours.quick
    monkeypatch.setattr(ours, "quick", lambda: (reads.append(1), quick())[1])
    for turn in ("read", "kept"):
        loaded, state = load_state(tmp_path / "tiny.gguf")
        assert state.keys() == theirs.keys(), turn
        assert all(torch.equal(state[key], theirs[key]) for key in state), turn
        assert same_tokenizer(loaded.tokenizer, tokenizer), turn
    assert reads == [1]  # the second time nothing was read


@pytest.mark.parametrize("damage", [None, "tokenizer.json", "tokenizer_config.json"])
def test_the_tokenizer_of_the_llama_shape_is_the_librarys_made_or_kept(
    damage, tmp_path, monkeypatch
):
    from transformers import AutoTokenizer

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    write_gguf(tmp_path / "tiny.gguf")
    expected = load_tokenizer(Source("tiny", str(tmp_path), "tiny.gguf"))
    plain = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert same_tokenizer(expected, plain)
    for turn in ("made", "kept"):
        loaded, _ = load_state(tmp_path / "tiny.gguf")
        assert same_tokenizer(loaded.tokenizer, expected), turn
        (folder,) = (tmp_path / "kept" / "gguf").iterdir()
        if damage is not None:
            (folder / damage).write_text("{")
    assert not list(folder.glob("*.safetensors"))  # weights are read as fast from the file


def test_control_tokens_are_one_token_each(tmp_path):
    """Some versions of the library know of a few of them only, and spell the others."""
    file = tmp_path / "tiny.gguf"
    write_gguf(str(file))
    tokenizer = load_tokenizer(Source("tiny", str(tmp_path), "tiny.gguf"))
    controls = ours.control_tokens(file)
    assert controls and set(controls) <= set(tokenizer.get_vocab())
    spelled = [tokenizer.encode(word, add_special_tokens=False) for word in controls]
    assert spelled == [[tokenizer.convert_tokens_to_ids(word)] for word in controls]
    plain = next(w for w in tokenizer.get_vocab() if w.isalpha() and len(w) > 1)
    _add_control_tokens(tokenizer, [plain, *controls])
    added = tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(plain)]
    assert added.special and added.content == plain


def damage_by_cutting(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_by_writing(folder):
    file = folder / "model.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-10] ^= 255
    file.write_bytes(whole)


def damage_by_removing(folder):
    (folder / "config.json").unlink()


def damage_the_manifest(folder):
    (folder / ours.MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [damage_by_cutting, damage_by_writing, damage_by_removing, damage_the_manifest],
)
def test_what_was_kept_is_made_anew_where_it_is_damaged(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    write_theirs(tmp_path / "tiny.gguf")
    _, state = load_state(tmp_path / "tiny.gguf")
    (folder,) = (tmp_path / "kept" / "gguf").iterdir()
    damage(folder)
    _, again = load_state(tmp_path / "tiny.gguf")
    assert all(torch.equal(state[key], again[key]) for key in state)
    kept = load_file(folder / "model.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in kept.items())


def test_a_changed_file_is_read_again_and_a_folder_that_cannot_be_written_is_no_error(
    tmp_path, monkeypatch
):
    kept = tmp_path / "kept"
    monkeypatch.setenv("FORERUN_CACHE", str(kept))
    path = tmp_path / "tiny.gguf"
    write_theirs(path)
    load_state(path)
    os.utime(path, ns=(1, 1))
    load_state(path)
    assert len(list((kept / "gguf").iterdir())) == 2
    monkeypatch.setattr(ours, "MOST_BYTES", 1)  # room for the newest only
    os.utime(path, ns=(2, 2))
    load_state(path)
    assert len(list((kept / "gguf").iterdir())) == 1
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    model = forerun.load(str(path), lanes=1, max_context=32)
    assert model.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids


def test_a_file_is_trained_and_written_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    write_gguf(str(tmp_path / "tiny.gguf"))
    network = networks.load_network(str(tmp_path / "tiny.gguf"))
    network.save_pretrained(tmp_path / "written")
    again = networks.load_network(str(tmp_path / "written")).state_dict()
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again[name])
