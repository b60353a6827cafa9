"""Write the table of what `exact` covers in docs/certification.md, or --check it.

Enumerated cells are read off the certification cases, those of CUDA and 16 bits off tests/gpu. The
rest is declared here with the test that does it, which must exist.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from page_part import write_or_check  # noqa: E402

from forerun import registry  # noqa: E402
from forerun.certify.cases import Case, standard_cases  # noqa: E402
from forerun.certify.enumeration import family_of  # noqa: E402
from forerun.families.any_subset import SubsetScorer  # noqa: E402
from forerun.families.masked import CanvasFiller  # noqa: E402
from tests.gpu import bits, checks  # noqa: E402

PAGE = ROOT / "docs" / "certification.md"

ENUMERATED, STATISTICS, IDENTITY, NOT_COVERED, NOT_APPLICABLE = "E", "S", "I", "–", ""

# Column -> the values with which a case covers it.
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": lambda value: value == 0},
    "temperature": {"temperature": lambda value: value > 0 and value != 1},
    "top-k": {"top_k": bool},
    "top-p": {"top_p": lambda value: value < 1},
    "min-p": {"min_p": bool},
    "penalties": {
        "repetition_penalty": lambda value: value != 1,
        "presence_penalty": bool,
        "frequency_penalty": bool,
    },
    "bias": {"logit_bias": bool},
    "allowed tokens": {"allowed_tokens": bool},
    "min_tokens": {"min_tokens": bool},
    "stop tokens": {"stop_token_ids": bool},
    "end token": {"eos": bool},
}

# What the tests do besides: the word, and the test that does it.
FAST_IS_PLAIN = "tests/methods/test_jacobi.py::test_greedy_text_is_plain_decodings_text"
SSD_IS_STEPWISE = (
    "tests/families/test_masked.py::test_ssd_writes_what_stepwise_writes_in_no_more_forwards"
)
HOLDS = "tests/certify/test_testing.py::test_a_right_method_holds_with_the_power_that_was_asked_for"
PLAIN = "tests/engine/test_engine.py::test_greedy_ar_is_what_transformers_generates"
FLOAT32 = {
    "ar": (IDENTITY, PLAIN),
    "speculative": (STATISTICS, HOLDS),
    "jacobi": (IDENTITY, FAST_IS_PLAIN),
    "multiblock": (IDENTITY, FAST_IS_PLAIN),
    "lookahead": (IDENTITY, FAST_IS_PLAIN),
    "ssd": (IDENTITY, SSD_IS_STEPWISE),
}


def exact_methods() -> list[str]:
    names = registry.BUILT_IN["methods"]
    return [name for name in names if registry.method_named(name).guarantee == "exact"]


def covers(cases: list[Case], wanted: dict[str, Any]) -> str:
    """Enumerated if every parameter of a column has a case."""
    found = [
        any(name in case.keywords and is_set(case.keywords[name]) for case in cases)
        for name, is_set in wanted.items()
    ]
    return ENUMERATED if all(found) else NOT_COVERED


def models(name: str, cases: list[Case]) -> str:
    """The families of the targets that a method is enumerated on."""
    found = {}
    for case in cases:
        family = case.keywords.get("family") or family_of(name, case.keywords.get("mask"))
        found[f"{family.name}, shifted" if family.shifted else family.name] = None
    return "; ".join(found)


def holes(name: str, cases: list[Case]) -> str:
    """Texts with holes. Left-to-right and block models cannot look past one."""
    needs = registry.method_named(name).needs
    if not {SubsetScorer, CanvasFiller} & set(needs):
        return NOT_APPLICABLE
    return ENUMERATED if any(None in case.args[2] for case in cases) else NOT_COVERED


def cache_policies(name: str, cases: list[Case]) -> str:
    """Keys that are kept though they are stale: `cache` of masked decoding, `keep` of a draft."""
    options = [case.keywords.get("method_options") or {} for case in cases]
    policies = {option["cache"] for option in options if "cache" in option}
    if any(option.get("keep") for option in options) or policies >= {"prefix", "dual"}:
        return ENUMERATED
    if "cache" not in registry.method_named(name).option_names():
        return NOT_APPLICABLE
    return NOT_COVERED


def on_cuda(name: str) -> str:
    compared = {key.split()[0] for key in (*checks.METHODS, *checks.BLOCKS, *checks.FILLING)}
    return IDENTITY if name in compared | compared_by_bits() else NOT_COVERED


def compared_by_bits() -> set[str]:
    """Methods that tests/gpu/bits.py compares in 16 bits, and what it compares them with."""
    cases = [case for of_model in bits.EXACT.values() for case in of_model.items()]
    return {label.split()[0] for label, _ in cases} | {reference for _, (reference, _) in cases}


def row(name: str) -> list[str]:
    cases = standard_cases(name)
    return [
        f"`{name}`",
        models(name, cases),
        *(covers(cases, wanted) for wanted in PARAMETERS.values()),
        holes(name, cases),
        cache_policies(name, cases),
        ENUMERATED,  # table models are float64, on a CPU
        FLOAT32.get(name, (NOT_COVERED, ""))[0],
        IDENTITY if name in compared_by_bits() else NOT_COVERED,
        on_cuda(name),
    ]


def check_tests() -> None:
    """Every test that is named here must exist."""
    for _, test in set(FLOAT32.values()):
        file, _, function = test.partition("::")
        if f"def {function}(" not in (ROOT / file).read_text():
            sys.exit(f"tools/exact.py names {test}, which does not exist.")


def table() -> str:
    check_tests()
    last = ["holes", "stale keys", "float64", "float32", "16 bits", "CUDA"]
    header = ["method", "models", *PARAMETERS, *last]
    rows = [header, ["---"] * len(header), *(row(name) for name in exact_methods())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    write_or_check(PAGE, "exact", "tools/exact.py", table)
