"""Every method takes the steps that it took: forwards, rows, drafts, and what is kept of them.

A wrong guess costs time and never shows in the text, so that no other test would see it. When steps
change on purpose, `python -m tests.methods.test_steps` writes steps.txt anew: read the difference.
"""

import zlib
from pathlib import Path

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import family_of, table_model
from forerun.families.block import Block
from forerun.families.masked import Masked

FILE = Path(__file__).with_name("steps.txt")
VOCAB = 5
MASK = VOCAB - 1
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [0, 1]]
HOLES = [[1, None, None, 2, None, 3, None, None], [None, 0, None, None, None, 2]]
SAMPLED = {"temperature": 1.0, "seed": 3}
PENALISED = {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.2}

# of every method: options, beside greedy and sampled decoding with none
CASES = {
    "auto": [{"learn": False, **SAMPLED}, PENALISED, {"most": 2}],
    "ar": [PENALISED],
    "speculative": [{"k": 3}, {"k": 4, **SAMPLED, "draft_temperature": 0.5}, PENALISED],
    "lookup": [{"k": 4, "adapt": False}, {"ngram": 1, **SAMPLED}],
    "predicted": [
        {"k": 4, "adapt": False, "prediction": [3, 1, 2, 2, 0, 1, 3, 0, 2, 1, 1, 3]},
        {"k": 6, "prediction": [0, 1, 2, 3], **SAMPLED},
    ],
    "jacobi": [{"block": 4, "start": start} for start in ("text", "random")]
    + [{"block": 5, "refill": False, **SAMPLED}],
    "multiblock": [
        {"block": 3, "blocks": 3, "spawn": 0.4, "candidates": 2},
        {"block": 3, "blocks": 2, "spawn": 0.0, "candidates": 2, "share": True},
        {"block": 2, "blocks": 4, "spawn": 0.0, "candidates": 1},
        {"block": 4, "blocks": 1, "refill": True, "start": "text"},
        {"block": 3, "blocks": 3, "spawn": 0.5, "start": "random", **SAMPLED},
    ],
    "lookahead": [{"window": 3, "ngram": 3, "guesses": 2}, {"window": 2, "ngram": 4, **SAMPLED}],
    "specdiff": [
        {"k": 3, "steps": 2},
        {"k": 3, "first": 4},
        {"k": 4, "adapt": True},
        {"k": 4, "keep": True, **SAMPLED},
    ],
    "specdiff-confidence": [{"k": 4, "steps": 2}, {"k": 3, "steps": 3, **SAMPLED}],
    "specdiff-ddpm": [{"k": 4, "steps": 2}, {"k": 3, "steps": 3, **SAMPLED}],
    "sequential": [PENALISED],
    "assd": [{"k": 3, "ahead": a} for a in ("none", "bonus", "every")]
    + [{"k": 4, "draft": "ngram"}, {"k": 4, "draft": "ngram", **SAMPLED}],
    "assd-tolerant": [{"k": 3, "tolerance": 0.3, **SAMPLED}],
    "stepwise": [{"block": 3, "cache": c, "refresh": 2} for c in ("prefix", "dual")],
    "steps": [{"steps": 3, "block": 5}, {"steps": 2, **SAMPLED}],
    "threshold": [{"threshold": 0.2, "block": 4}, {"threshold": 0.3, **SAMPLED}],
    "entropy-bounded": [{"bound": 3.0, "block": 5}, {"bound": 1.5, **SAMPLED}],
    "ssd": [
        {"drafts": 3, "tree": "chain", "block": 4},
        {"drafts": 2, "worth": 0.3, "block": 5, "cache": "dual", "refresh": 3},
        {"drafts": 0},
    ],
    "ancestral": [{"steps": 5}, {"steps": 7, **SAMPLED}],
    "block": [
        {"schedule": "static", "steps": 2},
        {"threshold": 0.2, "edit": 0.3, "post_edits": 2},
        {"threshold": 0.6, "edit": 0.3, "post_edits": 0},
        {"threshold": 0.3, "sub_block": 2, "causal": "prefix", **SAMPLED},
    ],
    "block-stepwise": [{"block": 3, "causal": "text"}, {"sub_block": 2, **SAMPLED}],
    "block-ssd": [{"drafts": 2, "tree": "chain"}, {"drafts": 3, "sub_block": 3, **SAMPLED}],
    "s2d2": [
        {"router": "span", "span": 2, "threshold": 0.3},
        {"router": "score", "estimator": "margin", "cost": 0.5, "threshold": 0.3},
        {"router": "hysteresis", "estimator": "confidence", "threshold": 0.2, **SAMPLED},
        {"router": "bandit", "threshold": 0.3, "ratio_power": 0.5, **SAMPLED},
        {"ratio_power": 3.0, **SAMPLED},
    ],
    "s2d2-exact": [{"k": 3, "ahead": "every"}, {"k": 2, **SAMPLED}],
    "s2d2-canvases": [{"span": 2, "drafts": 2, "threshold": 0.2}, {"span": 3, **SAMPLED}],
}
CAUSAL = (
    "auto",
    "ar",
    "speculative",
    "lookup",
    "predicted",
    "jacobi",
    "multiblock",
    "lookahead",
    "specdiff",
)
# what a method cannot do without
NEEDED = {"predicted": {"prediction": [1, 2, 3, 3, 1, 0]}}
FILLS_HOLES = ("sequential", "assd", "stepwise", "threshold", "ssd", "ancestral")
SHIFTED = {"stepwise": Masked, "ssd": Masked, "block": Block, "block-ssd": Block, "s2d2": Block}


