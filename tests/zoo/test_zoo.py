"""The embedded models: whole, small enough, documented, and really trained."""

import inspect
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import forerun
from forerun import zoo
from forerun.backbones.rotary import rotations
from forerun.errors import BadCheckpoint, BadOption
from forerun.train.autoregressive import AutoregressiveObjective
from forerun.train.recipe import read
from forerun.zoo.storage import quantise, read_weights, write_weights
from tests.helpers import network


def test_every_shipped_model_has_a_recipe_a_card_and_a_curve():
    assert (
        set(zoo.shipped())
        == {"any-subset", "ar", "block", "consistency", "drafter", "masked"}
        <= set(zoo.names())
    )
    for name in zoo.shipped():
        assert all(read(stage).objective for stage in zoo.stages(name))
        card = (zoo.HOME / "cards" / f"{name}.md").read_text()
        assert card.startswith(f"# zoo:{name}\n") and "Licence" in card and "**Commit**" in card
        assert (
            (zoo.HOME / "curves" / f"{name}.csv")
            .read_text()
            .startswith("step,tokens,loss,valid_loss")
        )


def test_the_zoo_is_small_enough_to_ship():
    def size(folder):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    # of models that are not ours
    others = size(zoo.HOME / "drafters") + size(zoo.HOME / "adapters")
    assert size(zoo.HOME) - others < 32e6
    assert others < 24e6


def test_the_tokenizer_brings_text_back():
    tokenizer = zoo.tokenizer()
    for text in (inspect.getsource(textwrap), "naïve = '日本 🎉'\n\tx\r\n", " \n\n  "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.mask_token_id) == (4096, 0, 1)


@pytest.mark.parametrize("name", zoo.shipped())
def test_the_weights_alone_are_those_of_the_network(name):
    network, _ = zoo.load(name, torch.float32, "cpu")
    plain, _ = zoo.load_plain(name, torch.float32, "cpu")
    state, expected = plain.state_dict(), network.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    turns, their_turns = (
        rotations(each.model.rotary_emb, 1024, torch.device("cpu")) for each in (plain, network)
    )
    assert all(torch.equal(*pair) for pair in zip(turns, their_turns))


def test_decoding_imports_no_models_of_the_library():
    """They take three seconds, nearly half of what `forerun generate` would take."""
    run = (
        "import sys, forerun; model = forerun.load('zoo:ar', lanes=1); "
        "print(model.generate('def f(', max_tokens=2).token_ids); "
        "assert 'torch._dynamo' not in sys.modules; "
        "assert not [m for m in sys.modules if m.startswith('transformers.model')]"
    )
    subprocess.run([sys.executable, "-c", run], check=True, timeout=300)


def test_the_models_know_python_and_the_larger_knows_more():
    ids = torch.tensor([zoo.tokenizer()(inspect.getsource(textwrap)).input_ids[:512]])
    with torch.no_grad():
        losses = {
            name: float(
                AutoregressiveObjective().loss(zoo.load(name, torch.float32, "cpu")[0], ids)
            )
            for name in ("ar", "drafter")
        }
    assert losses["ar"] < losses["drafter"] < 3.2, losses  # a uniform guess is 8.3


def test_a_block_model_judges_its_own_drafts_in_fewer_forwards_than_tokens():
    m = forerun.load("zoo:block", max_context=256)
    prompts = ["def add(a, b):", "class Stack:\n    def __init__(self):"]

    def decoded(**options):
        found = m.generate(prompts, max_tokens=40, ignore_eos=True, **options)
        tokens = sum(r.stats.tokens for r in found)
        forwards = sum(r.stats.forwards for r in found)
        return [r.token_ids for r in found], tokens / forwards

    plain, _ = decoded(method="ar")
    exact, rate = decoded(method="s2d2-exact", ahead="every")
    assert exact == plain and rate > 1.5
    assert decoded(method="s2d2", block=16)[1] > 1.2


def test_loading_takes_less_than_a_second():
    zoo.load("ar", torch.float32, "cpu")
    began = time.perf_counter()
    forerun.load("zoo:ar")
    assert time.perf_counter() - began < 1.5  # under 0.1 s alone; the tests share the machine


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}])
def test_speculation_saves_forwards_and_greedy_text_is_the_references(sampling):
    m = forerun.load("zoo:ar", max_context=256)
    prompts = ["def add(a, b):", "class Stack:\n    def __init__(self):"]
    options = dict(max_tokens=40, ignore_eos=True, **sampling)
    drafted = m.generate(prompts, method="speculative", draft="zoo:drafter", k=4, **options)
    assert sum(r.stats.tokens for r in drafted) / sum(r.stats.forwards for r in drafted) > 1.6
    if not sampling:
        reference = m.generate(prompts, **options)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in reference]


def test_stored_weights_are_within_half_a_step(tmp_path):
    w = torch.randn(7, 33)
    rows, scale = quantise(w)
    assert ((rows * scale - w).abs() <= scale / 2 + 1e-7).all()
    write_weights(tmp_path / "w.safetensors", network("llama"))
    again = read_weights(tmp_path / "w.safetensors", torch.float32)
    for name, tensor in network("llama").state_dict().items():
        assert torch.allclose(
            again.state_dict()[name], tensor, atol=float(tensor.abs().max()) / 250
        ), name


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(BadCheckpoint, match="'drafter'"):
        forerun.load("zoo:drafted")
    with pytest.raises(BadOption, match="'ar'"):
        zoo.recipe("aar")
