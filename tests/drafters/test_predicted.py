"""What a caller predicts is drafted from the right place, also after edits."""

import numpy as np
import pytest
import torch

import forerun
from forerun import zoo
from forerun.checkpoints import tiny
from forerun.drafters.predicted import Alignment, PredictedDrafter
from forerun.errors import BadOption
from tests.helpers import ROOT, fresh

LETTERS = "abcdefghij klmnop qrstu"


def ids(text):
    return np.array(list(map(ord, text)))


def places(prediction, output):
    """Where each prefix of an output is thought to be."""
    alignment = Alignment(ids(prediction))
    return [alignment.after(ids(output)[:n]) for n in range(len(output) + 1)]


@pytest.mark.parametrize(
    "output, expected",
    [
        ("", 0),
        ("abc", 3),  # as predicted
        ("abXdef", 6),  # one token replaced
        ("abX", 3),  # and nothing known after it: it may stand for the next one
        ("abcXYZdef", 6),  # some inserted
        ("abcghi", 9),  # some left out
        ("XXabc", 3),  # some put before
    ],
)
def test_the_place_is_found_again_after_an_edit(output, expected):
    assert places(LETTERS, output)[-1] == expected


def test_of_two_places_the_longer_past_wins_and_then_the_nearer():
    lines = "x=1;return a;x=2;return b;x=3;return c;"
    output = "x=1;return a;x=2;return b;x=9;"
    assert lines[places(lines, output)[-1] :] == "return c;"


def test_a_prediction_that_is_nothing_is_refused():
    for nothing in ("", [], ()):
        with pytest.raises(BadOption, match="prediction"):
            PredictedDrafter(nothing)
    with pytest.raises(BadOption, match="prediction=3"):
        PredictedDrafter(3)
    m = fresh()
    with pytest.raises(BadOption, match=r"prediction has token id"):
        m.generate("a", method="predicted", prediction=[m.vocab])
    assert m.generate("a", max_tokens=2).finish_reason, "nobody else is harmed"


def test_text_is_read_with_the_models_own_tokenizer():
    m = fresh()
    plain = m.generate("hello", max_tokens=12, ignore_eos=True)
    as_ids = m.generate(
        "hello", max_tokens=12, ignore_eos=True, method="predicted", prediction=plain.token_ids
    )
    assert as_ids.token_ids == plain.token_ids and as_ids.stats.forwards == 1
    as_text = m.generate("hello", max_tokens=12, method="predicted", prediction="abc")
    assert as_text.trace[0].drafted[:3] == m.encode("abc", special=False)


def scripted(prompt, script):
    """A model that writes a script, whatever it read."""
    network = tiny.build("llama", 0, torch.float32, max_position_embeddings=9000, vocab_size=4096)
    m = forerun.from_network(network, zoo.tokenizer(), lanes=1)
    after = torch.tensor([*prompt, *script, 0])

    def forward(batch, slots):
        rows = batch.positions_T[batch.reads_R].long() + 1
        return 9.0 * torch.nn.functional.one_hot(after[rows], m.vocab).float()

    m.backbone.forward = forward
    return m


def test_a_file_of_4000_tokens_with_three_changed_lines_takes_an_eighth_of_the_forwards():
    read = zoo.tokenizer()
    lines = (ROOT / "src/forerun/engine/engine.py").read_text().splitlines(keepends=True)
    changed = list(lines)
    changed[40] = "    # an entirely new comment, which nobody could have foreseen at all\n"
    changed[150] = changed[150].replace("self", "this")
    changed[260] = changed[260] + "        assert self.running is not None\n"
    before = read("".join(lines)).input_ids[:4000]
    after = read("".join(changed)).input_ids[:4000]
    assert len(before) == len(after) == 4000 and before != after
    prompt = read("rewrite: ").input_ids
    m = scripted(prompt, after)
    r = m.generate(
        prompt, method="predicted", prediction=before, max_tokens=len(after), ignore_eos=True
    )
    assert r.token_ids == after
    assert r.stats.forwards <= len(after) / 8, r.stats.forwards
