"""What the papers' tables and figures are, and how each is run at our scale. `bench/papers.py` runs
them.

A table has rows to decode (`specs`), or a `runner` of its own, or a reason why it cannot run here
(`needs`) with the command that would do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One row: a model, a method and its options."""

    label: str
    model: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperTable:
    name: str
    title: str
    specs: Sequence[Spec] = ()
    runner: str | None = "compare"
    shows: Sequence[str] = ("tokens/forward",)  # columns of the page
    against_first: bool = False  # speeds over the first row, of whichever model
    needs: str = ""
    command: str = ""  # where it is not this script's own
    result: str = ""  # where this script does not measure it
    study: str = ""  # or the file of docs/ with the rows of a training study, and its recipes
    recipes: Sequence[str] = ()
    theirs: str = ""
    agrees: str = ""
    why: str = ""


def spec(label: str, model: str, method: str, **options: Any) -> Spec:
    return Spec(label, f"zoo:{model}", method, options)


SCATTERED: dict[str, Any] = dict(blank=0.95, temperature=1.0, length=128)
DUAL: dict[str, Any] = dict(block=8, cache="dual", refresh=8)
BLOCKS = (4, 8, 16, 32)


def filling(label: str, method: str, **options: Any) -> Spec:
    return spec(label, "any-subset", method, **{**SCATTERED, **options})


def ssd(label: str, **options: Any) -> Spec:
    return spec(label, "masked", "ssd", **{**DUAL, **options})


def s2d2(label: str, **options: Any) -> Spec:
    return spec(label, "block", "s2d2", **options)


AR_BLOCK = spec("ar", "block", "ar")
QUALITY = ("tokens/forward", "speed", "nats", "true tokens")

