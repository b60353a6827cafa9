"""The door in `transformers`' own `generate`: `network.generate(…, custom_generate=
forerun.custom_generate)` decodes by our methods.

`generate` prepares prompts, logits processors and stopping criteria as it always does. Processors
become our sampling parameters, or are refused by name. Criteria are asked after every token, as
`generate` asks them; a streamer gets every token.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from forerun.api import Model, from_network
from forerun.engine.loop import InCaller
from forerun.errors import BadOption, NotAble
from forerun.requests.jobs import Job, Jobs

KEPT_AT = "_forerun_model"  # on the network, so that it is made once
ANSWERS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
NO_EFFECT = (processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization)


def custom_generate(  # noqa: PLR0913 - what `generate` passes, and ours
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    streamer: Any = None,
    method: str | None = None,
    draft: str | Model | None = None,
    method_options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode by a method of ours. Pass it as `custom_generate=` to a network's `generate`, with
    `method=`, `draft=`, `method_options={…}` and `seed=` beside it where they are wanted. Without a
    seed, torch's own generator gives one."""
    _check(model, input_ids, generation_config)
    kept = _kept_model(model)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    options = sampling_of(logits_processor, generation_config, input_ids.shape[1])
    if seed is None:
        seed = int(torch.randint(2**31 - 1, (1,))) if options["temperature"] else 0
    if streamer is None:
        streamer = _streamer_of_caller()
    with kept.lock:
        jobs = kept.model.submit(
            prompts,
            method=method,
            draft=draft,
            raise_errors=True,
            max_tokens=generation_config.max_length - input_ids.shape[1],
            seed=[seed + row for row in range(len(prompts))],
            **options,
            **(method_options or {}),
        )
        rows = Rows(jobs, input_ids, _asked(stopping_criteria), streamer)
        outputs = rows.run()
    return _sequences(input_ids, outputs, generation_config)


def _check(network: Any, input_ids: Tensor, config: Any) -> None:
    """Refuse what our methods do not do."""
    if config is None or input_ids.shape[1] == 0:
        raise BadOption(
            "custom_generate is called by a network's generate(), with input_ids: "
            "network.generate(input_ids, custom_generate=forerun.custom_generate)."
        )
    if config.num_beams != 1:
        raise NotAble(f"num_beams={config.num_beams}: no method of ours searches by beams; use 1.")
    asked = [name for name in ANSWERS if getattr(config, name, None)]
    if asked:
        raise NotAble(f"{', '.join(asked)}: only sequences are returned; leave it out.")


# --- the model ------------------------------------------------------------------