class ByPosition(TableBackbone):
    """Laws that depend on the position only."""

    def logits(self, position, digests):
        return super().logits(position, ())


# One in which nearly every guess is wrong, and one in which most are right.
TABLES = {
    "fickle": lambda: TableBackbone(VOCAB, seed=1, sharpness=3.0),
    "steady": lambda: TableBackbone(
        VOCAB, seed=1, sharpness=3.0, like=ByPosition(VOCAB, seed=5, sharpness=6.0), blend=0.8
    ),
}


def steps_of(method):
    """One line for each case."""
    for table in TABLES:
        for options in [{}, SAMPLED, *CASES[method]]:
            yield line(method, table, options)
    for options in [{}, SAMPLED]:
        if method in FILLS_HOLES:
            yield line(method, "steady", options, tokens=HOLES)
        if method in SHIFTED:
            family = SHIFTED[method](MASK, *[4] * (SHIFTED[method] is Block), shifted=True)
            yield line(method, "steady", options, family=family)
            yield line(method, "steady", options, tokens=[[], [2]])


def line(method, table, options, tokens=PROMPTS, family=None):
    """What a method did, in numbers: forwards of each text, rows of all, and a checksum of every
    event."""
    target = TABLES[table]()
    causal = method.split("-")[0] in CAUSAL
    m = table_model(target, family=family or (None if causal else family_of(method, MASK)))
    more = {"method": method, **NEEDED.get(method, {}), **options}
    if method in ("speculative", "specdiff", "specdiff-confidence", "specdiff-ddpm"):
        draft_family = None if method == "speculative" else Masked(MASK)
        draft = TableBackbone(VOCAB, seed=2, like=target, blend=0.8, cost=0.1)
        more |= {"draft": table_model(draft, family=draft_family), "logit_bias": {MASK: -1e6}}
    if tokens is HOLES:
        results = m.infill(token_ids=tokens, **more)
    else:
        results = m.generate(tokens, max_tokens=12, **more)
    forwards = [f"{r.stats.forwards}+{r.stats.draft_forwards}" for r in results]
    rows = [host.work.rows for host in m.engine.hosts]
    events = str([list(map(str, r.trace)) for r in results]).encode()
    kind = f"{table} shifted" if family else table
    return (
        f"{method} {kind} {tokens} {options}: forwards {' '.join(forwards)}, rows {rows}, "
        f"{zlib.crc32(events):08x}"
    )


@pytest.mark.parametrize("method", CASES)
def test_a_method_takes_the_steps_that_it_took(method):
    expected = [one for one in FILE.read_text().splitlines() if one.split()[0] == method]
    assert list(steps_of(method)) == expected


if __name__ == "__main__":
    FILE.write_text("".join(one + "\n" for method in CASES for one in steps_of(method)))
