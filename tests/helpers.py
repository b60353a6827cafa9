"""What several tests share: models that need no weights, loaded once per process, and ways to ask
them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import forerun
from forerun.api import Model
from forerun.checkpoints import tiny
from forerun.engine import graphs
from forerun.engine.engine import no_messages
from forerun.engine.loop import InCaller
from forerun.engine.prefetch_copies import CopyPrefetch
from forerun.engine.prefetch_rounds import LookRounds, RoundProgram, RoundPrograms
from forerun.options import Sampling
from forerun.sequence.canvas import BLANK

ROOT = Path(__file__).parents[1]


def without_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`bench/no_device.py`. What it replaces of the package is put back after the test."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(graphs, "check_logits", graphs.check_logits)
    monkeypatch.setattr(CopyPrefetch, "_copies", CopyPrefetch._copies)
    monkeypatch.setattr(LookRounds, "judged", LookRounds.judged)
    monkeypatch.setattr(RoundPrograms, "are_right", RoundPrograms.are_right)
    monkeypatch.setattr(RoundProgram, "run", RoundProgram.run)
    return pytest.importorskip("no_device")


def every_pair(**axes: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with few combinations in which every two values of different axes meet.

    Most mistakes need two things that come together, hardly any three. An axis is a list of
    values, or a mapping from names to values.
    """
    named = [
        list(axis.items()) if isinstance(axis, Mapping) else [(str(each), each) for each in axis]
        for axis in axes.values()
    ]
    sizes = [range(len(axis)) for axis in named]
    places = list(combinations(range(len(named)), 2))
    meetings = lambda row: {(a, row[a], b, row[b]) for a, b in places}
    rows = list(product(*sizes))
    left = set().union(*map(meetings, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(meetings(row) & left))
        left -= meetings(best)
        chosen.append(best)
    cases = [
        pytest.param(
            *(axis[at][1] for axis, at in zip(named, row)),
            id="-".join(axis[at][0] for axis, at in zip(named, row)),
        )
        for row in chosen
    ]
    return pytest.mark.parametrize(",".join(axes), cases)


ARCHITECTURES = tiny.ARCHITECTURES
PROMPTS = [
    [10, 20, 30, 10, 20],
    [7],
    list(range(40, 70)),
    [5, 5, 5, 9, 5, 5],
    [100, 3, 100, 3, 100],
]


@cache
def network(arch: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A tiny random `transformers` model, as the library made it."""
    return tiny.build(arch, seed, dtype)


@cache
def model(
    arch: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, lanes: int = 8
) -> Model:
    """The same weights behind our engine."""
    return _model(arch, dtype, seed, lanes, name=f"tiny:{arch}:{seed}")


def fresh(
    arch: str = "llama",
    dtype: torch.dtype = torch.float32,
    lanes: int = 8,
    seed: int = 0,
    **changes,
) -> Model:
    """A model with an engine of its own, for tests that disturb it."""
    return _model(arch, dtype, seed, lanes, name="fresh", **changes)


def _model(arch, dtype, seed, lanes, name, **changes) -> Model:
    built = tiny.build(arch, seed, dtype, **changes)
    return forerun.from_network(built, tiny.tokenizer(), name=name, lanes=lanes, max_context=160)


MERGES = ("▁-a", "▁-b", "a-b", "▁a-b", "d-e", "de-f", "▁-def", "▁-▁", "(-a", "b-)", ")-:", "ab-)")


def sentence_tokenizer(scheme: str):
    """A small tokenizer in the manner of SentencePiece, with bytes for what it has no letters for.
    `scheme` says where it puts a space: first, always, never, or, as older ones do, before the
    text as a whole ("legacy")."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.split("-")) for merge in MERGES]
    names = [f"<0x{i:02X}>" for i in range(256)]
    names += ["<unk>", "<s>", "</s>", *"▁abcdefx().,:=\n01", *(a + b for a, b in merges)]
    vocab = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if scheme == "legacy":
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    spaces = decoders.Replace("▁", " ")
    core.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **special
    )


def byte_tokenizer(merges: Sequence[str], special: Sequence[str] = ()):
    """Bytes as tokens, and a few longer ones; a space is written Ġ."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = tiny.tokenizer().backend_tokenizer
    pairs = [tuple(merge.split()) for merge in merges]
    letters = [letter for letter in core.get_vocab() if len(letter) == 1]
    names = [*sorted(letters), *dict.fromkeys(a + b for a, b in pairs)]
    whole = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    whole.pre_tokenizer = core.pre_tokenizer
    whole.decoder = core.decoder
    made = PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    made.add_tokens(list(special), special_tokens=True)
    return made


def stepped(m: Model) -> Model:
    """A model whose engine is stepped by hand, or by whoever waits: no thread does it."""
    m.driver = InCaller(m.engine)
    m.engine.has_messages = no_messages  # of the thread that there was
    return m


def settled(m: Model, seconds: float = 10) -> Model:
    """Wait until a model's engine has nothing to do: cancelling is a message."""
    deadline = time.monotonic() + seconds
    while m.engine.busy and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not m.engine.busy, "still busy"
    return m


def tokens_of(results):
    return [result.token_ids for result in results]


def ask(m, canvas, question):
    """One question about a canvas (None is a blank), from scratch."""
    m.host.forget()
    tokens = [BLANK if token is None else token for token in canvas]
    seq = m.canvas(tokens, Sampling(temperature=1.0))
    answer = []

    async def run():
        answer.append(await question(m.handle(), seq))

    m.run_to_end(seq, run)
    return answer[0]


def caught(certificate):
    """The certificate is refused, and by a wide margin: mistakes do not hide near the tolerance."""
    off = certificate.distance > 1e-3 or abs(certificate.mass - 1) > 1e-3
    return not certificate.holds and off


def run(*words, **settings):
    """A command line, run in this process."""
    from typer.testing import CliRunner  # a machine that only checks a GPU may lack it

    from forerun.cli import app

    return CliRunner().invoke(app, list(map(str, words)), **settings)


def hears_ctrl_c() -> None:
    """For `preexec_fn`: a process that was started in the background hears no interrupt, nor do
    those it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_blocks(length, size):
    """Which of `length` positions each sees, in blocks of a size."""
    block = np.arange(length) // size
    return block[None] <= block[:, None]


def write_checkpoint(folder, config, weights):
    """A checkpoint in its published layout."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / "model.safetensors")
    return str(folder)