ASSD = [
    PaperTable(
        "ASSD-table-1",
        "sequential and speculative filling, 95 % blank",
        [
            filling("sequential", "sequential"),
            filling("self", "assd", k=5, ahead="none"),
            filling("n-gram", "assd", k=5, draft="ngram"),
            filling("self, drafts ahead", "assd", k=5),
        ],
        shows=("tokens/forward", "speed"),
        theirs="486 forwards become 434 (self) and 422 (n-gram); 18.2 s become 16.5 and 16.8",
    ),
    PaperTable(
        "ASSD-table-2",
        "HumanEval single-line infilling, pass@1",
        runner=None,
        command="forerun evaluate humaneval --data FILE --method sequential --method assd",
        result="zoo:any-subset, 1,033 programs, greedy: 22.4 ± 1.3 % both ways, 9.9 ± 0.2 forwards "
        "become 6.7 ± 0.2 (docs/any-subset.md)",
        theirs="38.6 % (XLNet-Code, 110M), 40.7 % (DiffuLLaMA, 6.7B)",
        agrees="in kind",
        why="the same output in fewer forwards; our model has 6 M parameters",
    ),
    PaperTable(
        "ASSD-table-3",
        "ROCStories infilling, ROUGE",
        runner=None,
        needs="ROCStories, and a model trained on English",
        command="forerun evaluate stories --model MODEL --data FILE",
        theirs="ROUGE-1 of GPT-2 9.5 and 13.5, SEDD 11.6 and 16.2 (1 and 3 of 5 sentences)",
    ),
    PaperTable(
        "ASSD-table-4",
        "off-the-shelf XLNet",
        runner=None,
        needs="xlnet-base-cased",
        command="bench/papers.py ASSD-table-1 --swap zoo:any-subset=xlnet/xlnet-base-cased",
        theirs="as Table 1, with the model as it was pretrained",
    ),
    PaperTable(
        "ASSD-table-5",
        "number of drafted tokens k, 95 % blank",
        [
            filling("sequential", "sequential"),
            *(filling(f"k = {k}", "assd", k=k, ahead="none") for k in (2, 3, 5, 10, 15)),
        ],
        shows=("tokens/forward", "speed"),
        theirs="speed-up -4 % at k = 2, 6.7 % at 3, 8 to 9 % from 4 on (128 tokens)",
    ),
    PaperTable(
        "ASSD-table-6",
        "length of the text, k = 5, 95 % blank",
        [
            part
            for length in (64, 128, 256)
            for part in (
                filling(f"sequential, {length}", "sequential", length=length),
                filling(f"assd, {length}", "assd", k=5, ahead="none", length=length),
            )
        ],
        shows=("tokens/forward",),
        theirs="speed-up 8.9 % at 128 tokens, 11.0 % at 1,024",
    ),
    PaperTable(
        "ASSD-table-7",
        "what keeping keys is worth",
        runner=None,
        command="bench/any_subset.py DATA --only cache",
        result="docs/any-subset.md, the table of cached and uncached forwards",
        theirs="0.071 s with, 0.141 s without (340M, 128 of 1024 tokens)",
        agrees="yes",
        why="keys of decided tokens never change, so nothing is computed twice",
    ),
    PaperTable(
        "ASSD-table-8",
        "tolerance in the acceptance test",
        [
            filling("sequential", "sequential"),
            *(
                filling(f"tolerance {e:g}", "assd-tolerant", k=5, tolerance=e, ahead="none")
                for e in (1e-4, 1e-3, 1e-2, 5e-2)
            ),
        ],
        shows=("tokens/forward",),
        theirs="speed-up 8.3 % at 0 to 11 % at 0.05, where the law is visibly another",
    ),
    PaperTable(
        "ASSD-table-9",
        "left to right",
        [
            spec("sequential", "any-subset", "sequential", temperature=1.0),
            spec("speculative", "any-subset", "assd", temperature=1.0, k=5, ahead="none"),
        ],
        shows=("tokens/forward", "speed", "nats"),
        theirs="383 forwards become 349.5 (9 % fewer), perplexity 61 and 60",
    ),
    *(
        PaperTable(
            f"ASSD-figure-{number}",
            title,
            runner=None,
            shows=("loss", "nats", "entropy", "tokens/forward"),
            needs="a GPU: each curve is a training run",
            command="bench/any_subset_training.py run --tokens TOKENS --out FOLDER (a GPU), then "
            "`report`",
            study="any-subset-training.json",
            recipes=("base", recipe),
            theirs=theirs,
        )
        for number, title, recipe, theirs in (
            (
                3,
                "lattice or any permutation",
                "any permutation",
                "the lattice: more entropy, later less perplexity; permutations: fewer forwards",
            ),
            (4, "narrow or wide prompting rates", "wide", "narrow: less perplexity at 95 % blank"),
            (5, "masking warm-up", "masking warm-up", "negligible once the warm-up is over"),
            (6, "pretrained or from scratch", "from scratch", "from scratch is very poor"),
        )
    ),
]

