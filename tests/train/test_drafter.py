"""A drafter that looks into its target learns the target's own text, and stops and goes on."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import forerun
from forerun.checkpoints import tiny
from forerun.checkpoints.drafters import read_drafter
from forerun.errors import BadOption
from forerun.train import head_loss as head_loss_file
from forerun.train.anchors import KeptFeatures, Texts
from forerun.train.drafter import (
    DrafterRecipe,
    DrafterRun,
    end_tokens,
    read_recipe,
    shape_of,
    train_drafter,
    walk,
)
from forerun.train.frozen import FrozenTarget
from forerun.train.head_loss import head_loss
from forerun.train.networks import move
from forerun.train.own_text import GREEDY, OwnText, TextOptions, make_scripts, write_own_text

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def network():
    return tiny.build("llama", 0, torch.float32)


def tokenizer():
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def own_text(network, **options):
    target = FrozenTarget(network, 64)
    scripts = make_scripts(tokenizer(), ["why?"], ["def f", "x = "])
    options = TextOptions(**dict(texts=16, longest=64, most=2048, seconds=60) | options)
    return write_own_text(target, scripts, end_tokens(tokenizer(), scripts), options)


def test_a_frozen_target_has_the_hidden_states_of_the_library(network):
    target = FrozenTarget(network, 64)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 9, 1, 2]])
    with torch.no_grad():
        found = network(tokens, output_hidden_states=True)
        torch.testing.assert_close(target.logits(tokens), found.logits)
        torch.testing.assert_close(target.features(tokens, [0]), found.hidden_states[1])


def test_greedy_answers_are_what_the_target_would_write(network):
    """Texts that begin whenever another ends, over a ring of columns: each sees only itself."""
    text = own_text(network)
    target = FrozenTarget(network, 64)
    checked = 0
    for first, last, answer in text.spans():
        if text.marks[answer] & GREEDY:
            tokens = torch.from_numpy(text.tokens[first:last].astype(np.int64))
            with torch.no_grad():
                best = target.logits(tokens[None])[0].argmax(-1)
            here = answer - first
            assert best[here - 1 : -1].tolist() == tokens[here:].tolist()
            checked += last - answer
    assert checked > 200


def test_texts_are_questions_answers_and_code(network):
    text = own_text(network)
    decoded = [tokenizer().decode(text.tokens[a:b].tolist()) for a, b, _ in text.spans()]
    assert any(one.startswith("<user>why?~<assistant>") for one in decoded)
    assert any(one.startswith("def f") for one in decoded)
    asked = [one for one in decoded if one.startswith("<user>") and "why?" not in one]
    assert asked and all("~<assistant>" in one for one in asked)


def test_a_loss_in_parts_has_the_gradients_of_cross_entropy(monkeypatch):
    monkeypatch.setattr(head_loss_file, "LOGITS_ON_CPU", 33)
    monkeypatch.setattr(head_loss_file, "ROWS_ON_CPU", 1)
    torch.manual_seed(0)
    x, head, rows, matrix = (
        torch.randn(*shape, requires_grad=True) for shape in ((8, 5), (5, 11), (8, 2), (11, 2))
    )
    labels = torch.randint(0, 11, (8,))
    weights = torch.rand(8)
    ours = head_loss(x, head, labels, weights, (rows, matrix))
    theirs = (F.cross_entropy(x @ head + rows @ matrix.T, labels, reduction="none") * weights).sum()
    torch.testing.assert_close(ours, theirs)
    trained = (x, rows, matrix)
    for one, other in zip(
        torch.autograd.grad(2 * ours, trained), torch.autograd.grad(2 * theirs, trained)
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_weights_in_half_precision_leave_rotary_frequencies_alone():
    network = tiny.build("llama", 0, torch.float32)
    before = network.model.rotary_emb.inv_freq.clone()
    move(network, torch.device("cpu"), torch.bfloat16)
    assert network.dtype == torch.bfloat16
    assert torch.equal(network.model.rotary_emb.inv_freq, before)


def test_a_walk_counts_forwards():
    assert walk(np.array([0, 3, 0, 0, 0, 1, 0]), 6) == (6, 3)  # 0 -> 1 -> 5 -> end
    assert walk(np.zeros(5, int), 4) == (4, 4)


def test_a_drafter_learns_goes_on_and_drafts(network, tmp_path):
    """The whole way: own text, training in two calls, a checkpoint that decodes, and more than one
    token per forward."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abc", "def f", "0123")))
    lines = []

    def recipe(seconds):
        return DrafterRecipe(
            layers=1,
            features=2,
            block=4,
            markov_rank=4,
            seconds=seconds,
            batch=4,
            anchors=16,
            learning_rate=1e-2,
            measure_every=60,
            held_out=4,
            text=TextOptions(texts=32, longest=48, greedy=1.0, most=6000, seconds=20),
        )

    for seconds in (1.0, 4.0):
        folder = train_drafter(
            recipe(seconds),
            network,
            tiny.tokenizer(),
            tmp_path / "run",
            prompts=str(prompts),
            log=lines.append,
        )
    assert any("going on from step" in line for line in lines)
    curve = (tmp_path / "run" / "drafter-curve.csv").read_text().splitlines()
    losses = [float(row.split(",")[3]) for row in curve[1:]]
    assert losses[-1] < losses[0]
    model = forerun.load("tiny", lanes=1)
    for one in (folder, tmp_path / "run" / "drafter-8bit"):
        options = dict(max_tokens=24, temperature=0, ignore_eos=True)
        out = model.generate("abc", method="specdiff", draft=str(one), k=3, **options)
        assert out.token_ids == model.generate("abc", method="ar", **options).token_ids


