"""Structured output: is it valid, what does it cost, and how does it compare.

    python bench/structured.py validity [--method lookup] [--schemas 500] [--openapi FILE]
    python bench/structured.py overhead [--model NAME] [--batch 1 8 32]
    python bench/structured.py overhead --shape qwen2.5-7b --tokenizer FOLDER --device cuda
    python bench/structured.py masks    --tokenizer FOLDER   # a step of the host, no device
    python bench/structured.py beside   [--model NAME]
    python bench/structured.py python   [--model NAME] [--method lookup]
    python bench/structured.py page     # docs/structured.md from what was measured

Results are kept in docs/structured.json, by part and machine. It needs torch, transformers and
llguidance; xgrammar for `beside`, jsonschema for `validity`; nothing that draws tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from schemas import openapi_schemas, schemas

import forerun
from forerun.engine.clock import Clock
from forerun.train.networks import load_network, load_tokenizer, move

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "structured.json"
PAGE = ROOT / "docs" / "structured.md"
PROMPT = "# A record, as JSON:\n"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "active": {"type": "boolean"},
        "orders": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string", "maxLength": 12},
                    "amount": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["article", "amount"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "kind", "active", "orders"],
    "additionalProperties": False,
}
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "lookup": {"method": "lookup"},
    "jacobi": {"method": "jacobi", "block": 8},
    "multiblock": {"method": "multiblock", "block": 8},
    "lookahead": {"method": "lookahead", "window": 5, "ngram": 4, "guesses": 5},
    "speculative": {"method": "speculative", "draft": "zoo:drafter"},
    "specdiff": {"method": "specdiff", "draft": "zoo:any-subset", "k": 4},
}
ANYTHING = r"(.|\n)*"  # a grammar that forbids nothing: what masks alone cost


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{os.cpu_count()} x {platform.machine()}"


def keep(part: str, found: Any) -> None:
    """Write down what was measured, with machine and date."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    entry = {"machine": machine(), "date": str(date.today()), **found}
    before = kept.setdefault(part, {}).get(found["key"], {})
    for rows, name in (("levels", "level"), ("rows", "batch")):  # measured one after the other
        now = {one.get(name) for one in entry.get(rows, [])}
        earlier = [one for one in before.get(rows, []) if one.get(name) not in now]
        if now and earlier:
            entry[rows] = sorted([*entry[rows], *earlier], key=lambda one: one[name])
    kept[part][found["key"]] = entry
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({part: entry}, indent=1))


# Validity.


def validity(asked: argparse.Namespace) -> None:
    """How many of the texts are finished, how many of those are valid, and what a forward gives."""
    import jsonschema

    cases = [one for one in schemas(asked.schemas) if asked.level in (None, one[0])]
    if asked.openapi:
        cases = [(0, schema) for schema in openapi_schemas(asked.openapi)]
    model = forerun.load(asked.model, lanes=asked.batch[-1], device=asked.device)
    began = time.perf_counter()
    jobs = model.submit(
        [PROMPT] * len(cases),
        schema=[schema for _, schema in cases],
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        **METHODS[asked.method],
    )
    jobs.run()
    results = jobs.results()
    levels = []
    for level in sorted({number for number, _ in cases}):
        mine = [(r, s) for r, (n, s) in zip(results, cases) if n == level]
        finished = [(r, s) for r, s in mine if r.finish_reason == "stop"]
        checker = format_checker(jsonschema)
        valid = sum(_is_valid(r, s, jsonschema, checker) for r, s in finished)
        levels.append(
            {
                "level": level,
                "texts": len(mine),
                "refused": sum(r.error is not None for r, _ in mine),
                "finished": len(finished),
                "valid": valid,
                "reasons": sorted({str(r.error)[:120] for r, _ in mine if r.error is not None}),
                **_per_forward([r for r, _ in finished]),
            }
        )
    keep(
        "validity",
        {
            "key": asked.method + (" openapi" if asked.openapi else ""),
            "model": asked.model,
            "temperature": asked.temperature,
            "max_tokens": asked.max_tokens,
            "seconds": round(time.perf_counter() - began),
            "levels": levels,
        },
    )