SMALL = "zoo:drafter"
MASKED = "zoo:masked"
SPECDIFF = [
    PaperTable(
        "SpecDiff-table-1",
        "cost of one draft",
        runner=None,
        command="forerun compare --models zoo:ar --methods speculative,specdiff --draft zoo:masked",
        result="MFLOP/draft and MB/token are columns of every comparison",
        theirs="T forwards of the drafter per draft, instead of gamma",
        agrees="yes",
        why="a draft of gamma tokens takes T forwards: draft forwards of SpecDiff-table-2",
    ),
    PaperTable(
        "SpecDiff-table-2",
        "SpecDiff with initialisation, and classic speculation",
        [
            spec("ar", "ar", "ar"),
            spec("speculative, γ 8", "ar", "speculative", draft=SMALL, k=8),
            spec(
                "ddpm_cache, γ 15, T 2, first 16",
                "ar",
                "specdiff-ddpm",
                draft=MASKED,
                k=15,
                steps=2,
                first=16,
                first_draft=SMALL,
            ),
            spec("ours, γ 15, T 1", "ar", "specdiff", draft=MASKED, k=15, steps=1),
        ],
        shows=("tokens/forward", "alpha", "draft forwards", "speed"),
        theirs="α 0.87 to 0.89 (classic 0.85 to 0.95); 1.45 to 1.75 times as fast as classic",
    ),
    PaperTable(
        "SpecDiff-table-3",
        "MT Bench, Vicuna 33B, EAGLE",
        runner=None,
        needs="Vicuna 33B, and an MDLM drafter with Llama's tokens",
        command="forerun compare --models VICUNA --draft MDLM --methods ar,specdiff-ddpm",
        theirs="α 0.76, 2.61 times plain decoding",
    ),
    PaperTable(
        "SpecDiff-table-4",
        "without initialisation",
        [
            spec("ar", "ar", "ar"),
            *(
                spec(
                    f"first {first}",
                    "ar",
                    "specdiff-ddpm",
                    draft=MASKED,
                    k=15,
                    steps=2,
                    **({"first": first, "first_draft": SMALL} if first else {}),
                )
                for first in (0, 8, 16)
            ),
        ],
        shows=("tokens/forward", "alpha", "speed"),
        theirs="α 0.75 to 0.82 without, 0.87 to 0.89 with; a little slower without",
    ),
    PaperTable(
        "SpecDiff-table-5",
        "the published setting: ddpm_cache, γ 15 or 20, T 2",
        [
            spec("ar", "ar", "ar"),
            *(
                spec(f"γ {k}, T 2", "ar", "specdiff-ddpm", draft=MASKED, k=k, steps=2)
                for k in (15, 20)
            ),
            *(
                spec(f"{order}, γ 15, T 2", "ar", method, draft=MASKED, k=15, steps=2)
                for order, method in (
                    ("left to right", "specdiff"),
                    ("confidence", "specdiff-confidence"),
                )
            ),
        ],
        shows=("tokens/forward", "alpha", "draft forwards"),
        theirs="the settings of Tables 2 and 3",
    ),
    PaperTable(
        "SpecDiff-table-6",
        "SEDD as drafter",
        runner=None,
        needs="louaaron/sedd-small, fine-tuned on the task, and GPT-2 XL",
        command="forerun compare --models gpt2-xl --draft SEDD --methods ar,specdiff-ddpm",
        theirs="α 0.70 and 0.77, 2.1 and 3.0 times plain decoding",
    ),
    PaperTable(
        "SpecDiff-figure-2",
        "γ x T",
        [
            spec("ar", "ar", "ar"),
            *(
                spec(f"γ {k}, T {t}", "ar", "specdiff-ddpm", draft=MASKED, k=k, steps=t)
                for k in (5, 10, 15)
                for t in (1, 2, 4)
            ),
        ],
        shows=("tokens/forward", "alpha", "speed"),
        theirs="accepted tokens grow with T, speed falls (a picture)",
    ),
    PaperTable(
        "SpecDiff-figure-3",
        "accepted lengths",
        [spec("γ 15, T 2", "ar", "specdiff-ddpm", draft=MASKED, k=15, steps=2)],
        shows=("accepted",),
        theirs="a picture: long drafts are accepted (OpenWebText)",
    ),
    PaperTable(
        "SpecDiff-figure-4",
        "accepted lengths, MT Bench",
        runner=None,
        needs="Vicuna 33B",
        command="as SpecDiff-table-3; stats.acceptance_histogram of its results",
        theirs="a picture: shorter than in Figure 3, as its α is lower",
    ),
]

SSD = [
    PaperTable(
        "SSD-table-1",
        "forwards saved under the dual cache, block 8, refresh 8",
        [
            spec("stepwise", "masked", "stepwise", **DUAL),
            *(ssd(f"N = {n}", drafts=n, tree="chain") for n in (3, 4, 5)),
            ssd("N = 5, 20 canvases", drafts=5, tree="likeliest"),
        ],
        shows=("saved", "same", "speed"),
        theirs="53 to 77 % of forwards, 1.5 to 3.5 times as fast on an A100",
    ),
    PaperTable(
        "SSD-table-2",
        "what better drafts could save",
        runner="limits",
        result="N = 3 69 to 74 %, N = 4 73 to 78 %, N = 5 76 to 81 % (docs/masked.md, 6 prompts)",
        shows=("saved",),
        theirs="N = 3: 68 to 75 %; N = 4: 72 to 79 %; N = 5: 72 to 82 %",
    ),
    PaperTable(
        "SSD-table-3",
        "greedy and mixed order",
        [
            spec("stepwise", "masked", "stepwise", **DUAL),
            *(
                ssd(f"{tree}, N = {n}", drafts=n, tree=tree)
                for n in (3, 4, 5)
                for tree in ("chain", "mixed")
            ),
        ],
        shows=("saved", "same"),
        theirs="59, 62, 63 % greedy; 61.5, 65, 66 % mixed",
    ),
    PaperTable(
        "SSD-figure-3",
        "length of text and prompt",
        [
            part
            for tokens in (16, 32, 64)
            for part in (
                spec(f"stepwise, {tokens}", "masked", "stepwise", max_tokens=tokens, **DUAL),
                ssd(f"N = 3, {tokens}", drafts=3, tree="chain", max_tokens=tokens),
            )
        ],
        shows=("saved",),
        theirs="2.2 times as fast at 128 tokens, 2.0 at 512",
    ),
]

