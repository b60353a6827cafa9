"""Training begins from every published format, with any checkpoint's tokenizer."""

import json

import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption
from forerun.families.masked import CacheScope
from forerun.train.any_subset import AnySubsetObjective
from forerun.train.loop import new_network
from forerun.train.recipe import Recipe
from forerun.train.run import check_start, run, tokenizer_of, with_family, with_vocabulary
from tests.helpers import ask
from tests.published import LAYOUTS

SHORT = dict(context=16, batch=8, steps=4, warmup=1, learning_rate=3e-3, validate_every=2)
LAYOUT = {layout.name: layout for layout in LAYOUTS}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.jsonl"
    texts = [f"def f{i}(x):\n    return x + {i}\n" * 3 for i in range(40)]
    lines = [{"text": t, "split": "valid" if i % 5 == 0 else "train"} for i, t in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


STARTS = {
    "GSAI-ML/LLaDA-8B-Base": "masked",
    "Dream-org/Dream-v0-Base-7B": "masked",
    "kuleshov-group/mdlm-owt": "masked",
    "louaaron/sedd-small": "masked",
    "JetLM/SDAR-8B-Chat-b8": "block",
    "kuleshov-group/bd3lm-owt-block_size4": "block",
    "xlnet/xlnet-base-cased": "any-subset",
}


@pytest.mark.parametrize("name, objective", STARTS.items(), ids=list(STARTS))
def test_training_begins_from_it_learns_and_leaves_a_model_of_the_same_family(
    name, objective, tmp_path, data
):
    layout = LAYOUT[name]
    start = layout.write(tmp_path)
    tokenizer = None
    if layout.tokenizer is None:
        tokenizer = str(LAYOUT["diffusionfamily/diffugpt-m"].write(tmp_path))
    options = {"sizes": [4, 8]} if objective == "block" else {}
    recipe = Recipe(objective, options, start=str(start), tokenizer=tokenizer, **SHORT)
    rows = []
    made = run(recipe, data, tmp_path / "run", rows.append)
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"]
    before, after = (forerun.load(str(path), max_context=32) for path in (start, made))
    assert before.family.name == after.family.name == objective
    for trait in ("mask_token", "shifted"):
        assert getattr(before.family, trait, 0) == getattr(after.family, trait, 0), trait
    said = after.encode("def f1(x):\n    return")
    assert after.decode(said) == "def f1(x):\n    return"
    assert after.generate(said, max_tokens=4, ignore_eos=True).token_ids


@pytest.mark.parametrize("name", ["kuleshov-group/mdlm-owt", "louaaron/sedd-small"])
def test_a_network_that_trains_computes_what_its_backbone_computes(name, tmp_path):
    place = str(LAYOUT[name].write(tmp_path))
    m = forerun.load(place, max_context=32)
    mask = m.family.mask_token
    canvas = [5, None, 17, None, None, 25]
    [(_, law)] = ask(m, canvas, lambda t, s: t.canvases(s, [[1, 3, 4]], [()], CacheScope()))
    network = new_network(Recipe("masked", {"mask_token": mask}, start=place)).eval()
    ids = torch.tensor([[mask if token is None else token for token in canvas]])
    logits = network(ids).logits[0, [1, 3, 4]].detach()
    logits[:, mask] = -torch.inf
    assert torch.allclose(law.float(), logits.softmax(-1), atol=1e-5)


def test_xlnets_loss_is_the_joint_density_that_decoding_has():
    """Of a sequence whose first token is given: the chain of our rows."""
    network = tiny.build("xlnet")
    m = forerun.from_network(tiny.build("xlnet"), None, max_context=32)
    tokens = torch.tensor([[5, 9, 7, 30, 2, 11]])
    order, known = torch.arange(6)[None], torch.tensor([1])
    parts = (tokens, order, known, order, torch.tensor([5.0]))
    loss = AnySubsetObjective(mask_token=tiny.VOCAB).loss(network, *parts)
    own = m.score(tokens[0, :1].tolist(), [tokens[0, 1:].tolist()])[0].logprob
    assert loss.item() * 5 == pytest.approx(-own, abs=1e-3)
    with pytest.raises(BadOption, match="ahead"):
        AnySubsetObjective(mask_token=tiny.VOCAB, ahead=0.3).loss(network, *parts)


class TestTokenizers:
    MODEL = dict(model_type="llama", **tiny.SHAPE)

    def test_a_fresh_network_takes_vocabulary_mask_and_end_from_it(self, tmp_path):
        place = str(LAYOUT["Dream-org/Dream-v0-Base-7B"].write(tmp_path))
        recipe = Recipe("masked", model=self.MODEL, tokenizer=place)
        tokenizer = tokenizer_of(recipe)
        recipe = with_vocabulary(with_family(recipe, tokenizer), tokenizer)
        network = new_network(recipe)
        assert recipe.options["mask_token"] == tokenizer.mask_token_id == len(tokenizer) - 1
        assert network.config.vocab_size == len(tokenizer)
        assert network.config.eos_token_id == tokenizer.eos_token_id

    @pytest.mark.parametrize("rows", [50258, 4095])
    def test_a_vocabulary_of_another_tokenizer_is_refused(self, rows):
        recipe = Recipe("masked", model={**self.MODEL, "vocab_size": rows})
        with pytest.raises(BadOption, match=f"vocab_size={rows}.*'zoo:ar' has 4096 tokens"):
            with_vocabulary(recipe, tokenizer_of(recipe))

    def test_text_that_a_start_has_no_rows_for_is_refused(self, tmp_path, data):
        start = str(LAYOUT["JetLM/SDAR-8B-Chat"].write(tmp_path))
        recipe = Recipe("block", {"sizes": [4]}, start=start, tokenizer="zoo:ar", **SHORT)
        with pytest.raises(BadOption, match="the network knows 311"):
            run(recipe, data, tmp_path / "run")

    def test_a_name_that_leads_nowhere_is_refused_before_any_work(self):
        with pytest.raises(BadOption, match=r"tokenizer='./nowhere'"):
            check_start(Recipe("ar", model=self.MODEL, tokenizer="./nowhere"))
        with pytest.raises(BadOption, match="tokenizer=3"):
            Recipe("ar", model=self.MODEL, tokenizer=3)