def format_checker(jsonschema: Any) -> Any:
    """As RFC 3339 has it: the library's own checks know no time zone and no year 0."""
    checker = jsonschema.FormatChecker(formats=("uuid", "ipv4"))
    checker.checks("date", raises=ValueError)(
        lambda text: bool(date.fromisoformat(re.sub("^0000-", "2000-", text)))
    )
    time_of_day = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]\d\d:\d\d)", re.I)
    checker.checks("time")(lambda text: time_of_day.fullmatch(text) is not None)
    return checker


def _is_valid(result: Any, schema: Any, jsonschema: Any, checker: Any) -> bool:
    try:
        jsonschema.validate(json.loads(result.text), schema, format_checker=checker)
    except (ValueError, jsonschema.ValidationError) as error:
        print("invalid:", result.text[:200], str(error)[:200])
        return False
    return True


def _per_forward(results: Sequence[Any]) -> dict[str, float]:
    forwards = sum(r.stats.forwards for r in results)
    tokens = sum(r.stats.tokens for r in results)
    forced = sum(len(e.tokens) for r in results for e in r.trace if e.reason == "forced")
    return {
        "tokens_per_forward": round(tokens / max(forwards, 1), 2),
        "forced": round(forced / max(tokens, 1), 3),
    }


# Overhead.