CONSISTENCY: list[Spec] = [
    spec("ar", "ar", "ar"),
    spec("jacobi, n 16", "ar", "jacobi", block=16),
    spec("lookup", "ar", "lookup"),
    spec("ar, distilled", "consistency", "ar"),
    spec("distilled, n 16", "consistency", "jacobi", block=16),
    spec("distilled, MR", "consistency", "multiblock", block=16),
    spec("distilled, lookup", "consistency", "lookup"),
]
STUDY = "bench/distillation.py run --tokens TOKENS --out FOLDER (a GPU), then `report`"
PCLLM = [
    PaperTable(
        "pcLLM-table-1",
        "Jacobi, distilled, multi-block with recycling (code)",
        CONSISTENCY,
        shows=QUALITY,
        against_first=True,
        theirs="Jacobi 0.97, CLLM 2.5, pcLLM 3.6, MR 3.6 times; accuracy 87.8 to 84.8",
    ),
    PaperTable(
        "pcLLM-table-2",
        "the same on an H200",
        runner=None,
        needs="an H200, and Qwen2.5-Coder-7B distilled (JacobiForcing_Coder_7B_v1)",
        command="bench/papers.py pcLLM-table-1 --device cuda --swap zoo:consistency=MODEL",
        theirs="3.6 and 3.95 times",
    ),
    PaperTable(
        "pcLLM-table-3",
        "GSM8K and MATH",
        runner=None,
        needs="Qwen2.5-Math-7B distilled (JacobiForcing_Math_7B_v1)",
        command="forerun evaluate gsm8k --model MODEL --method multiblock",
        theirs="3.5 and 3.7 times, 92.4 % becomes 91.4 %",
    ),
    PaperTable(
        "pcLLM-table-4",
        "noise schedules of the distillation",
        runner=None,
        shows=("n = 64",),
        command=STUDY,
        study="distillation.json",
        recipes=("paper", "CLLM", "ours", "ours, random schedule", "ours, reverse schedule"),
        agrees="no",
        why="the schedule makes no difference in our recipe; neither learns much under the "
        "published weights",
        theirs="linear progressive 0.46 iterations per token, random 0.51, reverse 0.62",
    ),
    PaperTable(
        "pcLLM-table-5",
        "noisy or clean context in the distillation",
        runner=None,
        shows=("n = 64",),
        needs="a GPU: each cell is a training run",
        command=STUDY,
        study="distillation.json",
        recipes=(
            "paper",
            "paper, clean context",
            "paper, own x 1",
            "paper, own x 1, window context",
            "ours, noisy context",
            "ours",
        ),
        agrees="no",
        why="a clean context finds more in our recipe. With a weight of 1 on own text the paper's "
        "noisy context finds more than one clean window, by 1.7 of the errors",
        theirs="3.6 times with noisy context, 1.9 with clean",
    ),
    PaperTable(
        "pcLLM-table-6",
        "beside speculative decoding and diffusion",
        [
            *CONSISTENCY,
            spec("speculative", "ar", "speculative", draft=SMALL, k=8),
            spec("s2d2-exact", "block", "s2d2-exact"),
        ],
        shows=("tokens/forward", "speed"),
        against_first=True,
        theirs="MR 4.2 tokens per forward, EAGLE-3 6.4, HASS 5.5, SDAR 2.4",
    ),
    PaperTable(
        "pcLLM-figure-4",
        "block size n of a distilled model",
        [
            spec("ar", "consistency", "ar"),
            *(spec(f"n = {n}", "consistency", "jacobi", block=n) for n in (4, 8, 16, 32, 64)),
            *(
                spec(f"n = {n}, recycling", "consistency", "multiblock", block=n, blocks=1)
                for n in (16, 64)
            ),
        ],
        shows=("tokens/forward", "speed"),
        theirs="no latency lost up to n = 64 on an H200, little at 128; larger n, more tokens",
    ),
    PaperTable(
        "pcLLM-figure-6",
        "time of a forward by its tokens",
        runner="latency",
        shows=("over one token",),
        theirs="flat to about 128 tokens (A100) and 256 (H200, B200)",
    ),
]