@dataclass
class KeptModel:
    """Our model of a network, for as long as its weights stay as they are."""

    model: Model
    weights: list[tuple[int, int]]
    lock: threading.Lock  # whoever waits steps the engine: one caller at a time

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing of it goes into a copy of the network, or to disk."""
        return type(None), ()


def _kept_model(network: Any) -> KeptModel:
    """Our model of a network, made anew when its weights have changed."""
    weights = [(one.data_ptr(), one._version) for one in network.parameters()]
    kept: KeptModel | None = network.__dict__.get(KEPT_AT)
    if kept is None or kept.weights != weights:
        made = from_network(network, None, name=type(network).__name__)
        made.driver = InCaller(made.engine)
        kept = KeptModel(made, weights, threading.Lock())
        network.__dict__[KEPT_AT] = kept  # no submodule: it is not saved, moved or trained
    return kept


# --- from their words to ours -------------------------------------------------


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding on the left."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    rows = zip(input_ids.tolist(), attention_mask.tolist())
    return [[token for token, seen in zip(*row) if seen] for row in rows]


def sampling_of(logits_processor: Sequence[Any], config: Any, length: int) -> dict[str, Any]:
    """Our sampling parameters for their processors."""
    found: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0, "ignore_eos": True}
    for processor in logits_processor:
        if not isinstance(processor, NO_EFFECT):
            found |= _parameters(processor, length)
    ends = config.eos_token_id
    if ends is not None:
        found["stop_token_ids"] = ends if isinstance(ends, list) else [int(ends)]
    return found


def _parameters(processor: Any, length: int) -> dict[str, Any]:
    make = TRANSLATED.get(type(processor))
    if make is None:
        known = ", ".join(kind.__name__ for kind in TRANSLATED)
        raise NotAble(
            f"logits_processor={type(processor).__name__} has no counterpart here, and drafts "
            f"would not see it; known: {known}."
        )
    return make(processor, length)


def _suppressed(processor: Any, length: int) -> dict[str, Any]:
    tokens = torch.as_tensor(processor.suppress_tokens).tolist()
    return {"logit_bias": dict.fromkeys(tokens, -1000000.0)}


TRANSLATED: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    processors.TemperatureLogitsWarper: lambda one, _: {"temperature": one.temperature},
    processors.TopKLogitsWarper: lambda one, _: {"top_k": one.top_k},
    processors.TopPLogitsWarper: lambda one, _: {"top_p": one.top_p},
    processors.MinPLogitsWarper: lambda one, _: {"min_p": one.min_p},
    processors.RepetitionPenaltyLogitsProcessor: lambda one, _: {"repetition_penalty": one.penalty},
    processors.MinLengthLogitsProcessor: lambda one, length: {
        "min_tokens": max(0, one.min_length - length)
    },
    processors.MinNewTokensLengthLogitsProcessor: lambda one, _: {"min_tokens": one.min_new_tokens},
    processors.SuppressTokensLogitsProcessor: _suppressed,
}


def _asked(criteria: Sequence[Any]) -> list[Any]:
    """The criteria that are asked token by token: length and end token are parameters of ours."""
    return [one for one in criteria if not isinstance(one, EosTokenCriteria | MaxLengthCriteria)]


def _streamer_of_caller() -> Any:
    """The streamer that `generate` was called with. It keeps it from a `custom_generate` that is a
    function (transformers 5.22), so it is read where `generate` has it."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("streamer")


# --- token by token -----------------------------------------------------------


class Rows:
    """The rows of a batch while they grow."""

    def __init__(self, jobs: Jobs, input_ids: Tensor, criteria: Sequence[Any], streamer: Any):
        self.jobs = jobs
        self.input_ids = input_ids
        self.criteria = criteria
        self.streamer = streamer
        self.lengths = [0] * len(jobs)  # tokens of each row that were looked at
        self.ended: dict[int, int] = {}  # rows that a criterion has ended, and their length then

    def run(self) -> list[list[int]]:
        """The tokens of each row, once all have ended."""
        if not self.criteria and self.streamer is None:
            self.jobs.run()
        try:
            while not self.jobs.wait(0.0):  # one step of the engine
                self._look()
            self._look()
        finally:
            self.jobs.cancel()
        self.jobs.outcome()  # raises what went wrong
        if self.streamer is not None:
            self.streamer.end()
        tokens = [self._tokens(row) for row in range(len(self.jobs))]
        return [ids[: self.ended.get(row, len(ids))] for row, ids in enumerate(tokens)]

    def _tokens(self, row: int) -> list[int]:
        job = self.jobs.jobs[row]
        return job.seq.output if isinstance(job, Job) else []

    def _look(self) -> None:
        for row in range(len(self.jobs)):
            tokens = self._tokens(row)
            while self.lengths[row] < len(tokens) and row not in self.ended:
                self.lengths[row] += 1
                self._grown(row, tokens[: self.lengths[row]])

    def _grown(self, row: int, tokens: list[int]) -> None:
        """A row has one token more."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens[-1:]))
        if not self.criteria:
            return
        new = torch.tensor([tokens], device=self.input_ids.device)
        ids = torch.cat([self.input_ids[row : row + 1], new], 1)
        if any(bool(torch.as_tensor(one(ids, None)).all()) for one in self.criteria):
            self.ended[row] = len(tokens)
            self.jobs.cancel(row)


def _sequences(input_ids: Tensor, outputs: Sequence[Sequence[int]], config: Any) -> Any:
    """Prompts and outputs, padded on the right."""
    longest = max(map(len, outputs))
    ends = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:
        pad = ends[0] if isinstance(ends, list) else ends or 0
    rows = [[*output, *[int(pad)] * (longest - len(output))] for output in outputs]
    new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    sequences: Any = torch.cat([input_ids, new.reshape(len(outputs), longest)], 1)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences
