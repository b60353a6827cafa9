"""The same tokens on CUDA as on a CPU, batched and alone, for every architecture and method.

Run by tests/gpu/test_cuda.py where there is a CUDA device, or alone, without pytest:
PYTHONPATH=src python -m tests.gpu.checks [--only rounds drafts]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forerun
from forerun.backbones.dflash import DrafterShape, FeatureDrafter
from forerun.backbones.features import FeatureBackbone
from forerun.backbones.lean import LeanBackbone
from forerun.certify.testing import laws_along
from forerun.checkpoints import tiny
from forerun.checkpoints.drafters import write_drafter
from forerun.engine import prefetch, prefetch_rounds
from forerun.engine.graphs import ForwardRunner
from forerun.options import Sampling

PROMPTS = [[10, 20, 30, 10, 20], [7], list(range(40, 70)), [5, 5, 5, 9, 5, 5]]
LONG = [[*range(3, 250)] * 2, [*range(9, 200), 4]]  # whose slots are read in several shares
METHODS = {
    "ar": {},
    "lookup": {"k": 4},
    "speculative": {"k": 3},
    "jacobi": {"block": 5},
    "multiblock": {"block": 5, "blocks": 3, "spawn": 0.0},
    "lookahead": {"window": 4},
}
# A tree is named: by default one is chosen that pays on the device, and other drafts draw others.
BLOCKS = {
    "block": {"threshold": 0.02},
    "block-ssd": {"drafts": 3, "tree": "mixed"},
    "block-ssd chain": {"drafts": 3, "tree": "chain"},
    "s2d2": {"router": "score", "enough": 1.0, "threshold": 0.02},
    "s2d2 text": {"causal": "text"},
    "s2d2 edit": {"edit": 0.01},
    "s2d2-exact": {"k": 4, "ahead": "every"},
    "s2d2-canvases": {"router": "bandit", "tree": "mixed"},
}
SAMPLINGS = {
    "greedy": {},
    "sampled": dict(temperature=0.8, top_p=0.9, frequency_penalty=0.3, seed=5),
}
CASES = [
    *(
        case
        for case in itertools.product(tiny.BLOCK, BLOCKS, SAMPLINGS, ("float64",))
        # Edits need rows that speak of their own tokens, and no penalties, which would punish a
        # decided token for being there.
        if case[1] != "s2d2 edit" or (case[0] != "block-shifted" and case[2] == "greedy")
    ),
    *itertools.product(tiny.ARCHITECTURES, METHODS, SAMPLINGS, ("float32", "float64")),
]


HOLES = [[None, 4, None, None, 9, None, 30, None], [3, 4, 5, 6, *[None] * 20], [*[None] * 6, 5, 6]]
INFILLING = {
    "sequential": {},
    "assd": {},
    "assd every": {"ahead": "every", "k": 3},
    "assd ngram": {"draft": "ngram"},
}
CANVASES = {
    "stepwise": {"block": 4},
    "stepwise dual": {"block": 4, "cache": "dual", "refresh": 3},
    "ssd": {"block": 4},
    "ssd prefix": {"block": 4, "cache": "prefix"},
    "threshold": {"threshold": 0.05},
}
FILLING = {**INFILLING, **CANVASES}
HOLE_CASES = [
    *itertools.product(tiny.ANY_SUBSET, INFILLING, SAMPLINGS, ("float32", "float64")),
    *itertools.product(tiny.MASKED, CANVASES, SAMPLINGS, ("float64",)),
]


def load(arch: str, device: str, dtype: str, lanes: int = 8) -> forerun.Model:
    return forerun.load(f"tiny:{arch}", device=device, dtype=dtype, lanes=lanes, max_context=128)


def tokens_of(results: list) -> list[list[int]]:
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.token_ids for result in results]


def same_tokens_on_cuda(arch: str, method: str, sampling: str, dtype: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = {}
    for device in ("cpu", "cuda"):
        target = load(arch, device, dtype)
        options = {
            **{**METHODS, **BLOCKS}[method],
            **SAMPLINGS[sampling],
            "method": method.split()[0],
            "max_tokens": 24,
            "ignore_eos": True,
        }
        if method == "speculative":
            options["draft"] = load(arch, device, dtype)
        outputs[device] = tokens_of(target.generate(PROMPTS, **options))
        outputs[f"{device}, alone"] = [
            target.generate(prompt, **options).token_ids for prompt in PROMPTS
        ]
    expected = outputs["cpu"]
    for where, tokens in outputs.items():
        assert tokens == expected, f"{arch} {method} {sampling} {dtype}: {where} differs"


def same_holes_on_cuda(arch: str, method: str, sampling: str, dtype: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = {}
    for device in ("cpu", "cuda"):
        target = load(arch, device, dtype)
        options = {**FILLING[method], **SAMPLINGS[sampling], "method": method.split()[0]}
        outputs[device] = tokens_of(target.infill(token_ids=HOLES, **options))
        outputs[f"{device}, alone"] = [
            target.infill(token_ids=canvas, **options).token_ids for canvas in HOLES
        ]
    expected = outputs["cpu"]
    for where, tokens in outputs.items():
        assert tokens == expected, f"{arch} {method} {sampling} {dtype}: {where} differs"


def gaps_explain_differences(name: str, method: str, dtype: str) -> None:
    """Captured forwards may choose other tokens than plain ones, but only where the two are about
    as likely."""
    models = [
        forerun.load(name, device="cuda", dtype=dtype, lanes=6, graphs=graphs)
        for graphs in (None, False)
    ]
    options = dict(method=method, max_tokens=48, ignore_eos=True)
    captured, plain = (tokens_of(m.generate(PROMPTS + LONG, **options)) for m in models)
    alone = tokens_of(models[0].generate(LONG[:1], **options))  # in a batch it may be in one piece
    sizes = models[0].host.runner.captured
    assert max(size.splits for size in sizes) > 1
    assert alone == [captured[len(PROMPTS)]] or not models[0].backbone.deterministic
    assert not models[1].host.runner.captured
    twin = forerun.load(name, device="cpu", dtype="float32", lanes=1)
    for prompt, a, b in zip(PROMPTS + LONG, captured, plain):
        at = next((i for i in range(len(a)) if a[i] != b[i]), None)
        if at is not None:
            laws = laws_along(twin, prompt, b[: at + 1], Sampling(temperature=1.0), frozenset())
            log_V = laws[-1].double().log()
            gap = abs(float(log_V[a[at]] - log_V[b[at]]))
            assert gap < (0.2 if dtype == "bfloat16" else 1e-3), (
                f"{name} {method} {dtype}: token {at} differs by {gap:.4f} nats"
            )


PAGED = {
    "zoo:ar": {
        "ar": {},
        "jacobi": {"block": 5},
        "lookahead": {"window": 4},
        "speculative": {"k": 4, "draft": "zoo:ar"},
    },
    "zoo:block": {"s2d2-exact": {"k": 4}},
}
PAGE_CASES = [
    (name, method, dtype)
    for name, methods in PAGED.items()
    for method in methods
    for dtype in ("bfloat16", "float32")
]


def same_tokens_in_few_pages(name: str, method: str, dtype: str) -> None:
    """Bits do not hang on pages: texts with a common beginning, in so little memory that
    sequences wait and are computed again, with prompts in chunks, are those of lanes that have a
    whole context each."""
    how = dict(device="cuda", dtype=dtype, lanes=6, max_context=704, deterministic=True)
    options = dict(PAGED[name][method], method=method, max_tokens=100, ignore_eos=True)
    prompts = [[*LONG[0][:130], *prompt] for prompt in PROMPTS] + LONG
    roomy = forerun.load(name, **how)
    expected = [roomy.generate(prompt, **options).token_ids for prompt in prompts]
    lane = roomy.backbone.bytes_per_lane(roomy.family.slots(704)) / 2**30
    tight = forerun.load(name, **how, memory=1.1 * lane)
    tight.engine.chunk = 32
    found = tokens_of(tight.generate(prompts, **options))
    stats = tight.host.pool.stats
    assert found == expected, f"{name} {method} {dtype}: texts differ, {stats}"
    assert stats.found_rows, "nothing was shared"
    host = tight.host
    host.pool.check([memo.pages for memo in host.memos])


AMONG_MANY_CASES = [(m, dtype) for m in ("ar", "jacobi") for dtype in ("bfloat16", "float32")]


def same_long_text_among_many(method: str, dtype: str) -> None:
    """Bits do not hang on how a text is cut: among many short ones it is looked at in sections,
    alone in shares; read in chunks, and whole."""
    kind = getattr(torch, dtype)
    network = tiny.build("llama", 0, kind, max_position_embeddings=2304).to("cuda")
    how = dict(max_context=2304, deterministic=True)
    many = forerun.from_network(network, None, lanes=101, **how)
    many.engine.chunk = 48
    options = dict(METHODS[method], method=method, max_tokens=12, ignore_eos=True)
    prompts = [[5 + i % 200, 7, 5 + i % 13] for i in range(100)] + [[*range(3, 250)] * 9]
    found = tokens_of(many.generate(prompts, **options))
    assert any(size.by_section for size in many.host.runner.captured), "no sections"
    one = forerun.from_network(network, None, lanes=1, **how)
    expected = [one.generate(prompt, **options).token_ids for prompt in prompts[::-9]]
    assert found[::-9] == expected, f"{method} {dtype}: texts differ"


FEATURES = {"blocks": {}, "corrected": {"markov_rank": 8}, "one by one": {"autoregressive": True}}
FEATURE_CASES = [
    (kind, sampling, dtype)
    for kind in FEATURES
    for sampling in ("greedy", "drawn")
    for dtype in ("float32", "bfloat16")
]
AHEAD_CASES = [
    (kind, dtype, device)
    for kind in ("blocks", "corrected")
    for dtype in ("float32", "bfloat16")
    for device in ("idle", "busy")
]


def same_drafts_on_cuda(kind: str, sampling: str, dtype: str) -> None:
    """A drafter that looks into its target: captured, batched, with pages, in float32 it drafts
    and accepts what it does on a CPU; in half precision greedy text is that of `ar`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    shape = DrafterShape(257, 64, 96, 2, 4, 2, 16, (0, 1), 5, 255, **FEATURES[kind])
    drafter = FeatureDrafter(shape)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.3)
    options = dict(k=4, max_tokens=24, ignore_eos=True, temperature=float(sampling == "drawn"))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_drafter(Path(folder), drafter, tiny.build("llama", 0, torch.float32).config)
        for device in ("cpu", "cuda"):
            model = forerun.load("tiny", device=device, dtype=dtype, lanes=8, max_context=128)
            results = model.generate(PROMPTS, method="specdiff", draft=folder, **options)
            found[device] = [(r.token_ids, r.stats.acceptance_histogram) for r in results]
    if dtype == "float32":
        assert found["cuda"] == found["cpu"], f"{kind} {sampling}: drafts differ"
    assert all(host.runner.captured for host in model.engine.hosts), "nothing was captured"
    if sampling == "greedy":
        del options["k"]
        plain = tokens_of(model.generate(PROMPTS, method="ar", **options))
        assert plain == tokens_of(results), f"{kind} {dtype}: not the text of ar"


