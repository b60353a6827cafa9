"""Forerun on a CPU beside llama.cpp, vLLM and `transformers`, on the same GGUF file, in parts.

    python bench/cpu.py load|perplexity|decode|rows|methods --model FILE.gguf [--draft FILE.gguf]
    python bench/cpu.py outside --model zoo:ar     # what a step takes outside of the forward
    python bench/cpu.py zoo --model zoo:ar         # its methods over ar, and by forwards alone
    python bench/cpu.py write          # docs/speed.md from docs/cpu.json

`--cpu-time` counts the processor's seconds of one thread: for a machine that others use, too.

Each part takes a few minutes and adds to docs/cpu.json, by kind of processor. Numbers are medians.
llama.cpp needs llama-cpp-python; without it its rows are left out. vLLM has an environment of its
own, whose Python is named with `--vllm`; it gets the file's weights in float32, and chooses
its threads itself; those of llama.cpp equal ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forerun
from forerun.backbones.measure import _processor
from forerun.engine.pack import Batch
from forerun.evaluate.prompts import CODE
from forerun.sequence.rows import Plan, causal_rows

OUT = Path("docs/cpu.json")
PAGE = Path("docs/speed.md")
BEGIN, END = "<!-- cpu: bench/cpu.py write -->", "<!-- end of cpu -->"
PROMPT = 128  # tokens that are read
TOKENS = 32  # that are written
ROWS = (1, 8, 32)
KINDS = (None, "int8", "int4")
PARTS = ["decode", "rows", "methods", "outside", "zoo", "load", "perplexity"]  # as they are shown
ZOO: dict[str, dict[str, str]] = {
    "ar": {},
    "auto": {},
    "lookup": {},
    "speculative": {"draft": "zoo:drafter"},
    "specdiff": {"draft": "auto"},
}
PATIENCE = 10.0  # seconds for reading: bfloat16 takes minutes on a processor without it
CPU = torch.device("cpu")
MOST_STOLEN = 0.03  # of the processors' time, by other machines on the same host
EDIT = "Write this code again with a docstring at the top of the function:\n```python\n{code}```\n"
SUMMARY = "Say again, sentence by sentence, what this text says:\n{text}\n"


def text() -> str:
    """English text that is in every checkout: the design page and the certification page."""
    return "\n".join(Path(f"docs/{name}.md").read_text() for name in ("glossary", "certification"))


def load(file: str, quantize: str | None, lanes: int = 8) -> forerun.Model:
    return forerun.load(file, lanes=lanes, max_context=1024, quantize=quantize)


def name_of(quantize: str | None) -> str:
    return f"forerun {quantize or 'float32'}"


clock: Callable[[], float] = time.perf_counter


def median_seconds(run: Callable[[], object], turns: int = 5) -> float:
    run()
    found = []
    for _ in range(turns):
        start = clock()
        run()
        found.append(clock() - start)
    return statistics.median(found)


# -- loading ------------------------------------------------------------------------------------

LOADING = (
    "import sys, time; import torch, transformers, forerun, forerun.api; t = time.perf_counter(); "
    "forerun.load(sys.argv[1], lanes=1, max_context=512, quantize=eval(sys.argv[2])); "
    "print(time.perf_counter() - t)"
)


def part_load(file: str) -> dict[str, float]:
    """Seconds to load a file in a fresh process, once the library is imported: the first time, and
    after. The first time in 4 bits our C++ is compiled."""
    found = {}
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"forerun-bench-{os.getpid()}"
    environment = {**os.environ, "FORERUN_CACHE": str(folder)}
    turns = (("first", None), ("after", None), ("first in int4", "int4"), ("after, int4", "int4"))
    for name, quantize in turns:
        out = subprocess.run(
            [sys.executable, "-c", LOADING, file, repr(quantize)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found[f"forerun, {name}"] = round(float(out), 2)
    subprocess.run(["rm", "-r", str(folder)], check=True)
    llama = llama_of(file)
    if llama is not None:
        start = time.perf_counter()
        llama_of(file)
        found["llama.cpp"] = round(time.perf_counter() - start, 2)
    return found


# -- perplexity ---------------------------------------------------------------------------------


def part_perplexity(file: str) -> dict[str, float]:
    """Of windows of 512 tokens of our own docs, each token given those before it."""
    found = {}
    for quantize in KINDS:
        with load(file, quantize, lanes=1) as model:
            found[name_of(quantize)] = round(perplexity(model), 3)
        gc.collect()
    return found


@torch.inference_mode()
def perplexity(model: forerun.Model, windows: int = 4, size: int = 512) -> float:
    ids = np.array(model.tokenizer(text()).input_ids)
    slots = model.backbone.make_slots(1, size)
    losses = []
    for first in range(0, windows * size, size):
        window = ids[first : first + size]
        plan = Plan(causal_rows(window), [np.arange(len(window))], len(window), causal=len(window))
        logits = model.backbone.forward(Batch([(0, plan, 0)], size, CPU), slots)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:])))
    return float(torch.stack(losses).mean().exp())


# -- reading and decoding -----------------------------------------------------------------------


def llama_of(file: str) -> Any:
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    if not Path(file).is_file():  # a model of our own
        return None
    threads = torch.get_num_threads()
    return Llama(file, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)


def llama_speeds(file: str, prompt: Sequence[int]) -> dict[str, float]:
    """Tokens per second that it reads and writes."""
    llama = llama_of(file)

    def read() -> None:
        llama.reset()
        llama.eval(list(prompt))

    reading = median_seconds(read, 3)
    writing = median_seconds(lambda: llama_write(llama, prompt), 3) - reading
    return {"reads": round(PROMPT / reading, 1), "batch 1": round(TOKENS / writing, 1)}


def llama_write(llama: Any, prompt: Sequence[int]) -> None:
    llama.reset()
    stream = llama.generate(list(prompt), temp=0.0, reset=True)
    for _ in range(TOKENS + 1):
        next(stream)


def their_speeds(
    file: str, dtype: torch.dtype, prompt: Sequence[int], compiled: bool = False
) -> dict[str, float]:
    from forerun.train.networks import load_network, move

    network: Any = load_network(file)
    move(network, CPU, dtype)
    ids = torch.tensor([list(prompt)])

    @torch.inference_mode()
    def write(tokens: int, batch: int) -> None:
        some = ids.expand(batch, -1)
        network.generate(
            some,
            attention_mask=torch.ones_like(some),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )

    if compiled:
        network.generation_config.cache_implementation = "static"
        network.forward = torch.compile(network.forward)
        for batch in (1, 8):  # what is measured is compiled before
            write(1, batch)
            write(1 + TOKENS, batch)
    return speeds(write)


def vllm_speeds(python: str, file: str, dtype: str, prompt: Sequence[int]) -> dict[str, float]:
    """The same by `bench/vllm_speeds.py`, in vLLM's own environment."""
    from forerun.train.networks import load_network

    with tempfile.TemporaryDirectory() as folder:
        load_network(file).save_pretrained(folder)
        gc.collect()
        asked = dict(model=folder, dtype=dtype, prompt=list(prompt), tokens=TOKENS)
        out = subprocess.run(
            [python, str(Path(__file__).with_name("vllm_speeds.py"))],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return json.loads(out.strip().split("\n")[-1])


def our_speeds(model: forerun.Model, prompt: Sequence[int]) -> dict[str, float]:
    prompts = [[*prompt[:-1], token] for token in range(100, 108)]  # so that none is remembered
    turn = iter(range(10**6))

    def write(tokens: int, batch: int) -> None:
        fresh = [[next(turn) % 5000 + 200, *one[1:]] for one in prompts[:batch]]
        model.generate(fresh, max_tokens=tokens, ignore_eos=True, method="ar")

    return speeds(write)


def speeds_of_load(file: str, quantize: str | None, prompt: Sequence[int]) -> dict[str, float]:
    with load(file, quantize) as model:
        return our_speeds(model, prompt)


def speeds(write: Callable[[int, int], None]) -> dict[str, float]:
    """Tokens per second read at batch 1, and written at batch 1 and 8, by differences. Who takes
    too long to read is not asked to write."""
    start = clock()
    write(1, 1)
    if clock() - start > PATIENCE:
        return {"reads": round(PROMPT / (clock() - start), 1)}
    reading = median_seconds(lambda: write(1, 1), 3)
    one = median_seconds(lambda: write(1 + TOKENS, 1), 3) - reading
    reading_8 = median_seconds(lambda: write(1, 8), 1)
    eight = median_seconds(lambda: write(1 + TOKENS, 8), 1) - reading_8
    return {
        "reads": round(PROMPT / reading, 1),
        "batch 1": round(TOKENS / one, 1),
        "batch 8": round(8 * TOKENS / eight, 1),
    }


def prompt_of(file: str) -> list[int]:
    from forerun.train.networks import load_tokenizer

    return list(load_tokenizer(file)(text()).input_ids[:PROMPT])


def part_decode(file: str, only: str | None, vllm: str | None) -> dict[str, dict[str, float]]:
    prompt = prompt_of(file)
    contestants: dict[str, Callable[[], dict[str, float]]] = {}
    if llama_of(file) is not None:
        contestants["llama.cpp, the file's 4 bits"] = lambda: llama_speeds(file, prompt)
    contestants["transformers float32"] = lambda: their_speeds(file, torch.float32, prompt)
    contestants["transformers bfloat16"] = lambda: their_speeds(file, torch.bfloat16, prompt)
    contestants["transformers compiled"] = lambda: their_speeds(file, torch.float32, prompt, True)
    for dtype in ("float32", "bfloat16") if vllm else ():
        contestants[f"vLLM {dtype}"] = lambda d=dtype: vllm_speeds(vllm, file, d, prompt)
    for quantize in KINDS:
        contestants[name_of(quantize)] = lambda q=quantize: speeds_of_load(file, q, prompt)
    found = {}
    for name, run in contestants.items():
        if only is None or only in name:
            found[name] = run()
            print(name, found[name], flush=True)
            gc.collect()
    return found


# -- forwards -----------------------------------------------------------------------------------


def part_rows(file: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a forward of so many rows after 128 tokens, and how many times the floor:
    what reading the weights once takes, as fast as this machine reads a large array."""
    found: dict[str, dict[str, float]] = {}
    speed = bytes_per_second()
    for quantize in KINDS:
        with load(file, quantize, lanes=1) as model:
            times = {rows: forward_seconds(model, rows) for rows in ROWS}
            floor = model.backbone.read_bytes / speed
            found[name_of(quantize)] = {
                **{f"{rows}": round(1e3 * t, 1) for rows, t in times.items()},
                "floor": round(1e3 * floor, 2),
                **{f"{rows} x floor": round(t / floor, 2) for rows, t in times.items()},
            }
        print(name_of(quantize), found[name_of(quantize)], flush=True)
        gc.collect()
    llama = llama_of(file)
    if llama is not None:
        found["llama.cpp, the file's 4 bits"] = llama_rows(llama)
    return found


def bytes_per_second() -> float:
    large = torch.ones(64 << 20)
    return large.nbytes / min(median_seconds(large.sum, 3) for _ in range(2))


@torch.inference_mode()
def forward_seconds(model: forerun.Model, rows: int, context: int = 128) -> float:
    ids = np.array(model.tokenizer(text()).input_ids[: context + rows])
    slots = model.backbone.make_slots(1, 512)
    end = context + rows
    whole = Plan(causal_rows(ids), [np.arange(context, end)], end, causal=end)
    model.backbone.forward(Batch([(0, whole, 0)], 512, CPU), slots)
    return median_seconds(
        lambda: model.backbone.forward(Batch([(0, whole, context)], 512, CPU), slots), 15
    )


def llama_rows(llama: Any) -> dict[str, float]:
    ids = llama.tokenize(text().encode())[:200]
    found = {}
    for rows in ROWS:

        def run(rows: int = rows) -> None:
            llama.n_tokens = 128
            llama.eval(ids[128 : 128 + rows])

        llama.reset()
        llama.eval(ids[:128])
        found[str(rows)] = round(1e3 * median_seconds(run, 9), 1)
    return found


def timed(run: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def run_timed(*given: Any) -> Any:
        start = clock()
        found = run(*given)
        spent[0] += clock() - start
        return found

    return run_timed


def time_forwards(backbone: Any, spent: list[float]) -> None:
    """Add up what forwards take, and launches that write several tokens."""
    for name in ("forward", "write_likeliest", "go_on"):
        if hasattr(backbone, name):
            setattr(backbone, name, timed(getattr(backbone, name), spent))


def part_outside(file: str, tokens: int = 128) -> dict[str, float]:
    """Microseconds of a token at batch 1, and of those outside of the forward."""
    found = {}
    with load(file, None, lanes=1) as model:
        spent = [0.0]
        time_forwards(model.backbone, spent)
        turns = []
        for _ in range(7):
            spent[0] = 0.0
            start = clock()
            model.generate([5, 6, 7, 8], max_tokens=tokens, ignore_eos=True, method="ar")
            seconds = clock() - start
            turns.append((seconds, seconds - spent[0]))
        seconds, outside = (statistics.median(column) for column in zip(*turns[1:]))
        found["us per token"] = round(1e6 * seconds / tokens)
        found["us outside"] = round(1e6 * outside / tokens)
        found["share outside"] = round(outside / seconds, 3)
    return found


# -- methods ------------------------------------------------------------------------------------


def part_methods(
    file: str, draft: str | None, quantize: str | None, only: str | None
) -> dict[str, Any]:
    """Our methods over our own ar: the same prompts, taking turns."""
    model = load(file, quantize, lanes=1)
    prompts = task_prompts(model)
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("editing", "lookup", {}),
        ("summarising", "lookup", {}),
        ("editing", "auto", {}),
        ("summarising", "auto", {}),
    ]
    if draft is not None:
        asked.append(("code", "speculative", {"draft": load(draft, quantize, lanes=1)}))
    found: dict[str, Any] = {}
    for task, method, options in asked:
        name = f"{task}: {method}, {quantize or 'float32'}"
        if only is None or only in name:
            found[name] = race(model, prompts[task], method, options)
            print(name, found[name], flush=True)
    return found


def part_zoo(file: str, tokens: int = 64) -> dict[str, dict[str, float]]:
    """Methods over ar, greedy, taking turns; and what that would be if nothing but forwards took
    time. Every prompt is read before."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in ZOO}
    tokens_per_forward: dict[str, float] = {}
    with load(file, None, lanes=1) as model:
        spent = [0.0]
        for name, options in ZOO.items():
            model.generate(CODE[0], method=name, max_tokens=tokens, **options)
        for backbone in (model.backbone, *(draft.backbone for draft in model._draft_hosts)):
            time_forwards(backbone, spent)
        for _ in range(9):
            for name, options in ZOO.items():
                spent[0] = 0.0
                start = clock()
                each = [
                    model.generate(text, method=name, max_tokens=tokens, ignore_eos=True, **options)
                    for text in CODE
                ]
                turns[name].append((clock() - start, spent[0]))
                forwards = sum(result.stats.forwards for result in each)
                tokens_per_forward[name] = tokens * len(CODE) / forwards
    plain = statistics.median(seconds for seconds, _ in turns["ar"][2:])
    found = {}
    for name in ZOO:
        whole, inside = (statistics.median(column) for column in zip(*turns[name][2:]))
        found[name] = {
            "tokens/s": round(tokens * len(CODE) / whole),
            "over ar": round(plain / whole, 2),
            "by forwards alone": round(plain / inside, 2),
            "tokens per forward": round(tokens_per_forward[name], 2),
        }
    return found


def race(
    model: forerun.Model, prompt: list[int], method: str, options: dict[str, Any]
) -> dict[str, float]:
    times: dict[str, list[float]] = {"ar": [], method: []}
    texts: dict[str, list[int]] = {}
    calls: dict[str, float] = {}
    for turn in range(4):
        for name, own in (("ar", {}), (method, options)):
            start = clock()
            result = model.generate(prompt, method=name, max_tokens=96, ignore_eos=True, **own)
            if turn:  # the first reads the prompt and warms up
                times[name].append(clock() - start)
            texts[name] = list(result.token_ids)
            calls[name] = result.stats.tokens_per_forward
    ratio = statistics.median(times["ar"]) / statistics.median(times[method])
    return {
        "ar, tokens/s": round(96 / statistics.median(times["ar"]), 1),
        "over ar": round(ratio, 2),
        "tokens per forward": round(calls[method], 2),
        "same tokens": float(texts["ar"] == texts[method]),
    }


def task_prompts(model: forerun.Model) -> dict[str, list[int]]:
    code = Path("src/forerun/methods/speculative.py").read_text()
    code = code[code.index("\nasync def ") if "\nasync def " in code else 0 :][:700]
    words = text()[2000:2900]
    asks = {
        "editing": EDIT.format(code=code),
        "summarising": SUMMARY.format(text=words),
        "code": "Write a Python function that merges two sorted lists, with a docstring.",
    }
    tokenizer: Any = model.tokenizer
    found = {}
    for task, ask in asks.items():
        messages = [{"role": "user", "content": ask}]
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        found[task] = tokenizer(shown, add_special_tokens=False).input_ids
    return found


# -- the page -----------------------------------------------------------------------------------


def kind() -> str:
    """Of processor: what its products of few bits are made of decides what pays."""
    name = platform.machine()
    cpu = Path("/proc/cpuinfo")
    flags = set(cpu.read_text().split()) if cpu.exists() else {"avx512_vnni"}
    if name != "x86_64" or "avx512_vnni" in flags:
        return name
    if "avx512bw" in flags:
        return f"{name}, no VNNI"
    return f"{name}, AVX2" if "avx2" in flags else f"{name}, plain"


def machine() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}, {_processor()}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {date.today()}"
    )


def stolen() -> tuple[int, int]:
    """Time of all processors so far, and what of it other machines on the same host took."""
    try:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return 1, 0
    return sum(numbers), numbers[7]


def add(part: str, file: str, found: dict[str, Any]) -> None:
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    own = known.setdefault(kind(), {})
    own.setdefault(part, {}).setdefault(Path(file).stem, {}).update(found)
    own["machine"] = machine()
    OUT.write_text(json.dumps(known, indent=1) + "\n")


def table(part: str, entries: dict[str, Any]) -> list[str]:
    lines = []
    for file, rows in entries.items():
        flat = {k: v if isinstance(v, dict) else {"": v} for k, v in rows.items()}
        columns = list(dict.fromkeys(key for values in flat.values() for key in values))
        lines += [f"| {part}, {file} | " + " | ".join(columns) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        for name, values in flat.items():
            cells = [str(values.get(column, "–")) for column in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines


def write() -> None:
    known = json.loads(OUT.read_text())
    lines = [BEGIN, ""]
    for kind, own in known.items():
        lines += [f"### {kind}", ""]
        for part in sorted(own.keys() - {"machine"}, key=PARTS.index):
            lines += table(part, own[part])
        lines += [f"`python bench/cpu.py` on {own['machine']}, a shared machine.", ""]
    lines.append(END)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + "\n".join(lines) + after)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--quantize")
    parser.add_argument("--only", help="of decode and methods: rows with this in their name")
    parser.add_argument("--vllm", help="the Python that has vLLM")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, in CPU seconds")
    flags = parser.parse_args()
    if flags.cpu_time:
        global clock
        clock = time.process_time
        torch.set_num_threads(1)
    if flags.part == "write":
        write()
        return
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: part_load(flags.model),
        "perplexity": lambda: part_perplexity(flags.model),
        "decode": lambda: part_decode(flags.model, flags.only, flags.vllm),
        "rows": lambda: part_rows(flags.model),
        "outside": lambda: part_outside(flags.model),
        "zoo": lambda: part_zoo(flags.model),
        "methods": lambda: part_methods(flags.model, flags.draft, flags.quantize, flags.only),
    }
    before = stolen()
    found = parts[flags.part]()
    print(json.dumps(found, indent=1))
    spent, taken = (now - then for now, then in zip(stolen(), before))
    if taken > MOST_STOLEN * spent and flags.part != "perplexity":
        sys.exit(f"others took {taken / spent:.0%} of the processors: nothing is kept. Run again.")
    add(flags.part + (", one thread, CPU time" if flags.cpu_time else ""), flags.model, found)


if __name__ == "__main__":
    main()