def test_few_tokens_are_drafted_and_hidden_states_made_once(network, tmp_path, monkeypatch):
    """The tokens that own text has most of; what is kept is what the target says of each text."""
    monkeypatch.setattr(KeptFeatures, "room", staticmethod(lambda device: math.inf))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abc", "def f", "0123")))
    options = TextOptions(texts=32, longest=48, greedy=1.0, most=6000, seconds=20)
    recipe = DrafterRecipe(
        **dict(layers=1, features=2, block=4, markov_rank=4, inner=32, draft_vocab=20),
        **dict(seconds=2.0, batch=4, anchors=16, learning_rate=1e-2, held_out=4, text=options),
    )
    lines = []
    folder = train_drafter(
        recipe, network, tiny.tokenizer(), tmp_path, prompts=str(prompts), log=lines.append
    )
    assert any("20 tokens are drafted" in line for line in lines)
    text = OwnText.load(tmp_path / "text.npz")
    drafter = read_drafter(folder, torch.float32)
    assert drafter.shape.inner == 32
    counts = np.bincount(text.tokens[text.marks & 1 > 0], minlength=257)
    kept = drafter.drafted_tokens.numpy()
    assert len(set(kept)) == 20
    assert counts[kept].min() >= np.delete(counts, kept).max()
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 20
    stored = load_file(folder / "model.safetensors")
    assert stored["t2d"].nonzero()[:, 0].tolist() == (stored["d2t"] + torch.arange(20)).tolist()

    target = FrozenTarget(network, 48)
    texts = Texts(text, 48, 4, torch.device("cpu"))
    features = KeptFeatures.of(target, (0, 1), texts, lines.append)
    for blocks in texts.all_in_order(5):
        direct = target.features(blocks.tokens_BL, (0, 1))
        inside_BL = blocks.inside_BAS[:, 0]
        torch.testing.assert_close(features(blocks)[inside_BL], direct[inside_BL])

    model = forerun.load("tiny", lanes=1)
    options = dict(max_tokens=24, temperature=0, ignore_eos=True)
    for one in (folder, tmp_path / "drafter-8bit"):
        out = model.generate("abc", method="specdiff", draft=str(one), k=3, **options)
        assert out.token_ids == model.generate("abc", method="ar", **options).token_ids


def test_batches_have_as_many_texts_as_are_asked_for():
    """Whoever asked before, and for whatever."""
    lengths = np.random.default_rng(0).integers(8, 40, 200)
    marks = np.concatenate([[2, 0, *[5] * (length - 2)] for length in lengths]).astype(np.uint8)
    text = OwnText(np.arange(len(marks), dtype=np.int32), marks)
    texts = Texts(text, 48, 4, torch.device("cpu"))
    for count in (8, 32, 5):
        assert texts.batch(0, count, 3, 4).anchors_BA.shape == (count, 3)
    first, again = (texts.batch(step, 32, 1, 4).tokens_BL[:, 0] for step in (1, 1))
    assert torch.equal(first, again)


def test_a_drafter_goes_on_from_another(network, tmp_path):
    """With its weights and its tokens, though other tokens are most frequent now."""
    shape = dict(layers=1, features=2, block=4, markov_rank=4, draft_vocab=20)
    options = TextOptions(texts=32, longest=48, greedy=1.0, most=6000, seconds=20)
    recipe = DrafterRecipe(**shape, seconds=0, batch=4, anchors=16, held_out=4, text=options)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abc", "def f", "0123")))
    given = (network, tiny.tokenizer())
    first = train_drafter(recipe, *given, tmp_path / "first", prompts=str(prompts))
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("xyz", "()", "+-*/")))
    other = replace(recipe, begin=str(first), seed=7)
    second = train_drafter(other, *given, tmp_path / "second", prompts=str(prompts))
    for name, weight in load_file(first / "model.safetensors").items():
        assert torch.equal(weight, load_file(second / "model.safetensors")[name]), name
    # goes on from its own weights, without being told again
    train_drafter(replace(other, seconds=0.2), *given, tmp_path / "third", prompts=str(prompts))
    shape = shape_of(recipe, *given)
    text = OwnText.load(tmp_path / "third" / "text.npz")
    target = FrozenTarget(network, 48)
    run = DrafterRun(recipe, shape, target, text, tmp_path / "third", lambda line: None)
    tokens = run.drafter.drafted_tokens
    assert (
        run.step and tokens.tolist() == read_drafter(first, torch.float32).drafted_tokens.tolist()
    )
    assert run.place_V[tokens].tolist() == list(range(20))
    torch.testing.assert_close(run.head_EV, target.head_EV[:, tokens])
    larger = replace(other, inner=8, text=options)
    with pytest.raises(BadOption, match="another shape"):
        train_drafter(larger, *given, tmp_path / "fourth", prompts=str(prompts))


def test_recipes_refuse_what_they_do_not_know(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("layers: 2\ntext:\n  texts: 8\n")
    assert read_recipe(str(file)).text.texts == 8
    file.write_text("layer: 2\n")
    with pytest.raises(BadOption, match="layers"):
        read_recipe(str(file))
    with pytest.raises(BadOption, match="markov_rank=0"):
        DrafterRecipe(autoregressive=True)
    with pytest.raises(BadOption, match="begin='nowhere' is no drafter"):
        DrafterRecipe(begin="nowhere")