S2D2 = [
    PaperTable(
        "S2D2-table-1",
        "SDAR's configurations by name, temperature 1",
        [
            spec("ar", "block", "ar", temperature=1.0),
            spec("dynamic, B = 4", "block", "block", block=4, temperature=1.0),
            *(
                s2d2(name, config=name, temperature=1.0)
                for name in ("sdar-1.7b-A", "sdar-1.7b-B", "sdar-8b-A", "sdar-8b-B")
            ),
        ],
        shows=QUALITY,
        theirs="A 2.1 to 3.6 times, B 3.7 to 4.7 times plain decoding; accuracy kept",
    ),
    PaperTable(
        "S2D2-table-2",
        "Fast-dLLM v2's configurations by name, B = 32",
        [
            AR_BLOCK,
            *(
                spec(f"dynamic, SB = {size}", "block", "block", block=32, sub_block=size)
                for size in (4, 8, 32)
            ),
            *(s2d2(f"fast-dllm-v2-{letter}", config=f"fast-dllm-v2-{letter}") for letter in "ABC"),
        ],
        shows=QUALITY,
        theirs="S2D2 1.6 (A), 2.8 (B), 3.1 times (C); dynamic 2.1, 2.7, 2.9",
    ),
    PaperTable(
        "S2D2-table-3",
        "token editing (LLaDA2.1), B = 32",
        [
            AR_BLOCK,
            spec("edits, .7/.5", "block", "block", block=32, threshold=0.7, edit=0.5, post_edits=0),
            spec(
                "edits, .95/.9", "block", "block", block=32, threshold=0.95, edit=0.9, post_edits=0
            ),
            s2d2("llada2.1-quality", config="llada2.1-quality"),
            s2d2("llada2.1-conservative", config="llada2.1-conservative"),
        ],
        shows=QUALITY,
        theirs="quality: 2.1 times and +3.7 points; conservative: 2.2 times (edits alone 1.7)",
    ),
    PaperTable(
        "S2D2-table-4",
        "estimators of acceptance, B = 16",
        runner="estimators",
        result="mean absolute error: margin 0.1 0.87, confidence 0.5 0.95, entropy 1 0.99 "
        "(docs/block.md, 32 prompts)",
        shows=("error", "mae"),
        theirs="mean absolute error: margin 0.1 1.25, confidence 0.5 4.66, entropy 1 5.08",
    ),
    PaperTable(
        "S2D2-table-5",
        "static and dynamic, by block size",
        [
            AR_BLOCK,
            *(spec(f"static, B = {b}", "block", "block-stepwise", block=b) for b in BLOCKS),
            *(spec(f"dynamic, B = {b}", "block", "block", block=b) for b in BLOCKS),
        ],
        shows=QUALITY,
        theirs="dynamic 2.4, 3.0, 3.1, 3.0 times at B = 4 to 32, accuracy 75.9 to 63.3 %",
    ),
    PaperTable(
        "S2D2-table-6",
        "minimum span",
        [AR_BLOCK, *(s2d2(f"span {n}", block=16, span=n) for n in (1, 2, 4, 8))],
        shows=QUALITY,
        theirs="B = 16: 3.2 to 3.5 times and 75.7 to 72.6 % from span 1 to 15",
    ),
    *(
        PaperTable(
            f"S2D2-table-{number}",
            f"score thresholds, {estimator}",
            [
                AR_BLOCK,
                *(
                    s2d2(
                        f"{score}, {enough:g}",
                        block=16,
                        router="score",
                        score=score,
                        enough=enough,
                        estimator=estimator,
                    )
                    for score in ("static", "dynamic")
                    for enough in (-1.0, 0.0, 1.0, 2.0)
                ),
            ],
            shows=QUALITY,
            theirs="better than dynamic at B = 16 and 32; entropy more accurate than margin",
        )
        for number, estimator in ((7, "entropy"), (8, "margin"))
    ),
    PaperTable(
        "S2D2-table-9",
        "hysteresis",
        [
            AR_BLOCK,
            *(
                s2d2(f"on {on}, off {off}", block=16, router="hysteresis", on=on, off=off)
                for on, off in ((0.0, -5.0), (1.0, -5.0), (1.0, 0.0), (2.0, 1.0), (3.0, 2.0))
            ),
        ],
        shows=QUALITY,
        theirs="B = 16: on 0 or 1 75 to 76 %, on 5 72 %; 3.1 to 3.6 times",
    ),
    PaperTable(
        "S2D2-table-10",
        "bandit",
        [
            AR_BLOCK,
            *(
                s2d2(f"{bins}, {beta:g}", block=16, router="bandit", bins=bins, explore=beta)
                for bins in ("1,2,2", "2,2,2", "4,4,4")
                for beta in (0.2, 1.0)
            ),
        ],
        shows=QUALITY,
        theirs="B = 16: 66 to 71 %, 2.9 to 3.5 times; not the best policy",
    ),
    PaperTable(
        "S2D2-table-11",
        "tempered ratios, temperature 1",
        [
            s2d2(f"γ {power:g}", block=16, ratio_power=power, temperature=1.0)
            for power in (1.0, 0.5, 0.75, 1.25, 1.5)
        ],
        shows=QUALITY,
        theirs="nothing clear: 73 to 77 % and 0.94 to 1.03 times",
    ),
    PaperTable(
        "S2D2-figure-2",
        "AR-ness, B = 16",
        [
            spec("static", "block", "block-stepwise", block=16),
            spec("dynamic", "block", "block", block=16),
            s2d2("s2d2", block=16),
        ],
        runner="orders",
        shows=("local", "global"),
        theirs="a picture: SDAR nearer to left to right on MBPP than on GSM8K",
    ),
    PaperTable(
        "S2D2-figure-3",
        "quality against wall time",
        [
            AR_BLOCK,
            *(spec(f"dynamic, B = {b}", "block", "block", block=b) for b in BLOCKS[::2]),
            *(s2d2(f"s2d2, B = {b}", block=b, causal="text") for b in BLOCKS[::2]),
            spec("s2d2-exact", "block", "s2d2-exact"),
        ],
        shows=QUALITY,
        theirs="S2D2 lies above dynamic decoding at every speed",
    ),
]

