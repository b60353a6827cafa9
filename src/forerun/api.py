"""What a user holds: a loaded model that generates."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forerun.backbones import native
from forerun.backbones.features import FeatureBackbone
from forerun.backbones.lean import LeanBackbone
from forerun.backbones.translated import translated
from forerun.checkpoints import drafters, hub, resolve
from forerun.checkpoints.placement import check_quantize, device_named, dtype_named
from forerun.checkpoints.tokenizers import (
    Decode,
    decoder_of,
    fitting_count,
    stop_tokens,
)
from forerun.constraints.spec import ConstraintSpec
from forerun.constraints.vocabulary import Vocabulary
from forerun.drafters.autoregressive import ModelDrafter
from forerun.drafters.base import Drafter
from forerun.drafters.features import names_drafter
from forerun.drafters.lookup import LookupDrafter
from forerun.engine.backbone import Backbone
from forerun.engine.cache import FOR_SLOTS, available_bytes, check_room, lanes_that_fit
from forerun.engine.engine import Engine, MakeSampler
from forerun.engine.graphs import choose_kernels
from forerun.engine.host import Host
from forerun.engine.loop import Driver, EngineThread, InCaller
from forerun.engine.pages import PAGE, pages_for
from forerun.engine.schedule import Due
from forerun.engine.ticket import DecodingCoroutine, Ticket
from forerun.errors import BadOption, ForerunError, NoRoom, NotAble
from forerun.families.any_subset import SubsetScorer
from forerun.families.base import ChainScorer, Family, ModelHandle
from forerun.families.causal import TreeScorer
from forerun.options import Sampling, check_positive, check_whole
from forerun.probability.logits import TokenHistory
from forerun.probability.noise import Noise
from forerun.registry import Method, family_for
from forerun.requests.chat import Chat
from forerun.requests.healing import healing_of_prompt, text_before
from forerun.requests.infill import (
    Infilled,
    Infilling,
    canvas_of,
    check_infill,
    completion_ids,
    failed_infilling,
    joint_logprob,
    parse_text,
    piece_ids,
    read_texts,
)
from forerun.requests.jobs import (
    Completion,
    Failed,
    Job,
    Jobs,
    Progress,
    RequestJobs,
    Stream,
    failed_result,
)
from forerun.requests.model import Tokenizer
from forerun.requests.prompts import (
    Message,
    check_not_empty,
    encode,
    parse_prompts,
    room_after,
)
from forerun.requests.request import (
    DecodeRequest,
    check_draft_model,
    check_request,
    for_each_prompt,
    method_for,
    note_on_method,
    parse_request,
)
from forerun.requests.result import Result, promise_of
from forerun.requests.scoring import Score, check_scores, scorings
from forerun.requests.structure import with_constraint
from forerun.requests.tools import TAGGED, parse_tools, tool_format, tool_spec
from forerun.sequence.canvas import BLANK, Canvas

Prompt = str | Sequence[int]
Messages = Sequence[Message]

# What a checkpoint may recommend of how to sample.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DEFAULT_LANES = 8
SHARING_LANES = 64  # where lanes share memory: one that is empty costs nothing
STEP = 256  # tokens; contexts that memory decides on are multiples of it
# for models that know only distances, such as XLNet, unless max_context says otherwise
DEFAULT_CONTEXT = 2048  # of a checkpoint that names none
UNBOUNDED_CONTEXT = 1024


def load(  # noqa: PLR0913 - keywords of a public function
    model: str,
    *,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    lanes: int | None = None,
    max_context: int | None = None,
    memory: float | None = None,
    tensor_parallel: bool = False,
    graphs: bool | None = None,
    deterministic: bool | None = None,
    quantize: str | None = None,
) -> Model:
    """Load a model: a directory, a hub id, a .gguf file, 'zoo:NAME', 'smollm', or
    'tiny[:ARCH[:SEED]]'.

    `revision` is a branch, a tag or a commit of a hub id; 'OWNER/NAME@REVISION' says the same
    wherever a model is named. 'MODEL+FOLDER' adds the adapters that a training run with `lora:`
    left in FOLDER. `device` is cuda where there is one, else cpu. `dtype` is float32 on a cpu and
    the checkpoint's own on cuda. `lanes` is how many sequences are decoded at once; further
    requests wait. `max_context` bounds prompt plus output; the default is what the model was made
    for and memory has room for. `memory` is how many GiB of keys and values all lanes share: then
    no lane reserves a whole context, there may be many, and what does not fit waits or is computed
    again. `tensor_parallel` splits every layer over the processes that `torchrun` started, all of
    which make the same requests. `graphs=False` captures no forward as a CUDA graph.
    `deterministic` gives a text the same bits whatever is decoded beside it, and by whichever exact
    method: on a GPU, for models of the Llama shape; there it is the default in half precision.
    `quantize` ('int8', 'int4', and 'fp8' on a GPU) keeps a model's matrices in so many bits: a
    model of its own, to which exact methods are exact.
    """
    if not isinstance(model, str | os.PathLike):
        raise BadOption(f"model={model!r} must be a name or a path.")
    for name, value in (("lanes", lanes), ("max_context", max_context)):
        if value is not None:
            check_whole(name, value)
    check_quantize(quantize)
    model = os.fspath(model)
    where = device_named(device)
    kind = dtype_named(dtype, where)
    if where.type == "cpu":
        native.begin_compiling(kind, quantize)
    loaded = resolve.load_network(
        model,
        where,
        kind,
        max_context=max_context,
        tensor_parallel=tensor_parallel,
        revision=revision,
    )
    if revision is not None:
        model = f"{model}@{revision}"
    if isinstance(loaded, resolve.LoadedBackbone):
        if quantize is not None:
            raise NotAble(f"quantize={quantize!r}: '{model}' is not of the Llama shape.")
        choose_kernels(loaded.backbone, deterministic, model)
        parts = (loaded.family, loaded.backbone, loaded.tokenizer, loaded.eos)
        return Model(model, *parts, lanes=lanes, graphs=graphs, memory=memory)
    made = from_network(
        loaded.network,
        loaded.tokenizer,
        name=model,
        lanes=lanes,
        max_context=max_context,
        memory=memory,
        graphs=graphs,
        deterministic=deterministic,
        quantize=quantize,
    )
    if tensor_parallel:  # every process must take the same steps in the same order
        made.driver = InCaller(made.engine)
    return made


def from_network(  # noqa: PLR0913 - keywords of a public function
    network: Any,
    tokenizer: Any | None,
    *,
    name: str = "model",
    lanes: int | None = None,
    max_context: int | None = None,
    memory: float | None = None,
    graphs: bool | None = None,
    deterministic: bool | None = None,
    quantize: str | None = None,
) -> Model:
    """A model from a `transformers` causal LM that is in memory already."""
    check_quantize(quantize)
    hub.check_attention(network.config, max_context)
    config = network.config.get_text_config()
    longest = longest_context(config)
    if max_context is not None and 0 < longest < max_context:
        raise BadOption(
            f"max_context={max_context} is more than the {longest} positions that '{name}' was "
            f"made for."
        )
    context = max_context or (longest if longest > 0 else UNBOUNDED_CONTEXT)
    family = family_for(config)
    vocab = config.vocab_size
    if tokenizer is not None:
        vocab = fitting_count(name, tokenizer, vocab)
    eos = _stop_tokens(network, tokenizer, family)
    backbone = family.backbone(network, vocab, context)
    if backbone is None:
        backbone = hub.backbone_of(network, vocab, context, quantize)
    elif quantize is not None:
        raise NotAble(f"quantize={quantize!r}: family '{family.name}' has a backbone of its own.")
    choose_kernels(backbone, deterministic, name)
    made = Model(
        name,
        family,
        backbone,
        tokenizer,
        eos,
        lanes=lanes,
        graphs=graphs,
        context=max_context or fitting(backbone, family, 1 if memory else lanes or 1, memory),
        memory=memory,
    )
    made.generation_config = getattr(network, "generation_config", None)
    return made


def _stop_tokens(network: Any, tokenizer: Any | None, family: Family) -> list[int]:
    """What ends a text: as `generate` has it and the tokenizer says. Models that fill blanks were
    published with samplers of their own, so there all files count."""
    generation = getattr(network, "generation_config", None)
    if not family.can(TreeScorer):
        return stop_tokens(tokenizer, generation, network.config, turn_ends=True)
    told = getattr(generation, "eos_token_id", None) is not None
    return stop_tokens(tokenizer, generation if told else network.config)


def longest_context(config: Any) -> int:
    """The positions that a checkpoint was made for; -1 where there is no limit."""
    for name in ("max_position_embeddings", "n_positions"):
        positions = getattr(config, name, None)
        if positions:
            rope = getattr(config, "rope_parameters", None) or {}
            stretched = rope.get("rope_type") == "dynamic"
            return int(positions * rope.get("factor", 1)) if stretched else positions
    return DEFAULT_CONTEXT


def fitting(backbone: Backbone, family: Family, lanes: int, memory: float | None = None) -> int:
    """The most context that a model was made for of which some lanes fit into memory."""
    # What fits now must still fit when the slots are made.
    room = 0.95 * FOR_SLOTS * available_bytes(backbone.device)
    if memory is not None:
        room = memory * 2**30 - backbone.bytes_per_lane(PAGE)  # which may be half empty
    contexts = [backbone.context, *range(backbone.context // STEP * STEP, 0, -STEP)]
    return next(
        (c for c in contexts if lanes * backbone.bytes_per_lane(family.slots(c)) <= room),
        backbone.context,
    )


class DecodePlan(NamedTuple):
    """How a prompt is to be decoded, and with which draft model."""

    request: DecodeRequest
    draft_model: Model | None


class Model:
    """A model that is ready to decode, from any thread and in any event loop.

    Its engine runs in a thread of its own; with `threaded=False`, whoever waits runs it.
    """

    def __init__(  # noqa: PLR0913 - what a model is made of
        self,
        name: str,
        family: Family,
        backbone: Backbone,
        tokenizer: Tokenizer | None = None,
        eos: Collection[int] = (),
        *,
        lanes: int | None = None,
        context: int | None = None,
        graphs: bool | None = None,
        sampler: MakeSampler = Noise,
        threaded: bool = True,
        memory: float | None = None,
    ):
        self.name = name
        self.family = family
        self.backbone = backbone
        quantize = getattr(backbone, "quantize", None)
        self.weights = f" in {quantize}" if quantize else ""
        self.tokenizer = tokenizer
        self._decoder: tuple[Any, Decode] | None = None
        self.context = context or backbone.context
        self.vocab = backbone.vocab
        self.eos = frozenset(token for token in eos if token < self.vocab)
        slots = None if memory is None else self._slots(memory)
        lanes = self._lanes(lanes) if slots is None else lanes or SHARING_LANES
        self.engine = Engine(lanes, sampler, graphs, slots)
        self.driver: Driver = InCaller(self.engine)
        if threaded:
            self.driver = EngineThread(self.engine, backbone.device)
        self._adding = threading.RLock()  # models to the engine
        self.generation_config: Any = None  # of `transformers`, where the checkpoint has one
        self._host: Host | None = None
        self._draft_hosts: dict[Model, tuple[Family, Host]] = {}
        self._draft_models: dict[tuple[str, str | None], Model] = {}  # by name and bits
        self.vocabulary: Vocabulary | None = None
        if tokenizer is not None:
            self.vocabulary = Vocabulary(self.vocab, tokenizer)

    def twin(self, lanes: int = 1, *, threaded: bool = True) -> Model:
        """The same weights behind an engine of their own."""
        return Model(
            self.name,
            self.family,
            self.backbone,
            self.tokenizer,
            self.eos,
            lanes=lanes,
            context=self.context,
            threaded=threaded,
        )

    def close(self) -> None:
        """End what still runs, with an error for whoever waits for it, and let go of the cache.
        A closed model refuses further requests; closing it again does nothing."""
        self.driver.close()
        self.engine.hosts.clear()
        self._host = None
        self._draft_hosts.clear()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"{self.backbone.device}, {str(self.backbone.dtype).removeprefix('torch.')}"
        return (
            f"<forerun.Model '{self.name}': family '{self.family.name}', {where}, "
            f"lanes={self.lanes}, max_context={self.context}>"
        )

    @property
    def host(self) -> Host:
        """This model's slots, made when they are first needed: a model that only drafts for another
        never needs its own."""
        if self._host is None:
            with self._adding:
                self._host = self._host or self._add(self.family, self.backbone, self.context)
        return self._host

    def _add(self, family: Family, backbone: Backbone, context: int) -> Host:
        return self.engine.add_model(backbone, family.slots(context), family.impossible_tokens)

    @property
    def lanes(self) -> int:
        """How many sequences are decoded at once."""
        return self.engine.lanes

    def handle(self) -> ModelHandle:
        """What a method holds of this model."""
        return self.family.handle(self.family, self.host)

    def _lanes(self, lanes: int | None) -> int:
        size = self.backbone.bytes_per_lane(self.family.slots(self.context))
        if lanes is None:
            lanes = min(DEFAULT_LANES, lanes_that_fit(size, self.backbone.device))
            if lanes < 1:
                raise NoRoom(
                    f"'{self.name}' with max_context={self.context} does not fit even once: use a "
                    f"smaller max_context."
                )
        check_room(lanes, self.context, size, self.backbone.device)
        return lanes

    def _slots(self, memory: float) -> int:
        """How many slots so many GiB hold, for all lanes together."""
        if not isinstance(memory, int | float) or not memory > 0:
            raise BadOption(f"memory={memory!r} must be a number of GiB above 0.")
        whole = pages_for(self.family.slots(self.context)) * PAGE
        slots = int(memory * 2**30) // self.backbone.bytes_per_lane(1)
        free = int(available_bytes(self.backbone.device) * FOR_SLOTS)
        if slots < whole or memory * 2**30 > free:
            least = self.backbone.bytes_per_lane(whole) / 2**30
            raise NoRoom(
                f"memory={memory}: one text of max_context={self.context} needs {least:.3g} GiB of "
                f"keys and values, and {free / 2**30:.3g} are free on {self.backbone.device}."
            )
        return slots

    def generate(  # noqa: PLR0913 - keywords of a public function
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        method: str | Method | Sequence[str | Method] | None = None,
        draft: str | Model | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_tokens: Sequence[int] | None = None,
        min_tokens: int = 0,
        stop: Sequence[str] | str = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        heal: bool = True,
        seed: int = 0,
        n: int = 1,
        logprobs: int | None = None,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | ConstraintSpec | None = None,
        choices: Sequence[str] | None = None,
        grammar_engine: str = "llguidance",
        progress: Progress = None,
        **options: Any,
    ) -> Any:
        """Decode a prompt (text, token ids or chat messages), a list of them, or `messages=`.

        One prompt gives a `Result`. Several prompts, or n above 1, give a list, the n samples of a
        prompt next to each other; there a prompt that cannot be decoded gives a Result with
        `error`, the others are not harmed, and a warning counts the errors. `raise_errors=True`
        raises the first instead.

        The sampling parameters are those of `Sampling`; `sampling=` takes them together. With a
        list of prompts, `method`, `draft`, `sampling`, `options` and all parameters that are
        single numbers may be lists as well, with one value for each prompt. With `heal`, the last
        tokens of a text are chosen anew where it may end inside a token; token ids and chats are
        taken as they are. `progress` is called with (results so far, of how many); True shows a
        bar. `options` are the options of the method and its drafter, and those of `submit`.
        """
        jobs = self.submit(
            prompt,
            messages=messages,
            method=method,
            draft=draft,
            sampling=sampling,
            **sampling_arguments(locals()),
            **options,
        )
        jobs.run(progress)
        return jobs.outcome()

    def generate_all(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Decode a list of prompts. The first error is raised. The options are those of
        `generate`."""
        return _without_errors(self.submit(list(prompts), **options))

    def stream(  # noqa: PLR0913 - keywords of a public function
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        method: str | Method | Sequence[str | Method] | None = None,
        draft: str | Model | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_tokens: Sequence[int] | None = None,
        min_tokens: int = 0,
        stop: Sequence[str] | str = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        heal: bool = True,
        seed: int = 0,
        n: int = 1,
        logprobs: int | None = None,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | ConstraintSpec | None = None,
        choices: Sequence[str] | None = None,
        grammar_engine: str = "llguidance",
        **options: Any,
    ) -> Stream:
        """Text as it is decided, piece by piece; for several prompts, pairs (index, piece).

        Iterate with `for` or `async for`. `close` cancels the rest. An error of one of several
        prompts is told by a warning at the end, or raised there with `raise_errors=True`. The
        arguments are those of `generate`.
        """
        jobs = self.submit(
            prompt,
            messages=messages,
            method=method,
            draft=draft,
            sampling=sampling,
            streams=True,
            **sampling_arguments(locals()),
            **options,
        )
        return Stream(jobs)

    def submit(  # noqa: PLR0913 - keywords of a public function
        self,
        prompt: Prompt | Messages | Sequence[Prompt | Messages] | None = None,
        *,
        messages: Messages | Sequence[Messages] | None = None,
        method: str | Method | Sequence[str | Method] | None = None,
        draft: str | Model | None = None,
        streams: bool = False,
        traces: bool = False,
        prompt_logprobs: int | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        template_options: Mapping[str, Any] | None = None,
        raise_errors: bool = False,
        record: bool = False,
        priority: int = 0,
        deadline: float | None = None,
        allow_partial: bool = False,
        **options: Any,
    ) -> Jobs:
        """Have requests served, and return at once. With `streams`, iterating over the jobs yields
        pieces of text as they come; with `traces`, the events of their traces too.

        `prompt_logprobs` also gives the log-probabilities of the prompt's tokens, with so many
        alternatives each. `tools` (in the OpenAI form, or Python functions) and `template_options`
        go to the chat template; the calls that an answer makes are in its `tool_calls`.
        `tool_choice` constrains it: "auto" to text and well-formed calls, "required" to calls, a
        tool's name to a call of that one. `options` may be an object of the method's own options
        class. `record` keeps everything that a trace can show, laws and canvases too, as
        `Result.recorded`. Of requests that wait, those of higher `priority` go first. `deadline` is
        in seconds from now: a request that would miss it is refused early (`TooLate`), and one that
        does ends with the text that it has. With `allow_partial` that will do: only what would have
        no text at all is refused. The other arguments are those of `generate`.
        """
        template = dict(template_options or {})
        form = None
        if tools is not None:
            template["tools"] = list(tools)
            form = tool_format(getattr(self.tokenizer, "chat_template", None))
        if tool_choice is not None:
            spec = tool_spec(parse_tools(tools or []), tool_choice, form or TAGGED)
            options = with_constraint(options, spec)
        prompts = parse_prompts(self, prompt, messages, template)
        given = {**options, "method": method, "draft": draft}
        plans = self._plans(for_each_prompt(len(prompts.ids), given))
        if prompt_logprobs is not None:
            check_whole("prompt_logprobs", prompt_logprobs, 0, 100)
            check_scores(self)
        several = prompts.several or plans[0].request.sampling.n > 1
        completions: list[RequestJobs] = []
        for ids, plan in zip(prompts.ids, plans):
            try:
                jobs = self._jobs(ids, plan, streams)
                completions.append(Completion(jobs, prompt_logprobs, form))
            except ForerunError as error:
                if not several:
                    raise
                request = plan.request
                promise = promise_of(request.method, request.options, self.name)
                result = failed_result(error, promise)
                completions.append(Failed([result] * request.sampling.n))
        if record:
            record_all(completions)
        self._schedule(completions, priority, deadline, allow_partial)
        return Jobs(self.driver, completions, several, raise_errors, traces)

    def _schedule(
        self,
        requests: Sequence[RequestJobs],
        priority: int,
        deadline: float | None,
        allow_partial: bool,
    ) -> None:
        """Say when some requests go, and by when they must be over."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise BadOption(f"priority={priority!r} must be a whole number: higher goes first.")
        due = None
        if deadline is not None:
            check_positive("deadline", deadline)
            due = Due(float(deadline), self.host, allow_partial)
        for job in (job for request in requests for job in request.jobs):
            job.ticket.priority = priority
            job.ticket.due = due

    def _plans(self, arguments: Sequence[Mapping[str, Any]]) -> list[DecodePlan]:
        """How each prompt is to be decoded. The same arguments are checked once."""
        plans: dict[int, DecodePlan] = {}
        for given in arguments:
            if id(given) not in plans:
                plans[id(given)] = self._plan(**given)
        return [plans[id(given)] for given in arguments]

    def _plan(
        self, method: str | Method | None, draft: str | Model | None, **options: Any
    ) -> DecodePlan:
        request = parse_request(method_for(self.family, method), draft, options)
        request = replace(request, note=note_on_method(self.family, method))
        check_request(self, request)
        if request.asks_costs:
            _ = self.host  # it must be there when the engine finds out what forwards cost
        draft_model = self.draft_model(draft, request) if request.needs_draft_model else None
        return DecodePlan(request, draft_model)

    def _jobs(self, ids: list[int] | ForerunError, plan: DecodePlan, streams: bool) -> list[Job]:
        """A job for each sample of a prompt."""
        request, draft_model = plan
        canvas = self._canvas(ids, request.sampling, draft_model)
        assert not isinstance(ids, ForerunError), "raised"
        longest = self.context if draft_model is None else min(self.context, draft_model.context)
        healing = healing_of_prompt(self, request.sampling, ids, longest - canvas.count(BLANK))
        before = text_before(self, ids, healing)
        return [
            Job(
                self,
                request,
                canvas,
                self._drafter(request, draft_model),
                sample=sample,
                streams=streams,
                healing=healing,
                before=before,
            )
            for sample in range(request.sampling.n)
        ]

    def _canvas(
        self, prompt: list[int] | ForerunError, sampling: Sampling, draft_model: Model | None
    ) -> list[int]:
        """A prompt and the blanks after it, as many as target and draft model have room for."""
        if isinstance(prompt, ForerunError):
            raise prompt
        shortest: Model = self
        if draft_model is not None:
            check_not_empty(prompt, draft_model)
            if draft_model.context < self.context:
                shortest = draft_model
        room = room_after(prompt, shortest, sampling.max_tokens, sampling.min_tokens)
        return [*prompt, *[BLANK] * room]

    async def agenerate(self, prompt: Any = None, **options: Any) -> Any:
        """`generate` for an event loop, which goes on meanwhile. Cancelling the task cancels the
        request."""
        jobs = self.submit(prompt, **options)
        await jobs.arun()
        return jobs.outcome()

    async def astream(self, prompt: Any = None, **options: Any) -> AsyncIterator[Any]:
        """`stream` for an event loop, which goes on between two pieces. Leaving the loop, or
        cancelling the task, cancels the rest."""
        async for piece in self.stream(prompt, **options):
            yield piece

    def infill(  # noqa: PLR0913 - keywords of a public function
        self,
        text: Any = None,
        *,
        token_ids: Any = None,
        method: str | Method | None = None,
        draft: str | Model | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_tokens: Sequence[int] | None = None,
        heal: bool = True,
        seed: int = 0,
        n: int = 1,
        logprobs: int | None = None,
        schema: Any = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
        holes: Sequence[Any] | None = None,
        progress: Progress = None,
        **options: Any,
    ) -> Any:
        """Fill the holes of a text: `<|fill:8|>` is a hole of eight tokens, `<|fill:4-12|>` one of
        four to twelve, the length with the highest joint density per token.

        Also {"prefix", "suffix", "max_tokens"}, or `token_ids` with None for every blank, or a list
        of any of these. One `Infilled` each; with n above 1, the n best or n samples. The arguments
        are those of `generate`, less those that say where a text ends.

        With `heal`, tokens beside a hole are chosen anew, as the text may be cut inside a token:
        the bytes that are given stay.

        `regex`, `choices` or `schema` say what every hole must hold. `holes` says it one by one:
        [{"choices": ["left", "right"]}, {"regex": "[0-9]+"}, None].
        """
        jobs = self.submit_infill(
            text,
            token_ids=token_ids,
            method=method,
            draft=draft,
            holes=holes,
            **sampling_arguments(locals()),
            **options,
        )
        jobs.run(progress)
        return jobs.outcome()

    def submit_infill(  # noqa: PLR0913 - keywords of a public function
        self,
        text: Any = None,
        *,
        token_ids: Any = None,
        method: str | Method | None = None,
        draft: str | Model | None = None,
        traces: bool = False,
        holes: Sequence[Any] | None = None,
        raise_errors: bool = False,
        record: bool = False,
        priority: int = 0,
        deadline: float | None = None,
        allow_partial: bool = False,
        **options: Any,
    ) -> Jobs:
        """Have texts with holes filled, and return at once. With `traces`, iterating over the jobs
        yields the events of their traces. `record`, `priority`, `deadline` and `allow_partial` are
        those of `submit`."""
        check_infill(self, options)
        request, draft_model = self._plan(method, draft, **options)
        check_infill(self, vars(request.sampling))
        texts = read_texts(text, token_ids)
        several = texts.several or request.sampling.n > 1
        make_drafter = partial(self._drafter, request, draft_model)
        infillings: list[RequestJobs] = []
        for one in texts.given:
            try:
                template = texts.parse(one)
                infillings.append(Infilling(self, request, template, make_drafter, holes))
            except ForerunError as error:
                if not texts.several:
                    raise
                promise = promise_of(request.method, request.options, self.name)
                infillings.append(Failed([failed_infilling(error, promise)]))
        if record:
            record_all(infillings)
        self._schedule(infillings, priority, deadline, allow_partial)
        return Jobs(self.driver, infillings, several, raise_errors, traces)

    def infill_all(
        self, canvases: Sequence[Sequence[int | None]], **options: Any
    ) -> list[Infilled]:
        """Fill a list of canvases, token ids with None for every blank. The first error is raised.
        The options are those of `infill`."""
        results = _without_errors(
            self.submit_infill(token_ids=list(map(list, canvases)), **options)
        )
        return [result for result in results if isinstance(result, Infilled)]

    def score(
        self, prompt: Prompt | Sequence[Prompt], continuations: Sequence[Prompt]
    ) -> list[Score]:
        """How likely the model finds each continuation of a prompt, or each of its own prompt: all
        in as few forwards as there are lanes for."""
        asked = scorings(self, prompt, continuations)
        self.run_all([one.ticket for one in asked])
        return [one.score() for one in asked]

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Messages = (),
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Chat:
        """A conversation: `send` a text, and the answer comes back. `messages` are those that were
        said before; `options` are those of `generate`, for all turns."""
        template = dict(template_options or {})
        if tools is not None:
            template["tools"] = list(tools)
        first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return Chat(self, [*first, *messages], template, options)

    def default_sampling(self, **changes: Any) -> Sampling:
        """The sampling parameters that the checkpoint's generation_config.json recommends, for
        `sampling=`; greedy where it recommends none."""
        told = self.generation_config.to_diff_dict() if self.generation_config is not None else {}
        known = {name: told[name] for name in RECOMMENDED if told.get(name) is not None}
        if told.get("do_sample"):
            known = {"temperature": 1.0, **known}
        else:
            known = {name: known[name] for name in known if name == "repetition_penalty"}
        return Sampling(**{**known, **changes})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Text as token ids, with the `special` tokens that its tokenizer puts around it."""
        return encode(self, text, special)

    def logprob(self, text: Any, completion: Any) -> float:
        """The joint log-probability, in nats, of what fills the holes of a text, under the model's
        own law: one forward.

        `completion` is a text, or one for each hole; `<|fill|>` is a hole of whatever length its
        completion has. A left-to-right model can score a hole at the end.
        """
        check_scores(self)
        template = parse_text(text)
        pieces = piece_ids(self, template)
        parts = completion_ids(self, template, completion)
        if not self.family.can(SubsetScorer) and (len(parts) > 1 or pieces[-1]):
            raise NotAble(
                f"'{self.name}' goes from left to right: it can score one hole at the end of a "
                f"text, and no other."
            )
        canvas = canvas_of(self, pieces, [len(part) for part in parts])
        tokens = [token for part in parts for token in part]
        seq = self.canvas(canvas, Sampling(temperature=1.0, logprobs=0))
        found: list[float] = []

        async def ask() -> None:
            target = self.handle()
            assert isinstance(target, ChainScorer)
            await target.conditionals(seq, tokens[:-1])
            found.append(joint_logprob(seq, tokens))

        self.run_to_end(seq, ask)
        return found[0]

    def canvas(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        stop_tokens: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> Canvas:
        """A canvas of this model's tokens, for those who drive a handle by themselves."""
        given = np.asarray([token for token in tokens if token != BLANK], np.int64)
        history = TokenHistory(sampling, given, self.vocab, stop_tokens)
        return Canvas(tokens, history=history, seed=seed)

    def run_to_end(self, seq: Canvas, start: Callable[[], DecodingCoroutine]) -> None:
        """Run a coroutine on this model's engine until it returns; its error is raised."""
        ticket = Ticket(seq, start)
        self.run_all([ticket])
        if ticket.error is not None:
            raise ticket.error

    def run_all(self, tickets: Sequence[Ticket]) -> None:
        """Have some tickets served, and wait for all of them."""
        left = set(tickets)
        over = threading.Event()

        def changed(ticket: Ticket) -> None:
            if ticket.over:
                left.discard(ticket)
            if not left:
                over.set()

        for ticket in tickets:
            ticket.on_change = partial(changed, ticket)
        self.driver.submit(tickets)
        try:
            self.driver.wait(over)
        finally:
            for ticket in tickets:
                self.driver.cancel(ticket)

    def _drafter(self, request: DecodeRequest, draft_model: Model | None) -> Drafter | None:
        """A drafter for one sequence, if the request has one."""
        if request.drafter_class is None:
            return None
        options = dict(request.drafter_options)
        if isinstance(options.get("prediction"), str) and self.tokenizer is not None:
            options["prediction"] = self.encode(options["prediction"], special=False)
        if draft_model is not None:
            options["model"] = self._draft_handle(draft_model)
        if options.get("first"):
            options["opening"] = self._opening_drafter(options.get("first_draft", "lookup"))
        make: Callable[..., Drafter] = request.drafter_class
        return make(**options)

    def _draft_handle(self, draft_model: Model) -> ModelHandle:
        family, host = self._draft_hosts[draft_model]
        return family.handle(family, host, drafting=True)

    def _opening_drafter(self, name: str | Model) -> Drafter:
        """What drafts the first tokens where a drafter leaves them to another."""
        if name == "lookup":
            return LookupDrafter()
        draft_model = self.draft_model(name)
        handle = self._draft_handle(draft_model)
        if not isinstance(handle, ChainScorer):
            raise NotAble(
                f"first_draft={draft_model.name!r} (family '{draft_model.family.name}') must be a "
                f"left-to-right model, or 'lookup'."
            )
        if draft_model.context < self.context:
            raise NotAble(
                f"first_draft={draft_model.name!r} has a context of {draft_model.context}: load "
                f"'{self.name}' with max_context=, as much."
            )
        return ModelDrafter(handle)

    def draft_model(self, draft: str | Model | None, request: DecodeRequest | None = None) -> Model:
        """A draft model, loaded once, with lanes of its own in this model's engine; fit for what
        the request asks of it."""
        with self._adding:
            greedy = request is not None and not request.sampling.temperature
            model = draft if isinstance(draft, Model) else self._loaded_draft(str(draft), greedy)
            if request is not None:
                check_draft_model(model, request)
            if model not in self._draft_hosts:
                self._add_draft_model(model)
            return model

    def _feature_drafter(self, name: str, bits: str | None) -> Model:
        """A drafter that looks into this model, as a draft model."""
        if not isinstance(self.backbone, LeanBackbone):
            raise NotAble(
                f"draft={name!r} looks into its target, and '{self.name}' does not show its hidden "
                "states: that is for the Llama shape (llama, mistral, qwen2, qwen3)."
            )
        folder = drafters.find_drafter(name, self.name, self.backbone)
        drafter = drafters.read_drafter(folder, self.backbone.dtype, self.backbone.device)
        backbone = FeatureBackbone(drafter, self.backbone, name, bits)
        how = self.vocab, backbone.embedded, backbone.markov_after
        family = drafters.family_of(drafter, *how)
        return Model(name, family, backbone, self.tokenizer, lanes=1, threaded=False)

    def _look_into(self, backbone: FeatureBackbone, host: Host) -> None:
        """Give a drafter's rows the hidden states that this model's forwards leave in its slots."""
        self.host.ask_features(backbone.drafter.shape.target_layers)
        host.looks_into = self.host
        backbone.source = self.host.slots

    def _add_draft_model(self, model: Model) -> None:
        family, backbone = translated(self, model)
        context = min(self.context, model.context)
        size = backbone.bytes_per_lane(family.slots(context))
        if self.engine.slots is None:
            check_room(self.engine.lanes, context, size, backbone.device)
        self.host  # noqa: B018 - the engine takes the first one for the target
        host = self._add(family, backbone, context)
        if isinstance(backbone, FeatureBackbone):
            self._look_into(backbone, host)
        self._draft_hosts[model] = (family, host)

    def _loaded_draft(self, name: str, greedy: bool) -> Model:
        if names_drafter(name):
            # Rows of a block share each weight, so that fewer than 8 bits bring little.
            bits = self._draft_bits(greedy) and "int8"
            if (name, bits) not in self._draft_models:
                self._draft_models[name, bits] = self._feature_drafter(name, bits)
            return self._draft_models[name, bits]
        try:
            return self._in_bits(name, self._draft_bits(greedy))
        except ForerunError as error:
            raise type(error)(f"draft={name!r}: {error}") from error

    def _draft_bits(self, greedy: bool) -> str | None:
        """How a draft model is quantised: as its target is. On a CPU in 8 bits at most, where that
        changes no text: greedy drafts need not be right, and are read a token at a time."""
        quantize: str | None = getattr(self.backbone, "quantize", None)
        on_cpu = self.backbone.device.type == "cpu"
        if quantize is None and greedy and on_cpu and native.runs_floats(self.backbone.dtype):
            return "int8"
        return quantize

    def _in_bits(self, name: str, quantize: str | None) -> Model:
        """A draft model on the target's device, in its numbers: in float32 it would cost more than
        the target that it drafts for. Quantised where it can be, and loaded once."""
        key = (name, quantize)
        if key in self._draft_models:
            return self._draft_models[key]
        numbers = self.backbone.dtype
        dtype = str(numbers).removeprefix("torch.") if numbers.itemsize == 2 else None
        how: dict[str, Any] = dict(device=str(self.backbone.device), dtype=dtype, lanes=1)
        try:
            self._draft_models[key] = load(name, **how, quantize=quantize)
        except NotAble:
            if quantize is None:
                raise
            self._draft_models[key] = self._in_bits(name, None)
        return self._draft_models[key]

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of some tokens; with `special`, also of those that stand for no text."""
        if self.tokenizer is None:
            return ""
        if self._decoder is None or self._decoder[0] is not self.tokenizer:
            self._decoder = (self.tokenizer, decoder_of(self.tokenizer))
        return self._decoder[1](list(tokens), not special)


def record_all(requests: Sequence[RequestJobs]) -> None:
    """Have the traces of some requests show everything they can."""
    for request in requests:
        for job in request.jobs:
            job.record()


def sampling_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the arguments of a call, which `locals()` holds."""
    return {name: arguments[name] for name in Sampling.names() if name in arguments}


def _without_errors(jobs: Jobs) -> list[Result]:
    """All results of some jobs. The first error is raised."""
    jobs.run()
    results = jobs.results()
    for result in results:
        if result.error is not None:
            raise result.error
    return results