def liking(forward: Callable[..., Tensor], later: int) -> Callable[..., Tensor]:
    """A forward that likes the same token at a position, whoever runs it: about half of what is
    drafted so is accepted."""

    def liked(self: Any, batch: Any, slots: Any) -> Tensor:
        logits_RV = forward(self, batch, slots)
        token_R1 = ((batch.positions_T[batch.reads_R] + later) * 7 % 200)[:, None]
        return logits_RV.scatter_add(
            1, token_R1, torch.full_like(token_R1, 10, dtype=logits_RV.dtype)
        )

    return liked


@contextmanager
def behind() -> Iterator[None]:
    """A device that is behind with its work, as with a large model: copies to it wait."""
    forward = ForwardRunner.forward
    x = torch.rand(4096, 4096, device="cuda")

    def later(self: Any, *arguments: Any) -> Tensor:
        x.mm(x)
        return forward(self, *arguments)

    ForwardRunner.forward = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        ForwardRunner.forward = forward  # type: ignore[method-assign]


def rounds_on_cuda_are_those_of_single_steps(kind: str, dtype: str, device: str) -> None:
    """A device that goes on by itself drafts and judges what it does step by step, also where it
    is behind."""
    torch.manual_seed(1)
    prefetch.LEAST_COST = 0.0
    LeanBackbone.forward = liking(LeanBackbone.forward, 1)  # type: ignore[method-assign]
    FeatureBackbone.forward = liking(FeatureBackbone.forward, 0)  # type: ignore[method-assign]
    shape = DrafterShape(257, 64, 96, 2, 4, 2, 16, (0, 1), 5, 255, **FEATURES[kind])
    drafter = FeatureDrafter(shape)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.3)
    options = dict(k=4, max_tokens=90, ignore_eos=True, temperature=0.0, method="specdiff")
    texts = [[7 * i % 250 + j for j in range(9)] for i in range(8)]
    told = {}
    gone_on: list[int] = []  # waves that were queued while another one was on its way
    hand_over = prefetch_rounds.LookRounds.hand_over_next

    def note(self: Any, *others: Any) -> None:
        hand_over(self, *others)
        gone_on.append(1)

    prefetch_rounds.LookRounds.hand_over_next = note  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        write_drafter(Path(folder), drafter, tiny.build("llama", 0, torch.float32).config)
        for rounds in (0, 8):
            prefetch_rounds.MOST_ROUNDS = rounds
            model = forerun.load("tiny", device="cuda", dtype=dtype, lanes=8, max_context=128)
            with behind() if device == "busy" else nullcontext():
                for _ in range(3):  # what is captured is there afterwards
                    results = model.generate(texts, draft=folder, **options)
            told[rounds] = [
                (r.token_ids, r.stats.forwards, r.stats.acceptance_histogram) for r in results
            ]
            assert bool(sum(gone_on)) == bool(rounds), "no device went on by itself"
    assert told[8] == told[0], f"{kind} {dtype} {device}: rounds differ"


