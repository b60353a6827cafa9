"""Checkpoints in the layouts in which they are published: they load with every key used, their own
tokenizer, template and stop tokens, and none of their code runs."""

import json

import pytest
import torch

import forerun
from forerun.checkpoints import formats, resolve
from forerun.families.block import BlockSpan
from forerun.families.masked import CacheScope
from tests.helpers import ROOT, ask
from tests.published import BASE, HELLO, LAYOUTS, TEXT

NAMES = [layout.name for layout in LAYOUTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All of them, written once."""
    place = tmp_path_factory.mktemp("hub")
    for layout in LAYOUTS:
        layout.write(place)
    return place


@pytest.fixture
def load(folder, monkeypatch):
    def never(*_):
        raise AssertionError("the library asked whether code may run")

    monkeypatch.setattr("builtins.input", never)
    return lambda layout: forerun.load(str(folder / layout.name), lanes=2, max_context=64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_it_loads_as_what_it_is_and_writes(layout, load):
    m = load(layout)
    assert m.family.name == layout.family
    assert getattr(m.family, "mask_token", None) == layout.mask
    assert getattr(m.family, "shifted", False) == layout.shifted
    assert getattr(m.family, "block", None) == layout.block
    if layout.tokenizer is None:
        assert m.tokenizer is None
    else:
        check_tokenizer(layout, m)
    prompt = [5, 9, m.vocab - 1 if m.vocab - 1 != layout.mask else m.vocab - 2]
    found = m.generate(prompt, method=layout.method, max_tokens=6, ignore_eos=True)
    assert len(found.token_ids) == 6 and layout.mask not in found.token_ids


def check_tokenizer(layout, m):
    assert m.eos == layout.ends
    ids = m.encode(TEXT, special=False)
    assert m.decode(ids) == TEXT and max(ids) < m.vocab
    assert m.encode(TEXT)[-len(ids) :] == ids, "nothing comes after a text that goes on"
    for token, number in m.tokenizer.get_vocab().items():
        if number >= BASE and token.startswith("<|") and token != "<|endoftext|>":
            assert m.encode(token, special=False) == [number], token
    if layout.chat is not None:
        rendered = m.tokenizer.apply_chat_template(
            HELLO, add_generation_prompt=True, tokenize=False
        )
        assert rendered == layout.chat
        assert m.generate(messages=HELLO, max_tokens=2, method=layout.method) is not None


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_a_key_too_few_or_too_many_is_named(layout, folder, tmp_path):
    place = layout.write(tmp_path)
    for file in place.glob("*model*"):
        file.unlink()
    weights = layout.weights()
    gone = sorted(key for key in weights if key.endswith("weight") and "1." in key)[0]
    save(place, {key: tensor for key, tensor in weights.items() if key != gone})
    with pytest.raises(forerun.errors.BadCheckpoint, match="missing") as caught:
        forerun.load(str(place))
    assert "\n" not in str(caught.value)
    save(place, {**weights, "model.layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises(forerun.errors.BadCheckpoint, match=r"extra\.weight"):
        forerun.load(str(place))


def save(place, weights):
    from safetensors.torch import save_file

    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


def test_a_generation_config_says_how_to_sample(load):
    [layout] = [layout for layout in LAYOUTS if layout.name == "JetLM/SDAR-8B-Chat"]
    sampling = load(layout).default_sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)


def test_precision_is_as_stored_where_it_is_asked_for(folder, tmp_path):
    [layout] = [layout for layout in LAYOUTS if layout.name == "GSAI-ML/LLaDA-1.5"]
    place = layout.write(tmp_path)
    save(place, {key: tensor.bfloat16() for key, tensor in layout.weights().items()})
    assert forerun.load(str(place), dtype="auto", max_context=64).backbone.dtype == torch.bfloat16
    assert forerun.load(str(place), max_context=64).backbone.dtype == torch.float32


def test_a_llama_is_a_diffusion_model_by_its_keys_or_its_name_alone(folder):
    config = json.loads((folder / "diffusionfamily/diffullama" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (
        formats.read_raw_config(resolve.find(str(folder / "cllm/consistency-llm-7b-math"))) is None
    )


def test_revisions_of_one_repository_are_different_models(tmp_path, monkeypatch):
    [layout] = [layout for layout in LAYOUTS if layout.name == "therealgabeguo/ASARM"]
    repository = tmp_path / "models--therealgabeguo--ASARM"
    for seed, revision in enumerate(["code", "nlp"]):
        place = layout.write(repository / "snapshots" / (revision * 20)[:40])
        save(place, layout.weights(seed))
        for file in place.iterdir():
            file.rename(place.parents[1] / file.name)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text((revision * 20)[:40])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    models = [
        forerun.load(f"therealgabeguo/ASARM@{name}", max_context=64) for name in ("code", "nlp")
    ]
    first, second = (m.generate("def f(", max_tokens=8, ignore_eos=True) for m in models)
    assert first.token_ids != second.token_ids
    assert [m.family.name for m in models] == ["any-subset"] * 2
    with pytest.raises(forerun.errors.BadCheckpoint, match=r"it has code, nlp"):
        forerun.load("therealgabeguo/ASARM")


NUMBERS = json.loads((ROOT / "tests" / "checkpoints" / "published.json").read_text())


@pytest.mark.parametrize("name", NUMBERS)
def test_its_laws_are_those_of_its_authors_forward(name, folder):
    """The numbers come from a transcription of the authors' forward (and of LLaDA's sampler, among
    possible tokens), run outside this repository on these weights."""
    noted = NUMBERS[name]
    m = forerun.load(str(folder / name), dtype="float32", max_context=64)
    blanks = noted["blanks"]
    canvas = [*noted["given"], *[None] * (noted["length"] - len(noted["given"]))]
    if m.family.name == "block":
        size = m.family.block
        start = blanks[0] // size * size
        span = BlockSpan(start, start + size, size)
        [(_, law)] = ask(m, canvas, lambda t, s: t.blocks(s, [blanks], [()], span))
    else:
        [(_, law)] = ask(m, canvas, lambda t, s: t.canvases(s, [blanks], [()], CacheScope()))
    top = law.topk(4)
    assert top.indices.tolist() == noted["tokens"]
    assert torch.allclose(top.values.float(), torch.tensor(noted["law"]), atol=2e-5)
    if "written" in noted:
        how = dict(method="stepwise", block=8, max_tokens=8, ignore_eos=True)
        assert m.generate(noted["given"], **how).token_ids == noted["written"]


ROUND = [100, 3, 100, 3, 100, 7, 7, 60, 61, 62, 63]
IN_ORDER = list(range(70, 90))
# Checkpoint, how it is decoded, what is given, and what its authors' own sampler wrote, run outside
# this repository. It chose among possible tokens: not the mask, nor rows that are no token.
SAMPLERS = [
    (
        "GSAI-ML/LLaDA-8B-Instruct", dict(method="steps", steps=2, block=8), ROUND,
        [105, 105, 105, 102, 102, 102, 105, 105, 41, 134, 78, 19, 105, 78, 78, 134],
    ),
    (
        "GSAI-ML/LLaDA-8B-Instruct", dict(method="steps", steps=4, block=16), ROUND,
        [105, 105, 105, 105, 230, 230, 105, 105, 105, 105, 230, 230, 105, 105, 105, 105],
    ),
    (
        "Dream-org/Dream-v0-Base-7B", dict(method="stepwise", order="margin"), [5, 9, 17, 250, 33],
        [164, 273, 136, 19, 70, 74, 189, 118],
    ),
    (
        "Dream-org/Dream-v0-Base-7B", dict(method="stepwise", order="entropy"), ROUND,
        [259, 137, 95, 54, 74, 90, 82, 137],
    ),
    (
        "JetLM/SDAR-8B-Chat", dict(method="block", schedule="static", steps=2), IN_ORDER[:8],
        [268, 268, 268, 240, 240, 260, 240, 60],
    ),
    (
        "JetLM/SDAR-8B-Chat", dict(method="block", schedule="static", steps=3), IN_ORDER[:8],
        [240, 268, 268, 240, 260, 260, 60, 60],
    ),
    (
        "JetLM/SDAR-8B-Chat-b8", dict(method="block", schedule="static", steps=7), IN_ORDER[:8],
        [275, 268, 268, 179, 285, 181, 275, 268, 168, 121, 177, 177, 132, 272, 168, 121],
    ),
    (
        "JetLM/SDAR-8B-Chat-b8", dict(method="block", threshold=0.0), IN_ORDER[:8],
        [275, 268, 268, 275, 275, 275, 275, 268, 268, 45, 181, 268, 268, 268, 268, 45],
    ),
    (
        "JetLM/SDAR-8B-Chat-b8", dict(method="block-stepwise", sub_block=1), IN_ORDER[:8],
        [275, 268, 268, 268, 195, 285, 242, 242, 240, 240, 106, 240, 242, 242, 242, 28],
    ),
    (
        "Efficient-Large-Model/Fast_dLLM_v2_7B", dict(method="block", threshold=0.3, sub_block=8),
        IN_ORDER, [28, 109, 277, 200, 123, 145, 91, 36, 38, 58, 58, 223],
    ),
    (
        "inclusionAI/LLaDA2.0-mini", dict(method="block", threshold=0.1), list(range(3, 248, 7)),
        [
            53, 222, 222, 222, 222, 222, 53, 222, 222, 222, 222, 222, 53, 222, 222, 222, 222, 222,
            222, 53, 222, 222, 222, 222, 222, 53, 222, 222, 222, 182, 110, 110, 110, 182, 182, 182,
            182, 110, 110, 110, 182, 182, 182, 110, 110, 110, 182, 182, 182, 110, 110, 110, 182,
            182, 182, 110, 110, 110, 182, 182, 182,
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "given", "written"), SAMPLERS)
def test_it_writes_what_its_authors_sampler_wrote(name, how, given, written, folder):
    m = forerun.load(str(folder / name), dtype="float32", max_context=96)
    result = m.generate(given, max_tokens=len(written), temperature=0, ignore_eos=True, **how)
    assert result.token_ids == written


def test_diffullama_is_a_llama_whose_rows_see_everything(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    [layout] = [layout for layout in LAYOUTS if "diffullama" in layout.name]
    network = LlamaForCausalLM(LlamaConfig(**layout.config)).eval()
    network.load_state_dict(layout.weights())
    m = forerun.load(str(folder / layout.name), dtype="float32", max_context=64)
    canvas = [5, 9, None, 17, None, None]
    ids = torch.tensor([[811 if token is None else token for token in canvas]])
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with torch.no_grad():
        logits = network(ids, attention_mask=everything).logits[0, [1, 3, 4], : m.vocab]
    assert m.vocab < 811, "the mask is no token of its tokenizer, and never an outcome"
    [(_, law)] = ask(m, canvas, lambda t, s: t.canvases(s, [[2, 4, 5]], [()], CacheScope()))
    assert torch.allclose(law.float(), logits.softmax(-1), atol=1e-5)