def overhead(asked: argparse.Namespace) -> None:
    """What masks add to a step: the same tokens, with a grammar that forbids nothing and without
    one; and tokens per forward with a schema and without."""
    rows = []
    for batch in asked.batch:
        model = _asked_model(asked, batch)
        prompts = [f"{PROMPT}# number {i}\n" for i in range(batch)]
        same: dict[str, Any] = dict(max_tokens=asked.max_tokens, ignore_eos=True, method="ar")
        contestants: dict[str, Callable[[], Any]] = {
            "plain": lambda m=model, p=prompts, s=same: _by_single_steps(m, p, s),
            "at once": lambda m=model, p=prompts, s=same: m.generate_all(p, **s),
            "masked": lambda m=model, p=prompts, s=same: m.generate_all(p, regex=ANYTHING, **s),
            "schema": lambda m=model, p=prompts, s=same: m.generate_all(
                p, **{**s, "schema": RECORD, "ignore_eos": False}
            ),
        }
        times = _take_turns(contestants, asked.rounds)
        results = {name: run() for name, run in contestants.items()}
        step = {
            name: statistics.median(times[name]) / results[name][0].stats.forwards
            for name in ("plain", "masked")
        }
        rows.append(
            {
                "batch": batch,
                "plain_ms": round(1e3 * step["plain"], 3),
                "masked_ms": round(1e3 * step["masked"], 3),
                "added": round(step["masked"] / step["plain"] - 1, 4),
                "mask_us": round(mask_cost(model, results["schema"]), 1),
                "plain_tokens_per_forward": _per_forward(results["plain"])["tokens_per_forward"],
                "schema": _per_forward(results["schema"]),
                "schema_tokens_per_second": round(_rate(results["schema"], times["schema"])),
                "plain_tokens_per_second": round(_rate(results["plain"], times["plain"])),
                "at_once_tokens_per_second": round(_rate(results["at once"], times["at once"])),
                "split": {name: _split(model, run) for name, run in contestants.items()},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        model.close()
    name = asked.name or asked.shape or asked.model
    keep("overhead", {"key": f"{name} on {machine()}", "model": name, "rows": rows})


def _by_single_steps(model: Any, prompts: Sequence[str], options: dict[str, Any]) -> Any:
    """Plain decoding with one token per launch, as masks need it: a small model may write several
    in one launch where nothing holds it to a constraint."""
    host = model.handle().host
    writer = host.writer
    host.writer = None
    try:
        return model.generate_all(prompts, **options)
    finally:
        host.writer = writer


def _split(model: Any, run: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds per forward of the engine: of its thread, and on a GPU of the device, in a run
    of their own. `waits` is for the device, `masks` for constraints; the rest of a step is plans,
    texts and starting what the device does."""
    split: dict[str, float] = {}
    for times_device in (False, True):
        clock = Clock(times_device=times_device)
        model.engine.clock = clock
        began = time.perf_counter()
        run()
        spent = time.perf_counter() - began
        if times_device:
            if not torch.cuda.is_available():
                break
            clock.read_device_times()
            found = {"device forward": clock.forward, "device rules": clock.rules}
        else:
            found = {
                "wall": spent,
                "outside the engine": spent - clock.total,
                "waits": clock.waits,
                "masks": clock.masks,
                "starting rules": clock.rules - clock.waits - clock.masks,
                "starting forwards": clock.forward,
                "rest": clock.total - clock.rules - clock.forward,
            }
            split["forwards"] = clock.forwards
        split |= {name: round(1e3 * each / clock.forwards, 3) for name, each in found.items()}
    model.engine.clock = Clock()
    return split


def masks(asked: argparse.Namespace) -> None:
    """What a constraint costs the host along some records, without a model: a step of the engine
    with a device that takes no time, and in it the masks of all sequences together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer, trust_remote_code=False)
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "anything": {"regex": ANYTHING},
        "schema": {"schema": RECORD},
    }
    rows = []
    for batch in asked.batch:
        records = [_record(i) for i in range(batch)]
        texts = [tokenizer(one, add_special_tokens=False).input_ids for one in records]
        steps = _host_steps(tokenizer, texts, kinds, asked.rounds)
        for name, options in kinds.items():
            spent = _mask_times(tokenizer, texts, options) if options else [0.0]
            rows.append(
                {
                    "batch": f"{name} {batch}",
                    "vocabulary": len(tokenizer),
                    **steps[name],
                    "median_us": round(statistics.median(spent)),
                    "most_us": round(max(spent)),
                }
            )
    key = f"{len(tokenizer)} on {machine()} {asked.name or ''}".strip()
    keep("masks", {"key": key, "version": asked.name or "", "cores": os.cpu_count(), "rows": rows})


def _host_steps(
    tokenizer: Any, texts: Sequence[Sequence[int]], kinds: dict[str, dict[str, Any]], rounds: int
) -> dict[str, dict[str, int]]:
    """Microseconds of the processor per step of the engine, by constraint: of the engine's thread,
    and of all threads. The least of some rounds, which take turns."""
    from no_device import model_without_device, plain_script

    first = 1000  # a token that names the text
    script = plain_script(lambda seq: texts[int(seq.tokens[0]) - first][seq.filled])
    model, _ = model_without_device(tokenizer, len(texts), 256, script)
    engine = model.engine
    prompts = [[first + i, 7, 8, 9] for i in range(len(texts))]
    most = min(map(len, texts)) - 2
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, options in kinds.items():
            same = dict(method="ar", max_tokens=most, temperature=0.0, ignore_eos=name != "schema")
            jobs = model.submit(prompts, **same, **options)
            engine.step()  # takes all in
            before = engine.clock.forwards
            thread = time.thread_time()
            process = time.process_time()
            engine.run()
            spent = (time.thread_time() - thread, time.process_time() - process)
            steps = engine.clock.forwards - before
            found[name].append((1e6 * spent[0] / steps, 1e6 * spent[1] / steps))
            for result in jobs.results():
                if result.error is not None:
                    raise result.error
    return {
        name: {
            "step_us": round(min(thread for thread, _ in times)),
            "all_us": round(min(process for _, process in times)),
        }
        for name, times in found.items()
    }


def _mask_times(
    tokenizer: Any, texts: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[float]:
    """Microseconds of the processor, all threads together, for the masks of all texts, token by
    token: the grammar engine alone."""
    from forerun.constraints.engines import compiled
    from forerun.constraints.left_to_right import LeftToRight, look_ahead
    from forerun.constraints.vocabulary import Vocabulary

    vocabulary = Vocabulary(len(tokenizer), tokenizer)
    grammar = compiled(forerun.Sampling(**options).constraint, vocabulary)
    constraints = [LeftToRight(grammar.language(), 0, frozenset(), len(tokenizer)) for _ in texts]
    spent = []
    for at in range(min(map(len, texts))):
        asked_for = [(one, text[at : at + 1]) for one, text in zip(constraints, texts)]
        began = time.process_time()
        look_ahead(asked_for)
        spent.append(1e6 * (time.process_time() - began))
        for one, text in zip(constraints, texts):
            one.add(at, text[at])
    return spent


def _record(number: int) -> str:
    """A text of the schema, one of many."""
    names = ("Anna Schmidt", "Peter Miller", "Zoe Xu", "Ibrahim", "Maria Garcia", "Lars", "Yuki O")
    goods = ("screws", "red paint", "garden hose", "blue cable", "iron rods", "apples", "3 lamps")
    orders = [
        {"article": goods[(number + i) % len(goods)], "amount": 1 + (7 * number + i) % 99}
        for i in range(3)
    ]
    name = names[number % len(names)]
    return json.dumps({"name": name, "kind": "supplier", "active": True, "orders": orders})


def _asked_model(asked: argparse.Namespace, lanes: int) -> Any:
    """The model by its name; or random weights of a shape, with a tokenizer's own words."""
    if not asked.shape:
        return forerun.load(asked.model, lanes=lanes, device=asked.device, dtype=asked.dtype)
    from transformers import AutoTokenizer

    from forerun.profile.shapes import random_network

    tokenizer = AutoTokenizer.from_pretrained(asked.tokenizer, trust_remote_code=False)
    dtype = getattr(torch, asked.dtype or "bfloat16")
    network = random_network(asked.shape, torch.device(asked.device or "cpu"), dtype)
    context = 128 + asked.max_tokens
    return forerun.from_network(
        network, tokenizer, name=asked.shape, lanes=lanes, max_context=context
    )


def mask_cost(model: Any, results: Sequence[Any]) -> float:
    """Microseconds of the host per mask, along texts that were written: the engine alone."""
    from forerun.constraints.engines import compiled

    spec = forerun.Sampling(schema=RECORD).constraint
    grammar = compiled(spec, model.vocabulary)
    spent = 0.0
    masks = 0
    for result in results:
        language = grammar.language()
        state = language.start()
        began = time.perf_counter()
        for token in result.token_ids:
            language.allowed(state)
            after = language.advance(state, token)
            masks += 1
            if after is None:
                break
            state = after
        spent += time.perf_counter() - began
    return 1e6 * spent / masks


def _rate(results: Sequence[Any], times: Sequence[float]) -> float:
    return sum(r.stats.tokens for r in results) / statistics.median(times)


def _take_turns(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round. On a CPU those that the process had: the machine may be shared."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            began = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:  # the first one warms up
                times[name].append(clock() - began)
    return times


# Beside transformers.


def beside(asked: argparse.Namespace) -> None:
    """The same schema, weights and prompts: `transformers` with xgrammar's logits processor, and
    Forerun with either engine."""
    import xgrammar
    from transformers import GenerationConfig
    from xgrammar.contrib.hf import LogitsProcessor

    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, asked.dtype or "float32")
    network: Any = load_network(asked.model)
    move(network, torch.device(device), dtype)
    tokenizer = load_tokenizer(asked.model)
    vocab = network.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
    compiler = xgrammar.GrammarCompiler(info)
    grammar = compiler.compile_json_schema(json.dumps(RECORD), max_whitespace_cnt=20)
    ids = torch.tensor([tokenizer(PROMPT, add_special_tokens=False).input_ids], device=device)
    end = tokenizer.eos_token_id or 0  # what xgrammar ends a text with
    config = GenerationConfig(
        do_sample=False, max_new_tokens=asked.max_tokens, pad_token_id=end, eos_token_id=end
    )

    def theirs(*processors: Any) -> int:
        out = network.generate(ids, generation_config=config, logits_processor=list(processors))
        return out.shape[1] - ids.shape[1]

    model = forerun.from_network(network, tokenizer, name=asked.model, lanes=1)

    def ours(**options: Any) -> int:
        return model.generate(ids[0].tolist(), max_tokens=asked.max_tokens, **options).stats.tokens

    contestants: dict[str, Callable[[], int]] = {
        "transformers, free": theirs,
        "transformers + xgrammar": lambda: theirs(LogitsProcessor(grammar)),
        "forerun ar, free": ours,
        "forerun ar + llguidance": lambda: ours(schema=RECORD),
        "forerun ar + xgrammar": lambda: ours(schema=RECORD, grammar_engine="xgrammar"),
        "forerun lookup + llguidance": lambda: ours(schema=RECORD, method="lookup"),
    }
    if asked.model == "zoo:ar":
        drafted = dict(method="speculative", draft="zoo:drafter")
        contestants["forerun speculative + llguidance"] = lambda: ours(schema=RECORD, **drafted)
    tokens = {name: run() for name, run in contestants.items()}
    times = _take_turns(contestants, asked.rounds)
    rows = [
        {
            "name": name,
            "tokens": tokens[name],
            "ms_per_token": round(1e3 * statistics.median(times[name]) / tokens[name], 2),
        }
        for name in contestants
    ]
    name = asked.name or asked.model
    keep("beside", {"key": f"{name} on {machine()}", "model": name, "rows": rows})


# Python.


def python(asked: argparse.Namespace) -> None:
    """Completions of functions under a grammar of Python and without one: how many end, and how
    many parse; tokens per forward."""
    sys.path.insert(0, str(ROOT / "examples"))
    from python_grammar import PROMPTS, parses, python_grammar

    lanes = asked.batch[-1]
    model = forerun.load(asked.model, lanes=lanes, device=asked.device, dtype=asked.dtype)
    prompts = [prompt for prompt in PROMPTS for _ in range(asked.samples)]
    rows = []
    for name, grammar in (("with", python_grammar(lines=4)), ("without", None)):
        began = time.perf_counter()
        results = model.generate(
            PROMPTS,
            method=asked.method,
            grammar=grammar,
            n=asked.samples,
            temperature=asked.temperature,
            max_tokens=asked.max_tokens,
        )
        spent = time.perf_counter() - began
        texts = [prompt + result.text for prompt, result in zip(prompts, results)]
        ended = [result.finish_reason == "stop" for result in results]
        rows.append(
            {
                "grammar": name,
                "completions": len(texts),
                "ended": sum(ended),
                "ended_parse": sum(map(parses, itertools.compress(texts, ended))),
                "parse": sum(map(parses, texts)),
                "lines_parse": sum(parses(text[: text.rindex("\n") + 1]) for text in texts),
                "tokens_per_second": round(sum(r.stats.tokens for r in results) / spent),
                **_per_forward(results),
            }
        )
        print(texts[0], "---", sep="\n")
    name = asked.name or asked.model
    found = {"model": name, "method": asked.method, "temperature": asked.temperature}
    keep("python", {"key": f"{name} on {machine()}", **found, "rows": rows})


# The page.


def page(_: argparse.Namespace) -> None:
    """Put the tables between their marks."""
    kept = json.loads(KEPT.read_text())
    text = PAGE.read_text()
    for part, make in (
        ("validity", validity_table),
        ("overhead", overhead_table),
        ("split", split_table),
        ("masks", masks_table),
        ("beside", beside_table),
        ("python", python_table),
    ):
        begin, end = f"<!-- {part}: bench/structured.py -->", f"<!-- end of {part} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        found = kept.get("overhead" if part == "split" else part, {})
        made = make(found) if found else "Not measured yet."
        text = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    PAGE.write_text(text)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def validity_table(kept: dict[str, Any]) -> str:
    rows = []
    for method, found in kept.items():
        for one in found["levels"]:
            rows.append(
                [
                    f"`{method}`",
                    one["level"],
                    one["texts"],
                    one["refused"],
                    one["finished"],
                    one["valid"],
                    one["tokens_per_forward"],
                    f"{100 * one['forced']:.0f} %",
                ]
            )
    head = [
        "method",
        "level",
        "schemas",
        "refused",
        "finished",
        "valid",
        "tokens/forward",
        "forced",
    ]
    return f"{table(head, rows)}\n\n{_stamp(kept)}"


def overhead_table(kept: dict[str, Any]) -> str:
    rows = [
        [
            f"`{found['model']}`, {found['machine']}",
            one["batch"],
            one["plain_ms"],
            one["masked_ms"],
            f"{100 * one['added']:+.1f} %",
            one["mask_us"],
            one["plain_tokens_per_forward"],
            one["schema"]["tokens_per_forward"],
        ]
        for found in kept.values()
        for one in found["rows"]
    ]
    head = ["model", "batch", "step, ms", "with masks, ms", "added", "host, µs per mask"]
    return f"{table([*head, 'tokens/forward', 'with a schema'], rows)}\n\n{_stamp(kept)}"


SPLIT = (
    "wall",
    "waits",
    "masks",
    "starting rules",
    "starting forwards",
    "rest",
    "device forward",
    "device rules",
)


def split_table(kept: dict[str, Any]) -> str:
    """Where a step's milliseconds go, of what was measured on a GPU."""
    rows = [
        [f"`{found['model']}`", one["batch"], name, *(split.get(part, "") for part in SPLIT)]
        for found in kept.values()
        for one in found["rows"]
        for name, split in one.get("split", {}).items()
        if "device forward" in split
    ]
    return table(["model", "batch", "what", *SPLIT], rows) if rows else "Not measured yet."


def masks_table(kept: dict[str, Any]) -> str:
    rows = []
    for found in kept.values():
        steps = {one["batch"]: one["step_us"] for one in found["rows"]}
        for one in sorted(found["rows"], key=lambda row: int(row["batch"].split()[1])):
            name, batch = one["batch"].split()
            free = steps[f"none {batch}"]
            rows.append(
                [
                    f"{one['vocabulary']:,} {found['version']}".strip(),
                    batch,
                    name,
                    one["step_us"],
                    one["step_us"] - free if name != "none" else "",
                    one["all_us"],
                    one["median_us"] if name != "none" else "",
                    one["most_us"] if name != "none" else "",
                ]
            )
    head = ["vocabulary", "batch", "constraint", "engine, µs", "added", "all threads, µs"]
    return f"{table([*head, 'masks, median µs', 'most'], rows)}\n\n{_stamp(kept)}"


def beside_table(kept: dict[str, Any]) -> str:
    rows = [
        [f"`{found['model']}`, {found['machine']}", one["name"], one["tokens"], one["ms_per_token"]]
        for found in kept.values()
        for one in found["rows"]
    ]
    return f"{table(['model', 'contestant', 'tokens', 'ms per token'], rows)}\n\n{_stamp(kept)}"


def python_table(kept: dict[str, Any]) -> str:
    rows = [
        [
            f"`{found['model']}`, `{found['method']}`",
            one["grammar"],
            one["completions"],
            one["ended"],
            one["ended_parse"],
            one["parse"],
            one["lines_parse"],
            one["tokens_per_forward"],
            f"{100 * one['forced']:.0f} %",
        ]
        for found in kept.values()
        for one in found["rows"]
    ]
    head = ["model", "grammar", "completions", "ended", "of those parse", "parse in all"]
    more = ["parse up to their last whole line", "tokens/forward", "forced"]
    return f"{table([*head, *more], rows)}\n\n{_stamp(kept)}"


def _stamp(kept: dict[str, Any]) -> str:
    places = {(found["machine"], found["date"]) for found in kept.values()}
    return "; ".join(f"{where}, {when}" for where, when in sorted(places)) + "."


def main() -> None:
    parts = {
        "validity": validity,
        "overhead": overhead,
        "masks": masks,
        "beside": beside,
        "python": python,
        "page": page,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--model", default="zoo:ar")
    parser.add_argument("--method", default="ar", choices=METHODS)
    parser.add_argument("--name", help="of the model, or the version, in the tables")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt, for `python`")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--level", type=int, help="only one of the five")
    parser.add_argument("--openapi")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--shape", help="random weights of this shape, for `overhead`")
    parser.add_argument("--tokenizer", help="a folder with a tokenizer, for --shape")
    asked = parser.parse_args()
    parts[asked.part](asked)


if __name__ == "__main__":
    main()