GAP_CASES = [
    (name, method, dtype)
    for name, method in (
        ("zoo:ar", "ar"),
        ("zoo:ar", "jacobi"),
        ("zoo:ar", "multiblock"),
        ("zoo:block", "s2d2-exact"),
        ("zoo:any-subset", "sequential"),
    )
    for dtype in ("bfloat16", "float32")
]


def check(job: tuple) -> str | None:
    """Run one check in a process of its own; say what went wrong, if anything."""
    function, case = job
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "forwards of this model are not captured")
            function(*case)
    except Exception as error:
        return f"{function.__name__} {case}: {type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="in their names")
    words = parser.parse_args().only
    start = time.perf_counter()
    jobs = [(gaps_explain_differences, case) for case in GAP_CASES]
    jobs += [(same_tokens_in_few_pages, case) for case in PAGE_CASES]
    jobs += [(same_long_text_among_many, case) for case in AMONG_MANY_CASES]
    jobs += [(same_drafts_on_cuda, case) for case in FEATURE_CASES]
    jobs += [(rounds_on_cuda_are_those_of_single_steps, case) for case in AHEAD_CASES]
    same = [(same_tokens_on_cuda, case) for case in CASES] + [
        (same_holes_on_cuda, case) for case in HOLE_CASES
    ]
    jobs += sorted(same, key=lambda job: job[1][-1])  # float32 first: float64 is never captured
    jobs = [job for job in jobs if any(word in job[0].__name__ for word in words)]
    if not jobs:
        parser.error(f"--only {' '.join(words)}: no check has such a name.")
    failed = []
    with ProcessPoolExecutor(
        min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    ) as pool:
        for done in as_completed([pool.submit(check, job) for job in jobs]):
            if done.result():
                failed.append(done.result())
                print(failed[-1], flush=True)
    seconds = time.perf_counter() - start
    device = torch.cuda.get_device_name()
    passed = len(jobs) - len(failed)
    print(f"{passed} passed, {len(failed)} failed on {device} in {seconds:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
