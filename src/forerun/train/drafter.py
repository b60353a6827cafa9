"""Training a drafter that looks into its target: the target's own text first, then blocks of masks
after every token of its answers.

Every phase has its seconds and leaves a file; given again, the same call goes on where it stopped.

B texts of a step, L tokens of a text, A anchors of a text, S slots of a block, E hidden size, V
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from forerun.backbones.dflash import DrafterShape, FeatureDrafter, spread_layers
from forerun.checkpoints.drafters import read_drafter, write_drafter
from forerun.drafters.features import is_checkpoint
from forerun.errors import BadOption, unknown
from forerun.options import check_whole
from forerun.train.anchors import Blocks, KeptFeatures, Texts
from forerun.train.frozen import FrozenTarget
from forerun.train.head_loss import head_loss
from forerun.train.networks import move
from forerun.train.own_text import (
    ANSWER,
    OwnText,
    TextOptions,
    make_scripts,
    read_prompts,
    write_own_text,
)
from forerun.train.timed import adamw, add_row, cosine, update

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Log = Callable[[str], None]
CURVE = ["step", "seconds", "anchors", "loss", "learning_rate", "chat", "code", "sampled", "plain"]


@dataclass(frozen=True)
class DrafterRecipe:
    """One drafter. Every field is an option of the command line."""

    layers: int = 3
    features: int = 5  # target layers whose hidden states are read
    block: int = 8  # the last token and the masks after it
    markov_rank: int = 64  # 0: no correction by the token before
    markov_dropout: float = 0.2  # share of blocks that learn without the correction
    autoregressive: bool = False
    feature_norms: bool = False
    inner: int = 0  # width of a layer's middle; 0: the target's
    draft_vocab: int = 0  # above 0: only the tokens that own text has most of are drafted
    begin: str | None = None  # a drafter of the same shape to go on from
    mask_token: int | None = None  # None: a special token that the chat template does not use
    seconds: float = 270.0  # of training
    batch: int = 32  # texts a step
    anchors: int = 160  # blocks of a text
    learning_rate: float = 6e-4
    warmup: float = 0.04  # share of the seconds
    decay: float = 4.0  # slots: the loss of slot s weighs exp(-(s - 1) / decay)
    weight_decay: float = 0.01
    clip: float = 1.0
    measure_every: float = 30.0  # seconds
    held_out: int = 64  # texts of each kind
    seed: int = 0
    text: TextOptions = field(default_factory=TextOptions)

    def __post_init__(self) -> None:
        for name in ("layers", "features", "batch", "anchors", "held_out"):
            check_whole(name, getattr(self, name))
        check_whole("block", self.block, 2)
        for name in ("markov_rank", "inner", "draft_vocab"):
            check_whole(name, getattr(self, name), 0)
        if self.begin is not None and not is_checkpoint(Path(self.begin)):
            raise BadOption(
                f"begin={self.begin!r} is no drafter that looks into its target: give the folder "
                "of one, with its config.json."
            )
        if self.autoregressive and self.markov_rank:
            raise BadOption(
                f"autoregressive=True sees the tokens before, and markov_rank={self.markov_rank} "
                "corrects for not seeing them: set markov_rank=0."
            )


def train_drafter(  # noqa: PLR0913 - one door for the command line and for scripts
    recipe: DrafterRecipe,
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    prompts: str | None = None,
    target_name: str = "",
    log: Log = lambda line: None,
) -> Path:
    """Own text, training, and a checkpoint in `out/drafter` (and in 8 bits, `out/drafter-8bit`)."""
    out.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        move(network, torch.device("cuda"), torch.bfloat16)
    target = FrozenTarget(network, recipe.text.longest)
    text = own_text(recipe.text, target, tokenizer, out / "text.npz", prompts=prompts, log=log)
    shape = shape_of(recipe, network, tokenizer)
    log(f"drafter: {shape}")
    run = DrafterRun(recipe, shape, target, text, out, log)
    run.train()
    drafter = run.drafter
    write_drafter(out / "drafter", drafter, network.config, target_name)
    write_drafter(out / "drafter-8bit", drafter, network.config, target_name, bits=8)
    return out / "drafter"


def own_text(
    options: TextOptions,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    *,
    prompts: str | None,
    log: Log,
) -> OwnText:
    """The target's own text, from the file if it is there already."""
    if file.exists():
        return OwnText.load(file)
    began = time.perf_counter()
    questions, code = read_prompts(prompts) if prompts else ([], [])
    scripts = make_scripts(tokenizer, questions, code)
    text = write_own_text(target, scripts, end_tokens(tokenizer, scripts), options, log)
    text.save(file)
    answers = int((text.marks & 1).sum())
    log(
        f"own text: {len(text.tokens):,} tokens, {answers:,} of them answers, "
        f"{len(text.spans()):,} texts, {time.perf_counter() - began:.0f} s"
    )
    return text


