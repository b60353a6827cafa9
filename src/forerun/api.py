"""What a user holds: a loaded model that generates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch

from forerun import infilling, zoo
from forerun.arguments import Wish, check_drafts, check_for, check_not_empty, read_prompts, read_wish, room_after
from forerun.backbones.translated import translated
from forerun.checkpoints import causal, diffusion, tiny
from forerun.core import BLANK, AnySubset, Canvas, Conditional
from forerun.drafters.autoregressive import ModelDrafter
from forerun.drafters.lookup import LookupDrafter
from forerun.engine.cache import FOR_SLOTS, available_bytes, check_room, lanes_that_fit
from forerun.engine.serve import Backbone, Engine, Host, Questions, Ticket
from forerun.errors import BadOption, ForerunError, NoRoom, NotAble, unknown
from forerun.families.block import Block
from forerun.families.masked import Masked
from forerun.jobs import Job, Jobs, Stream, failed
from forerun.noise import Noise
from forerun.parameters import Sampling
from forerun.registry import family_for
from forerun.result import Result
from forerun.sampling import History

DEFAULT_LANES = 8
STEP = 256  # tokens; contexts that memory decides on are multiples of it
UNBOUNDED_CONTEXT = 1024  # for models that know only distances, such as XLNet, unless max_context says otherwise


def load(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    lanes: int | None = None,
    max_context: int | None = None,
    tensor_parallel: bool = False,
    graphs: bool | None = None,
) -> Model:
    """Load a model: a directory, a hub id, a .gguf file, 'zoo:NAME', 'smollm', or 'tiny[:ARCH[:SEED]]'.

    'MODEL+FOLDER' is a model with the adapters that a training run with `lora:` left in FOLDER added to its weights.
    `device` is cuda where there is one, else cpu. `dtype` is float32 on a cpu and the checkpoint's own on cuda, unless given.
    `lanes` is how many sequences are decoded at once; more requests than lanes wait. `max_context` bounds prompt plus output;
    without it that is as much as the model was made for and memory has room for.
    `tensor_parallel` splits every layer over the processes that `torchrun` started, all of which make the same requests.
    `graphs=False` runs every forward by its plain code; else, on cuda, forwards are captured as graphs where that is possible.
    """
    if not isinstance(model, str | os.PathLike):
        raise BadOption(f"model={model!r} must be a name or a path.")
    model, where = os.fspath(model), device_named(device)
    kind = dtype_named(dtype, where)
    for name, value in (("lanes", lanes), ("max_context", max_context)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise BadOption(f"{name}={value!r} must be a whole number, 1 or more.")
    name, (model, adapters) = model, causal.split_adapters(model)
    if tensor_parallel and adapters:
        raise NotAble(f"model={name!r}: adapters are added to whole layers, so it cannot be split with tensor_parallel.")
    if tensor_parallel and (model == "tiny" or model.startswith(("tiny:", "zoo:"))):
        raise NotAble(f"model={model!r} is too small to split: tensor_parallel is for checkpoints in a directory or on the hub.")
    if model == "tiny" or model.startswith("tiny:"):
        network, tokenizer = tiny.build(*tiny.parse(model), kind or torch.float32).to(where), tiny.tokenizer()
    elif model.startswith("zoo:"):
        network, tokenizer = zoo.load(model.removeprefix("zoo:"), kind or torch.float32, where)
    else:
        source = causal.find(model)
        raw = diffusion.read_raw_config(source)
        if raw is not None and tensor_parallel:
            raise NotAble(f"model={model!r} ({raw['model_type']}) is loaded by an adapter of ours, which does not split it yet.")
        if raw is not None and raw["model_type"] in diffusion.DIFFUSION_TRANSFORMERS:
            if adapters:
                raise NotAble(f"model={name!r}: adapters do not fit {raw['model_type']}, which the library does not know.")
            backbone, tokenizer = diffusion.load_diffusion_transformer(source, raw, where, kind, max_context)
            mask, blocks = backbone.vocab - 1, raw["model_type"] == "bd3lm"
            family = Block(mask, diffusion.block_size(model, raw) or 1) if blocks else Masked(mask)
            return Model(model, family, backbone, tokenizer, [raw.get("eos_token_id", 50256)], lanes, graphs=graphs)
        if raw is not None:
            network, tokenizer = diffusion.load(source, raw, where, kind)
        else:
            if not source.gguf:  # reading a GGUF's config takes as long as reading all of it, and from_network checks again
                causal.check_attention(causal.read_config(source), max_context)
            tokenizer = causal.load_tokenizer(source)
            network = causal.load_weights(source, where, kind, shared=tensor_parallel)
    if adapters:
        network = causal.with_adapters(network, adapters)
    return from_network(network, tokenizer, name=name, lanes=lanes, max_context=max_context, graphs=graphs)


def from_network(
    network: Any,
    tokenizer: Any | None,
    *,
    name: str = "model",
    lanes: int | None = None,
    max_context: int | None = None,
    graphs: bool | None = None,
) -> Model:
    """A model from a `transformers` causal LM that is in memory already."""
    causal.check_attention(network.config, max_context)
    config = network.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
    if max_context is not None and 0 < longest < max_context:
        raise BadOption(f"max_context={max_context} is more than the {longest} positions that '{name}' was made for.")
    context = max_context or (longest if longest > 0 else UNBOUNDED_CONTEXT)
    vocab = min(config.vocab_size, len(tokenizer)) if tokenizer is not None else config.vocab_size
    eos = causal.eos_ids(network, tokenizer)
    family = family_for(config)
    make_backbone = getattr(family, "backbone", causal.backbone_of)
    backbone = make_backbone(network, vocab, context)
    return Model(
        name, family, backbone, tokenizer, eos, lanes, graphs=graphs, context=max_context or fitting(backbone, family, lanes or 1)
    )


def fitting(backbone: Backbone, family: Any, lanes: int) -> int:
    """The most context that a model was made for of which some lanes fit into memory."""
    room = 0.95 * FOR_SLOTS * available_bytes(backbone.device)  # what fits now must still fit when the slots are made
    contexts = [backbone.context, *range(backbone.context // STEP * STEP, 0, -STEP)]
    return next((c for c in contexts if lanes * backbone.bytes_per_lane(family.slots(c)) <= room), backbone.context)


def device_named(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise BadOption(f"device={device!r} is not supported: use 'cpu' or 'cuda'.")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"device={device!r}: this machine has no usable CUDA device; use 'cpu'.")
    return where


def dtype_named(dtype: str | None, device: torch.device) -> torch.dtype | None:
    kinds = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    name = str(dtype).removeprefix("torch.")
    if name not in kinds:
        raise unknown("dtype", name, kinds)
    return kinds[name]


class Model:
    """A model that is ready to decode. Not for use from several threads at once."""

    def __init__(
        self,
        name: str,
        family: Any,
        backbone: Backbone,
        tokenizer: Any | None = None,
        eos: Sequence[int] | frozenset[int] = (),
        lanes: int | None = None,
        sample: Any = None,
        graphs: bool | None = None,
        context: int | None = None,
    ):
        self.name, self.family, self.backbone, self.tokenizer = name, family, backbone, tokenizer
        self.context, self.vocab = context or backbone.context, backbone.vocab
        self.eos = frozenset(token for token in eos if token < self.vocab)
        lanes = self._lanes(lanes)
        self.engine = Engine(lanes, sample or Noise, graphs)
        self._draft_hosts: dict[Model, tuple[Any, Host]] = {}
        self._draft_models: dict[str, Model] = {}

    @cached_property
    def host(self) -> Host:
        """This model's slots, made when they are first needed: a model that only drafts for another never needs its own."""
        return self.engine.host(self.backbone, self.family.slots(self.context), self.family.never)

    def _lanes(self, lanes: int | None) -> int:
        size = self.backbone.bytes_per_lane(self.family.slots(self.context))
        if lanes is None:
            lanes = min(DEFAULT_LANES, lanes_that_fit(size, self.backbone.device))
            if lanes < 1:
                raise NoRoom(f"'{self.name}' with max_context={self.context} does not fit even once: use a smaller max_context.")
        check_room(lanes, self.context, size, self.backbone.device)
        return lanes

    @overload
    def generate(self, prompt: str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Any = None, **options: Any) -> Any: ...

    def generate(self, prompt: Any = None, **options: Any) -> Any:
        """Decode a prompt (text or token ids), a list of them, or chat `messages=`; one Result each.

        With several prompts, or n above 1, a list comes back, the n samples of a prompt next to each other; there a prompt
        that cannot be decoded gives a Result with `error`, and the others are not harmed. Keywords are `method`, `draft`, the
        fields of `Sampling` and the options of the method and its drafter.
        """
        jobs = self.submit(prompt, **options)
        try:
            for _ in jobs:
                pass
        finally:
            jobs.cancel()
        return jobs.results() if jobs.several else jobs.only_result()

    def stream(self, prompt: Any = None, **options: Any) -> Stream:
        """Text as it is decided, piece by piece; for several prompts, pairs (index, piece). `close` cancels the rest."""
        return Stream(self.submit(prompt, text=True, **options))

    def submit(
        self,
        prompt: Any = None,
        *,
        messages: Any = None,
        method: str | None = None,
        draft: Any = None,
        text: bool = False,
        **options: Any,
    ) -> Jobs:
        """Queue requests; iterate over the jobs to serve them. `text` asks for pieces of text as they come."""
        wish = read_wish(method or self.family.default, draft, options)
        check_for(self, wish)
        prompts, several = read_prompts(self, prompt, messages)
        small = self.draft_model(draft, wish) if wish.needs_draft_model else None
        jobs = [self._job(wish, p, sample, small, text) for p in prompts for sample in range(wish.sampling.n)]
        several = several or wish.sampling.n > 1
        if not several and isinstance(jobs[0], Result) and jobs[0].error is not None:
            raise jobs[0].error
        return Jobs(self.engine, jobs, several)

    def _job(self, wish: Wish, prompt: list[int] | ForerunError, sample: int, small: Model | None, text: bool) -> Job | Result:
        """One request, or the result that says why there is none: a bad prompt fails alone."""
        try:
            if isinstance(prompt, ForerunError):
                raise prompt
            if small is not None:
                check_not_empty(prompt, small)
            shortest = min((m for m in (self, small) if m is not None), key=lambda m: m.context)
            sampling = wish.sampling
            room = room_after(prompt, sampling.max_tokens, sampling.min_tokens, shortest.context, shortest.name)
        except ForerunError as error:
            return failed(error, wish.method, self.name)
        return Job(self, wish, [*prompt, *[BLANK] * room], sample, self.drafter(wish, small), text)

    def infill(
        self, text: Any = None, *, token_ids: Any = None, method: str | None = None, draft: Any = None, **options: Any
    ) -> Any:
        """Fill the holes of a text: `<|fill:8|>` is a hole of eight tokens, `<|fill:4-12|>` one of four to twelve, the length with
        the highest joint density per token. Also {"prefix", "suffix", "max_tokens"}, or `token_ids` with None for every blank, or
        a list of any of these. One `Infilled` each; with n above 1, the n best or n samples.
        """
        requests, several = self.submit_infill(text, token_ids=token_ids, method=method, draft=draft, **options)
        try:
            self.engine.run()
        finally:
            for request in requests:
                for job in getattr(request, "jobs", ()):
                    self.engine.cancel(job.ticket)
        found = [r for request in requests for r in ([request] if isinstance(request, Result) else request.results())]
        if several or options.get("n", 1) > 1:
            return found
        if found[0].error is not None:
            raise found[0].error
        return found[0]

    def submit_infill(
        self, text: Any = None, *, token_ids: Any = None, method: str | None = None, draft: Any = None, **options: Any
    ) -> tuple[list[Any], bool]:
        """Queue texts with holes: a `Request` each, or the result that says why there is none; and whether there were several."""
        infilling.check_options(self, options)
        wish = read_wish(method or self.family.default, draft, options)
        check_for(self, wish)
        if (text is None) == (token_ids is None):
            raise BadOption("give either a text with holes or token_ids=, not both and not neither.")
        given, read_one = (text, infilling.read) if token_ids is None else (token_ids, infilling.of_ids)
        if token_ids is not None:
            if isinstance(given, str | bytes) or not isinstance(given, Iterable):
                raise BadOption(f"token_ids={given!r} must be a list of token ids, with None where one is missing.")
            given = [list(one) if isinstance(one, Iterable) and not isinstance(one, str) else one for one in given]
        several = isinstance(given, list | tuple) and (token_ids is None or (bool(given) and isinstance(given[0], list)))
        small = self.draft_model(draft, wish) if wish.needs_draft_model else None
        requests: list[Any] = []
        for one in given if several else [given]:
            try:
                requests.append(infilling.Request(self, wish, read_one(one), small))
            except ForerunError as error:
                if not several:
                    raise
                requests.append(infilling.failed(error, failed(error, wish.method, self.name)))
        for request in requests:
            for job in getattr(request, "jobs", ()):
                self.engine.submit(job.ticket)
        return requests, several

    def logprob(self, text: Any, completion: Any) -> float:
        """The joint log-probability, in nats, of what fills the holes of a text, under the model's own law: one forward.

        `completion` is a text, or one for each hole; `<|fill|>` is a hole of whatever length its completion has. A left-to-right
        model can score a hole at the end.
        """
        if Conditional not in self.family.answers:
            raise NotAble(
                f"'{self.name}' (family '{self.family.name}') does not score completions, it could only bound them: use an "
                f"any-subset model, such as 'zoo:any-subset'."
            )
        template = infilling.read(text)
        ids = infilling.token_ids(self, template)
        parts = infilling.completion_ids(self, template, completion)
        if AnySubset not in self.family.answers and (len(parts) > 1 or ids[-1]):
            raise NotAble(f"'{self.name}' goes from left to right: it can score one hole at the end of a text, and no other.")
        canvas, tokens = infilling.canvas_of(self, ids, [len(part) for part in parts]), [t for part in parts for t in part]
        history = History(Sampling(temperature=1.0, logprobs=0), np.zeros(0, np.int64), self.vocab, frozenset())
        seq, total = Canvas(canvas, history=history), []

        async def ask() -> None:
            await Questions(self.family, self.host).conditionals(seq, tokens[:-1])
            total.append(infilling.density(seq, tokens))

        ticket = self.engine.submit(Ticket(seq, ask))
        self.engine.run()
        if ticket.error is not None:
            raise ticket.error
        return total[0]

    def drafter(self, wish: Wish, small: Model | None) -> Any | None:
        """The drafter of one request, if it has one."""
        if wish.drafter is None:
            return None
        drawn_from: dict[str, Any] = {} if small is None else {"model": Questions(*self._draft_hosts[small], drafting=True)}
        if wish.drafter_options.get("first"):
            drawn_from["opening"] = self._opening(wish.drafter_options.get("first_draft", "lookup"))
        return wish.drafter(**drawn_from, **wish.drafter_options)

    def _opening(self, name: Any) -> Any:
        """What drafts the first tokens where a drafter leaves them to another."""
        if name == "lookup":
            return LookupDrafter()
        small = self.draft_model(name)
        if Conditional not in small.family.answers:
            raise NotAble(f"first_draft={small.name!r} (family '{small.family.name}') must be a left-to-right model, or 'lookup'.")
        if small.context < self.context:
            raise NotAble(
                f"first_draft={small.name!r} has a context of {small.context}: load '{self.name}' with max_context=, as much."
            )
        return ModelDrafter(Questions(*self._draft_hosts[small], drafting=True))

    def draft_model(self, draft: Any, wish: Wish | None = None) -> Model:
        """A draft model, loaded once, with lanes of its own in this model's engine; fit for what the wish asks of it."""
        if not isinstance(draft, Model):
            if draft not in self._draft_models:
                try:
                    self._draft_models[draft] = load(draft, device=str(self.backbone.device), lanes=1)
                except ForerunError as error:
                    raise type(error)(f"draft={draft!r}: {error}") from error
            draft = self._draft_models[draft]
        if wish is not None:
            check_drafts(draft, wish)
        if draft not in self._draft_hosts:
            family, backbone = translated(self, draft)
            context = min(self.context, draft.context)
            room = family.slots(context)
            check_room(self.engine.lanes, context, backbone.bytes_per_lane(room), backbone.device)
            self._draft_hosts[draft] = family, self.engine.host(backbone, room, family.never)
        return draft

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