# What our numbers say of the paper's, once there are some: agrees or not, and why.
SLOW_HERE = "on a CPU every row costs time, so saved forwards save none"
READINGS = {
    "ASSD-table-1": ("forwards yes, time no", f"1.12 and 1.15 tokens/forward there; {SLOW_HERE}"),
    "ASSD-figure-3": (
        "yes",
        "the lattice: more entropy, likelier texts, and fewer tokens/forward (1.08, against 1.24)",
    ),
    "ASSD-figure-4": (
        "in kind",
        "narrow has the lower held-out loss; texts are likelier by less than their error; one seed",
    ),
    "ASSD-figure-5": ("yes", "no difference beyond the errors at the last step; one seed"),
    "ASSD-figure-6": ("yes", "far behind after as many steps, in loss and in likelihood; one seed"),
    "SpecDiff-table-4": (
        "α yes, time no",
        "α rises with initialisation, within its error; our drafter is as large as its target",
    ),
    "SSD-table-1": (
        "forwards in part, time no",
        f"a small model is less sure: 45 % by the chain, 55 % by more canvases; {SLOW_HERE}",
    ),
    "SSD-table-3": ("yes", "mixed order saves 4 points more, the paper's 2.5 to 3.1"),
    "S2D2-table-1": (
        "no",
        "1.2 to 1.3 tokens/forward at temperature 1; quality cannot be told apart at this count",
    ),
    "S2D2-table-2": (
        "forwards yes, quality no",
        "B and C find 1.6 tokens/forward, dynamic 1.2; the published acceptance draws at "
        "temperature 0, and its text is less likely to the judge",
    ),
    "S2D2-table-9": (
        "yes",
        "little between the settings; the paper's never turn off on this model, 2 and 1 do",
    ),
    "S2D2-figure-2": ("in kind", "order of confidence is far from left to right on code here too"),
    "ASSD-table-9": ("forwards yes", "1.10 tokens/forward there; the time is within its error"),
    "SpecDiff-table-2": (
        "α yes, time no",
        "with initialisation α is classic speculation's; the drafter is as large as its target",
    ),
    "SpecDiff-table-5": (
        "runs as published",
        "random reveal is accepted a little less than left to right or in order of confidence, "
        "within the errors",
    ),
    "S2D2-figure-3": (
        "forwards yes, time hardly",
        "quality is the same within errors; 1.0 times by wall time, s2d2-exact 1.4 times",
    ),
    "ASSD-table-5": (
        "forwards yes, time no",
        f"k = 2 saves nothing, from 5 on k does not matter; {SLOW_HERE}",
    ),
    "ASSD-table-8": (
        "yes",
        "tolerance saves little below 0.05; the law is another: it says approximate",
    ),
    "SpecDiff-figure-3": (
        "in kind",
        "drafts are often rejected at once, and sometimes accepted long",
    ),
    "S2D2-table-3": (
        "no",
        "always verifying finds 1.9 tokens/forward at both thresholds; edits repair little",
    ),
    "S2D2-table-4": (
        "in part",
        "the hard margin at 0.1 is near here too (0.89), but not nearest: entropy and confidence "
        "are a little nearer (0.83)",
    ),
    "SSD-table-2": ("yes", "every N lies within the paper's range"),
    "SSD-figure-3": ("in kind", "longer texts save more forwards: 34, 40 and 43 %"),
    "ASSD-table-6": ("in kind", "25 to 30 % fewer forwards at every length"),
    "SpecDiff-figure-2": (
        "no",
        "γ helps a little, T not at all: accepted tokens do not grow with T, so speed only falls; "
        "the drafter is as large as its target, and something else ran on that GPU",
    ),
    "S2D2-table-5": (
        "in kind",
        "dynamic finds more per forward; this model does not spoil by B = 32",
    ),
    "S2D2-table-6": ("yes", "spans of 1 to 4 are alike, 8 is slower"),
    "S2D2-table-7": ("yes", "0 is best; the same text at 1.2 to 1.4 times by wall time"),
    "S2D2-table-8": ("yes", "by the margin, thresholds 0 and 1 leave worse text than by entropy"),
    "pcLLM-table-6": (
        "in kind, time no",
        "speculation with a small model finds most, lookup more than distillation; the speeds are "
        "disturbed: plain decoding of two models of one size differs by half",
    ),
    "S2D2-table-10": ("in kind", "learns too little in so short a text"),
    "pcLLM-figure-4": ("no", f"n beyond 8 finds nothing more in texts this short; {SLOW_HERE}"),
    "S2D2-table-11": ("yes", "nothing clear at this count"),
    "pcLLM-figure-6": ("no plateau", "a CPU is bound by arithmetic from a few tokens on"),
    "pcLLM-table-1": (
        "forwards in part, time no",
        f"1.6 tokens/forward, 1.7 with MR; lookup without training finds 2.0; {SLOW_HERE}",
    ),
}


def read(table: PaperTable) -> PaperTable:
    agrees, why = READINGS.get(table.name, (table.agrees, table.why))
    return replace(table, agrees=agrees, why=why)


TABLES = {table.name: read(table) for table in [*ASSD, *SPECDIFF, *SSD, *PCLLM, *S2D2]}