def end_tokens(tokenizer: Any, scripts: Any) -> set[int]:
    """What ends a question or an answer."""
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    if scripts.kinds[0][1]:
        ends.add(int(scripts.tokens_NT[0, 0]))  # the answer header begins by ending the question
    return {end for end in ends if isinstance(end, int) and end >= 0}


def shape_of(
    recipe: DrafterRecipe, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> DrafterShape:
    """A drafter of the target's width and heads."""
    config: Any = network.config
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    mask = recipe.mask_token
    return DrafterShape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        inner=recipe.inner or config.intermediate_size,
        layers=recipe.layers,
        heads=heads,
        key_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        target_layers=spread_layers(config.num_hidden_layers, recipe.features),
        block=recipe.block,
        mask_token=unused_token(tokenizer, config.vocab_size) if mask is None else mask,
        eps=config.rms_norm_eps,
        rope_theta=float(theta),
        markov_rank=recipe.markov_rank,
        autoregressive=recipe.autoregressive,
        feature_norms=recipe.feature_norms,
        draft_vocab=recipe.draft_vocab if recipe.draft_vocab < config.vocab_size else 0,
    )


def unused_token(tokenizer: Any, vocab: int) -> int:
    """The mask token, else the last special token that is neither an end nor in the chat
    template."""
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < vocab:
        return tokenizer.mask_token_id
    template = str(getattr(tokenizer, "chat_template", None) or "")
    named = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    for number, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if number < vocab and number not in named and str(token) not in template:
            return int(number)
    return max(set(range(vocab)) - named)


class DrafterRun:
    """A drafter in training, and how far it has come."""

    def __init__(
        self,
        recipe: DrafterRecipe,
        shape: DrafterShape,
        target: FrozenTarget,
        text: OwnText,
        out: Path,
        log: Log,
    ):
        self.recipe = recipe
        self.shape = shape
        self.target = target
        self.out = out
        self.log = log
        self.device = target.weights.device
        self.dtype = target.weights.dtype
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(recipe.seed)
        self.texts = Texts(text, recipe.text.longest, recipe.held_out, self.device)
        self.drafter = FeatureDrafter(shape).to(self.device)
        self._choose_tokens(text)
        self._features = KeptFeatures.of(target, shape.target_layers, self.texts, log)
        self._begin_weights()
        self._begin_with(recipe.begin)
        self.optimiser = self._optimiser()
        self.step = 0
        self.anchors = 0
        self.elapsed = 0.0
        self._restore()

    def _begin_with(self, folder: str | None) -> None:
        """Begin with the weights of another drafter, if one is named."""
        if folder is None:
            return
        other = read_drafter(Path(folder), torch.float32, self.device)
        if other.shape != self.shape:
            raise BadOption(f"begin={folder!r} is a drafter of another shape: {other.shape}.")
        self._take_weights(other.state_dict())

    def _take_weights(self, state: dict[str, Tensor]) -> None:
        """Those of another drafter, and the tokens that it drafts."""
        self.drafter.load_state_dict(state)
        if self.drafter.drafted_tokens is not None:
            self._draft_only(self.drafter.drafted_tokens)

    def _choose_tokens(self, text: OwnText) -> None:
        """Which tokens are drafted, the head's part for them, and the place of each token."""
        self.head_EV = self.target.head_EV
        self.place_V: Tensor | None = None  # -1: never drafted
        self.mask_place = self.shape.mask_token
        if not self.shape.draft_vocab:
            return
        counts = np.bincount(text.tokens[text.marks & ANSWER > 0], minlength=self.shape.vocab)
        often = np.argsort(-counts, kind="stable")[: self.shape.draft_vocab]
        self._draft_only(torch.from_numpy(np.sort(often)).to(self.device))
        share = counts[often].sum() / max(1, counts.sum())
        self.log(f"{len(often):,} tokens are drafted: {share:.2%} of own text")

    def _draft_only(self, kept: Tensor) -> None:
        self.drafter.draft_only(kept)
        self.head_EV = self.target.head_EV[:, kept].contiguous()
        self.place_V = torch.full((self.shape.vocab,), -1, device=self.device)
        self.place_V[kept] = torch.arange(len(kept), device=self.device)
        self.mask_place = int(self.place_V[self.shape.mask_token])

    def _optimiser(self) -> torch.optim.AdamW:
        recipe = self.recipe
        weights = list(self.drafter.parameters())
        return adamw(weights, recipe.learning_rate, recipe.weight_decay, self.on_gpu)

    def _begin_weights(self) -> None:
        """Small weights; the fusing matrix weighs every hidden state by its usual size, so that
        all begin alike."""
        for weight in self.drafter.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.02)
        with torch.no_grad():
            # What goes into the shared head should be as large as what the target puts into it.
            self.drafter.norm.weight.copy_(self.target.weights.norm)
        if self.drafter.markov_head is not None:
            torch.nn.init.normal_(self.drafter.markov_head.markov_w1.weight, std=0.1)
            torch.nn.init.zeros_(self.drafter.markov_head.markov_w2.weight)
        if self.shape.feature_norms:
            return
        with torch.no_grad():
            blocks = self.texts.batch(0, min(8, self.recipe.batch), 1, 1)
            features = self._features(blocks)
            sizes = features[:, 1:].float().unflatten(-1, (-1, self.shape.hidden))
            sizes = sizes.square().mean(-1).sqrt().flatten(0, 1).median(0).values
            columns = sizes.repeat_interleave(self.shape.hidden)
            self.drafter.fc.weight.div_(columns.clamp(min=1e-3))

    def train(self) -> None:
        """Train until the seconds are spent, measuring every so often. What is compiled first
        does not count."""
        recipe = self.recipe
        if self.elapsed >= recipe.seconds:
            return
        if self.on_gpu:
            self.loss(self._blocks(0)).backward()
            self.optimiser.zero_grad(set_to_none=True)
        began = time.perf_counter() - self.elapsed
        measured = self.elapsed
        losses: list[Tensor] = []
        while self.elapsed < recipe.seconds:
            losses.append(self._train_step())
            if self.step % 8 == 0 and self.on_gpu:
                torch.cuda.synchronize()
            if self.step == 5:
                self.log(f"first 5 steps done after {time.perf_counter() - began:.0f} s")
            self.elapsed = time.perf_counter() - began
            if self.elapsed - measured > recipe.measure_every:
                measured = self.elapsed
                self._measure_and_save(losses)
        self._measure_and_save(losses)

    def learning_rate(self) -> float:
        done = self.elapsed / self.recipe.seconds
        return self.recipe.learning_rate * cosine(done, self.recipe.warmup)

    def _train_step(self) -> Tensor:
        recipe = self.recipe
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate()
        blocks = self._blocks(self.step)
        loss = self.loss(blocks)
        loss.backward()
        update(self.optimiser, self.drafter.parameters(), recipe.clip)
        self.step += 1
        self.anchors += blocks.anchors_BA.numel()
        return loss.detach()

    def _blocks(self, step: int) -> Blocks:
        return self.texts.batch(step, self.recipe.batch, self.recipe.anchors, self.shape.block)

    def loss(self, blocks: Blocks) -> Tensor:
        """Cross-entropy of the tokens after the anchors, near ones weighing more."""
        slots = self.shape.block
        tokens = blocks.tokens(slots)
        x_BASE = self.hidden(blocks, tokens)
        drafted = slots - 1
        weights_S = torch.exp(-torch.arange(drafted, device=self.device) / self.recipe.decay)
        weights = (blocks.inside_BAS[..., 1:] * weights_S).flatten()
        labels = tokens[..., 1:].flatten()
        rows = x_BASE[:, :, :-1] if self.shape.autoregressive else x_BASE[:, :, 1:]
        rows = rows.reshape(-1, self.shape.hidden)
        markov = self._markov(tokens[..., :-1]) if self.drafter.markov_head is not None else None
        labels = self._places(labels)
        weights = weights * (labels >= 0)
        labels = labels.clamp(min=0)
        loss = head_loss(rows, self.head_EV, labels, weights, markov)
        return loss / weights.sum().clamp(min=1)

    def _markov(self, before_BAS: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for the tokens before, some blocks without, and the matrix that they go through."""
        markov: Any = self.drafter.markov_head
        rows = markov.markov_w1(before_BAS).to(self.dtype)
        kept = torch.rand(rows.shape[:2], device=self.device) >= self.recipe.markov_dropout
        rows = rows * kept[..., None, None]
        return rows.flatten(0, 2), markov.markov_w2.weight.to(self.dtype)

    def hidden(self, blocks: Blocks, tokens_BAS: Tensor) -> Tensor:
        """Hidden states of the blocks, [B, A, S, E]."""
        with torch.no_grad():
            features = self._features(blocks)
        block = tokens_BAS
        if not self.shape.autoregressive:
            block = torch.full_like(tokens_BAS, self.shape.mask_token)
            block[..., 0] = tokens_BAS[..., 0]
        embedded = F.embedding(block, self.target.weights.embed)
        positions = torch.arange(features.shape[1], device=self.device).expand(len(features), -1)
        weights = {name: w.to(self.dtype) for name, w in self.drafter.named_parameters()}
        inputs = (features, positions, embedded, blocks.anchors_BA)
        return torch.func.functional_call(self.drafter, weights, inputs)

    @torch.no_grad()
    def accepted(self, kind: str, texts: int = 16, *, corrected: bool = True) -> float:
        """Tokens per target forward if the drafter drafted these texts: the chain of drafts is
        walked as decoding would walk it."""
        spans = self.texts.held_out[kind]
        forwards = tokens = 0
        for first in range(0, len(spans), texts):
            part = spans[first : first + texts]
            blocks = self.texts.every_anchor(part, self.shape.block)
            agreed = self._agreed(blocks, corrected).cpu().numpy()
            for row, (_, end, answer) in zip(agreed, part):
                made, asked = walk(row, int(end - answer) - 1)
                tokens += made
                forwards += asked
        return tokens / max(1, forwards)

    def _agreed(self, blocks: Blocks, corrected: bool) -> Tensor:
        """How many drafted tokens after each anchor are those of the text, [B, A]."""
        slots = self.shape.block
        tokens = blocks.tokens(slots)
        x_BASE = self.hidden(blocks, tokens)
        agree = torch.ones_like(blocks.anchors_BA, dtype=torch.bool)
        count = torch.zeros_like(blocks.anchors_BA)
        for slot in range(1, slots):
            row = x_BASE[:, :, slot - 1 if self.shape.autoregressive else slot]
            logits = row @ self.head_EV
            if corrected and self.drafter.markov_head is not None:
                # where all before agree, the drafted token before is the text's
                logits = logits + self.drafter.markov_head(tokens[..., slot - 1]).to(self.dtype)
            if self.mask_place >= 0:
                logits[..., self.mask_place] = -torch.inf
            wanted = self._places(tokens[..., slot])
            agree = agree & (logits.argmax(-1) == wanted) & blocks.inside_BAS[..., slot]
            count += agree
        return count

    def _places(self, tokens: Tensor) -> Tensor:
        """Of tokens among those that are drafted."""
        return tokens if self.place_V is None else self.place_V[tokens]

    def _measure_and_save(self, losses: list[Tensor]) -> None:
        if not losses:
            return
        began = time.perf_counter()
        found = {kind: self.accepted(kind) for kind in ("chat", "code", "sampled")}
        found["plain"] = self.accepted(
            "chat", corrected=False
        )  # chat without the Markov correction
        loss = float(torch.stack(losses).mean())
        losses.clear()
        row = [self.step, self.elapsed, self.anchors, loss, self.learning_rate(), *found.values()]
        add_row(self.out / "drafter-curve.csv", dict(zip(CURVE, row, strict=True)))
        lengths = ", ".join(f"{kind} {value:.2f}" for kind, value in found.items())
        self.log(
            f"{self.elapsed:.0f} s, step {self.step}, {self.anchors / 1e6:.1f} M anchors, loss "
            f"{loss:.3f}, tokens per forward: {lengths} (measured in "
            f"{time.perf_counter() - began:.1f} s)"
        )
        self._save()

    def _save(self) -> None:
        state = dict(
            shape=asdict(self.shape),
            step=self.step,
            anchors=self.anchors,
            elapsed=self.elapsed,
            drafter=self.drafter.state_dict(),
            optimiser=self.optimiser.state_dict(),
        )
        unfinished = self.out / "drafter.tmp"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "drafter.pt")

    def _restore(self) -> None:
        file = self.out / "drafter.pt"
        if not file.exists():
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        stored = state["shape"] | {"target_layers": tuple(state["shape"]["target_layers"])}
        if stored != asdict(self.shape):
            raise BadOption(f"{file} is of another shape of drafter: choose another folder.")
        self._take_weights(state["drafter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.anchors = state["anchors"]
        self.elapsed = state["elapsed"]
        self.log(f"going on from step {self.step}, {self.elapsed:.0f} s")


def walk(agreed: np.ndarray, last: int) -> tuple[int, int]:
    """(tokens, target forwards) of a text whose draft after anchor i agrees for agreed[i] tokens;
    `last` is the number of its last token. Each forward gives what was accepted and one more."""
    at = forwards = 0
    while at < last:
        at = min(last, at + int(agreed[at]) + 1)
        forwards += 1
    return at, forwards


def read_recipe(file: str | None) -> DrafterRecipe:
    """A recipe from its YAML file; without one, the defaults."""
    if file is None:
        return DrafterRecipe()
    if not Path(file).is_file():
        raise BadOption(f"recipe {file!r} is not a file.")
    given = yaml.safe_load(Path(file).read_text()) or {}
    if not isinstance(given, dict):
        raise BadOption(f"recipe {file!r} must be a YAML mapping.")
    text = given.pop("text", {})
    for options, kind in ((given, DrafterRecipe), (text, TextOptions)):
        known = [one.name for one in fields(kind)]
        for key in options:
            if key not in known:
                raise unknown("recipe key", key, known)
    return DrafterRecipe(**given, text=TextOptions(**text))
