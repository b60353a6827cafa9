"""The cases that methods are certified on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from forerun import registry
from forerun.backbones.table import FREE_ROWS, TableBackbone
from forerun.certify.enumeration import Certificate, certify_case, check_table_families
from forerun.certify.reference import Prompt
from forerun.errors import BadOption, NotAble, unknown
from forerun.families.any_subset import AnySubset, SubsetScorer
from forerun.families.block import Block, BlockFiller
from forerun.families.features import Features
from forerun.families.masked import CanvasFiller, Masked
from forerun.probability.markov import Markov

Case = partial[Certificate]
Options = dict[str, Any]


def case(method: str, target: TableBackbone, prompt: Prompt, **options: Any) -> Case:
    """A comparison that is made when it is called. Its arguments can be read from it."""
    return partial(certify_case, method, target, prompt, **options)


SAMPLINGS: list[Options] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    {"temperature": 0.8, "logit_bias": {0: 1.5}, "min_tokens": 2},
    {"temperature": 1.0, "allowed_tokens": [0, 2]},
]


# Methods that guess without a drafter: guesses are right, wrong, recycled and carried over.
# What rows cost where lengths of drafts are left open: so much that every outcome counts.
STEEP = {1: 1.0, 2: 1.35, 8: 3.0}

GUESSING: dict[str, list[Options]] = {
    "jacobi": [{}]
    + [
        {"block": n, "start": start, "refill": n != 2}
        for n in (1, 2, 4)
        for start in ("repeat", "text")
    ],
    "multiblock": [
        {"block": 2, "blocks": 2, "spawn": 0.0, "candidates": 2},
        {"block": 2, "blocks": 3, "spawn": 0.5, "candidates": 0, "start": "random"},
        {"block": 3, "blocks": 1, "candidates": 3, "start": "text"},
        {"block": 2, "blocks": 1, "refill": True, "candidates": 1},
    ],
    "lookahead": [{"window": 2, "ngram": 3, "guesses": 2}, {"window": 1, "ngram": 4, "guesses": 3}],
}


# What a caller expects: right and wrong at once, ends early, holds an end token.
PREDICTIONS: list[Options] = [
    {"prediction": [0, 2, 0, 1, 2, 0]},
    {"prediction": [1, 1, 0], "adapt": False},
]


# Parameters alone and together, for longer texts: penalties look back on drafted and placed tokens,
# bias comes before penalties, ends lie inside drafts and anywhere on a canvas. Two outcomes are
# enough, and truncation would hide what is wrong.
EDITS: list[Options] = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.8, "frequency_penalty": 0.9},
    {"logit_bias": {0: 1.7, 1: -0.6}, "repetition_penalty": 2.5},
]
ENDS: list[Options] = [
    {"eos": (1,), "min_tokens": 1},
    {"eos": (1,), "ignore_eos": True, "stop_token_ids": [0], "min_tokens": 3},
    {
        "eos": (1,),
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.6,
        "logit_bias": {1: -0.7},
    },
]
# These need more outcomes.
TRUNCATIONS: list[Options] = [
    {"top_k": 3, "top_p": 0.55, "min_p": 0.45, "temperature": 1.5},
    {"allowed_tokens": [0, 2], "frequency_penalty": 0.6, "top_p": 0.9},
]
# At temperature 0 there is one outcome, so texts can be long.
GREEDY: list[Options] = [
    {
        "eos": (1,),
        "min_tokens": 9,
        "logit_bias": {1: 0.7},
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": 0.6,
    }
    for repetition in (1.2, 3.0)
    for presence in (-1.0, 0.4)
]


# Languages over the letters a and b, for methods that decide from left to right: tokens without an
# alternative at the beginning and inside, texts that end early, late and never, drafts that leave
# the language, penalties on tokens that nobody drew.
LETTERS = (b"a", b"b", b"z", b"?")  # z is never allowed but to end a text; ? is a mask
FEWER: Options = {"ahead": "whole", "steps": 1}  # ways to draft
LANGUAGES: list[Options] = [
    {"regex": "a(a|b)*ba", "temperature": 1.0},
    {"regex": "(ab|ba|bb)*", "temperature": 0.8, "eos": (2,), "min_tokens": 2},
    {
        "regex": "(aa|b)b(a|bb)b*",
        "temperature": 1.0,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.6,
    },
    {"choices": ["ab", "abb", "baab", "bbaba"], "temperature": 1.5, "top_p": 0.9, "eos": (2,)},
    {"regex": "b+a(a|b)b", "temperature": 0.0, "presence_penalty": 0.7},
]


HOLES: list[Prompt] = [
    [None, 0, None, None, 1],  # scattered
    [0, 1, None, None, None],  # a prefix is given
    [None, None, 1, 0],  # a suffix is given
    [None, None, None, 2],  # all blank but one
    [None, None],  # nothing is given
]


def standard_cases(name: str) -> list[Case]:
    """The cases that a lossless method must pass: drafts good and bad, every k, every parameter, an
    end token, holes anywhere, long drafts."""
    check_table_families(name)
    method = registry.method_named(name)
    if method.guarantee == "approximate":
        return _cases_of_approximation(method)
    return [*broad_cases(name), *deep_cases(name)]


def constrained_cases(name: str, **engine: str) -> list[Case]:
    """Languages, for a method that decides from left to right; `grammar_engine` reads them."""
    method = registry.method_named(name)
    if not method.left_to_right:
        return []
    options = short_drafts(name)  # unconstrained drafts have far more ways
    same: Options = {"max_tokens": 5, "method_options": options, **engine}
    masks = bool({SubsetScorer, BlockFiller} & set(method.needs))
    spelled = LETTERS if masks else LETTERS[:3]
    every = [{**same, "spelled": spelled, **language} for language in LANGUAGES]
    return _with_outcomes(3, method, every)


# Languages of holes and of whole canvases: what hangs together across blanks, is forced, or has no
# text of some lengths.
PIECES = (b"a", b"b", b"ab", b"?")  # the last one is the mask
LANGUAGES_OF_HOLES: list[tuple[Prompt, list[str | None]]] = [
    ([1, None, None], ["aa|bb|aba|bab"]),
    ([None, None, 0, None], ["(ab)+", None]),
    ([None, 1, None, None], ["a|ab", "a?b{1,3}"]),
]
LANGUAGES_OF_TEXTS: list[Options] = [
    {"regex": "a*b*", "temperature": 1.0, "eos": (2,)},
    {"regex": "(a|b)*abb", "temperature": 1.0},
    {"regex": "(ab)*", "temperature": 0.0, "eos": (2,), "min_tokens": 2},
]


def canvas_cases(name: str) -> list[Case]:
    """Languages on canvases, for a method that looks at what lies behind a blank."""
    method = registry.method_named(name)
    sees_holes = {SubsetScorer, CanvasFiller} & set(method.needs)
    if method.guarantee != "exact" or not (sees_holes or BlockFiller in method.needs):
        return []
    target = TableBackbone(vocab=len(PIECES), seed=1)
    same: Options = {"mask": 3, "spelled": PIECES, "method_options": DEEP_OPTIONS.get(name, {})}
    cases: list[Case] = []
    if sees_holes:
        for prompt, regexes in LANGUAGES_OF_HOLES:
            holes = [None if regex is None else {"regex": regex} for regex in regexes]
            for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}):
                cases.append(case(name, target, prompt, holes=holes, **same, **sampling))
    if not method.left_to_right:
        for language in LANGUAGES_OF_TEXTS:
            cases.append(case(name, target, [1, 0, 1], max_tokens=3, **same, **language))
    return cases


# Syllables of which some are the beginning of others, and prompts that end inside one: as the
# tokenizer writes them, as it does not, and with nothing to heal.
SYLLABLES = (b"a", b"b", b"ab", b"aba")
ENDINGS: list[Prompt] = [[0, 2], [1, 0, 1], [0, 3]]
# The same around holes: what stands before, what stands behind, and both.
BORDERS: list[Prompt] = [[2, None], [None, 1, 0], [0, None, 1]]
HEALED: list[Options] = [
    {"temperature": 1.0},
    {"temperature": 0.0, "logit_bias": {3: 0.8}},
    {"temperature": 0.7, "top_p": 0.9},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.8,
        "frequency_penalty": 0.7,
        "top_k": 3,
        "eos": (1,),
    },
]


def short_drafts(name: str) -> Options:
    """Options of a method under which drafts that are drawn have two tokens at most."""
    options: Options = {**DEEP_OPTIONS.get(name, {})}
    if name in DRAWN_DRAFTS:
        length = "most" if name == "auto" else "k"
        options |= {length: 2, **{key: value for key, value in FEWER.items() if key in options}}
    return options


def healed_cases(name: str) -> list[Case]:
    """Prompts that are text and end inside a token, for an exact method."""
    method = registry.method_named(name)
    if method.guarantee != "exact":
        return []
    masks = bool({SubsetScorer, CanvasFiller, BlockFiller} & set(method.needs))
    options = short_drafts(name)
    spelled = (*SYLLABLES, b"") if masks else SYLLABLES
    same: Options = {"text": True, "spelled": spelled, "max_tokens": 2, "method_options": options}
    every = [{**same, **sampling} for sampling in HEALED]
    cases = [
        found
        for prompt in ENDINGS
        for found in _with_outcomes(len(SYLLABLES), method, every, prompt)
    ]
    if {SubsetScorer, CanvasFiller} & set(method.needs):
        same.pop("max_tokens")
        around = [{**same, **sampling} for sampling in HEALED]
        for prompt in BORDERS:
            cases += _with_outcomes(len(SYLLABLES), method, around, prompt)
    return cases


def cases_with(name: str, options: Options) -> list[Case]:
    """Those of the standard cases that have these options of the method."""
    method = registry.method_named(name)
    defaults = {field.name: field.default for field in fields(method.options)}
    for option in options:
        if option not in defaults:
            raise unknown(f"option of method={name!r}", option, defaults)
    cases = [
        case
        for case in standard_cases(name)
        if options.items() <= {**defaults, **(case.keywords.get("method_options") or {})}.items()
    ]
    if not cases:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise BadOption(
            f"{given}: no table model is enumerated with this; leave it out to enumerate all, or "
            f"test it on a model with --model."
        )
    return cases


def claims_of(name: str, cases: Sequence[Case]) -> list[registry.Claim]:
    """What the method promises in these cases, each claim once."""
    method = registry.method_named(name)
    known = method.option_names()
    claims: dict[registry.Claim, None] = {}
    for case in cases:
        given = case.keywords.get("method_options") or {}
        options = {option: value for option, value in given.items() if option in known}
        claims[method.claim(method.options(**options))] = None
    return list(claims)


def broad_cases(name: str) -> list[Case]:
    """Many drafts, options and prompts, with few tokens each."""
    method = registry.method_named(name)
    if SubsetScorer in method.needs:
        return _cases_with_holes(method)
    if CanvasFiller in method.needs:
        return _cases_of_canvases(method)
    if BlockFiller in method.needs:
        return _cases_of_blocks(method)
    if method.asks_costs:
        return _cases_of_choices(method)
    target = TableBackbone(vocab=3, seed=1, step_costs=STEEP)
    if method.drafter == "diffusion":
        return _cases_of_diffusion(method)
    drafts: list[Any] = [None]
    if method.drafts and method.drafter is None:
        drafts = [
            TableBackbone(vocab=3, seed=2, like=target, blend=b, cost=0.1) for b in (0.0, 0.7)
        ] + ["lookup"]
    options = GUESSING.get(name, [{}])
    if "k" in method.option_names():
        options = [{}, *({"k": k} for k in (1, 2, 4))]
    if method.drafter == "predicted":
        options = [{**option, **prediction} for option in options for prediction in PREDICTIONS]
    return [
        case(
            name,
            target,
            [0, 1, 0],
            draft=draft,
            eos=eos,
            method_options=option,
            max_tokens=4,
            **sampling,
        )
        for draft in drafts
        for option in options
        for eos in ((), (1,))
        for sampling in SAMPLINGS
    ]


def _cases_of_choices(method: registry.Method) -> list[Case]:
    """Drafts of every length and source: where rows are free, and where it hangs on what was
    accepted. Runs must not learn from each other, or they would not choose alike twice."""
    cases = []
    for costs in (FREE_ROWS, STEEP):
        target = TableBackbone(vocab=3, seed=1, step_costs=costs)
        draft = TableBackbone(vocab=3, seed=2, like=target, blend=0.7, cost=0.1)
        cases += [
            case(
                method.name,
                target,
                [0, 1, 0],
                draft=drafter,
                eos=eos,
                method_options={"learn": False},
                max_tokens=4,
                **sampling,
            )
            for drafter in (None, draft)
            for eos in ((), (1,))
            for sampling in SAMPLINGS
        ]
    return cases


def _cases_with_holes(method: registry.Method) -> list[Case]:
    target = TableBackbone(vocab=4, seed=1)
    options: list[Options] = [{}]
    if "k" in method.option_names():
        options = [{"k": k} for k in (1, 2, 9)]  # fewer than there are blanks, as many, more
    if {"k", "ahead"} <= set(method.option_names()):
        options = [
            {"k": k, "ahead": ahead}
            for k in (1, 2, 9)
            for ahead in ("none", "bonus", "whole", "every")
        ]
    same: dict[str, Any] = dict(mask=3, temperature=1.0)
    cases: list[Case] = [
        case(method.name, target, hole, method_options=option, **{**same, **sampling})
        for hole in HOLES
        for option in options
        for sampling in (
            {},
            {"temperature": 0.6},
            {"temperature": 1.7, "top_p": 0.7},
            {"temperature": 0.0},
        )
    ]
    for sampling in SAMPLINGS:
        cases.append(case(method.name, target, HOLES[0], **{**same, **sampling, "min_tokens": 0}))
        cases.append(
            case(
                method.name,
                target,
                [0, 1],
                eos=(1,),
                **{**same, "max_tokens": 3, **sampling},
            )
        )
        if method.drafts:
            cases.append(
                case(
                    method.name,
                    target,
                    HOLES[0],
                    draft="ngram",
                    **{**same, **sampling, "min_tokens": 0},
                )
            )
    return cases


# Options with which each approximate method differs from its reference on canvases this small.
ROUGH: dict[str, dict[str, Any]] = {
    "assd-tolerant": {"tolerance": 0.3},
    "steps": {"steps": 1},
    "threshold": {"threshold": 0.0},
    "entropy-bounded": {"bound": 9.0},
    "specdiff-confidence": {"k": 2, "steps": 2},
    "specdiff-ddpm": {"k": 2, "steps": 2},
    "block": {"threshold": 0.0},
    "s2d2": {"span": 3, "threshold": 0.0},
    "s2d2-canvases": {"span": 9, "threshold": 0.0},
}


def _cases_of_approximation(method: registry.Method) -> list[Case]:
    """How far an approximate method is from its reference, with options that let it be."""
    if method.reference == method.name or method.name not in ROUGH:
        raise NotAble(
            f"method={method.name!r} is approximate ({method.reason}): there is no law that it "
            f"claims to have."
        )
    target = TableBackbone(vocab=4, seed=1)
    option = ROUGH[method.name]
    if method.drafter is not None:
        draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
        drafted: Options = dict(
            draft=draft, draft_family=Masked(3), max_tokens=3, logit_bias={3: -1e6}
        )
        return [
            case(
                method.name,
                target,
                [0, 1],
                temperature=t,
                method_options=option,
                **drafted,
            )
            for t in (0.0, 1.0)
        ]
    if BlockFiller in method.needs:
        prompts: list[Prompt] = [[0, 1], [1]]
        return [
            case(
                method.name,
                target,
                prompt,
                mask=3,
                temperature=1.0,
                method_options=option,
                max_tokens=3,
            )
            for prompt in prompts
        ]
    holes: list[Prompt] = [[0, None, None, None], [None, 0, None, 1]]
    return [
        case(method.name, target, hole, mask=3, temperature=1.0, method_options=option)
        for hole in holes
    ]


def _cases_of_canvases(method: registry.Method) -> list[Case]:
    target = TableBackbone(vocab=3, seed=1)
    options: list[Options] = [{"block": b} for b in (1, 2, 9)]
    if "drafts" in method.option_names():
        options = [{"block": b, "drafts": n} for b in (1, 2, 9) for n in (0, 1, 2, 4)]
        options += [
            {"block": 9, "drafts": 3, "tree": "mixed"},
            {"block": 9, "drafts": 3, "tree": "likeliest"},
            {"block": 9, "worth": 0.3},
        ]
    samplings: list[Options] = [{"temperature": t} for t in (1.0, 0.0, 2.0)] + [
        {"temperature": 0.5, "top_p": 0.8}
    ]
    cases: list[Case] = [
        case(method.name, target, hole, mask=2, method_options=option, **sampling)
        for hole in (
            [None, 0, None, None, 1],
            [0, 1, None, None, None],
            [None, None, 1],
            [None, None],
        )
        for option in options
        for sampling in samplings
    ]
    # Two decisions in the other order need four blanks: one that is certain, the two, and one
    # behind them.
    four: Prompt = [None, None, 0, None, None]
    cases += [
        case(method.name, target, four, mask=2, method_options={"block": block}, temperature=t)
        for block in (2, 9)
        for t in (1.0, 0.0)
    ]
    orders: list[Options] = [{"order": order, "block": 9} for order in ("entropy", "margin")]
    cases += [
        case(method.name, target, four, mask=2, method_options=option, temperature=t)
        for option in orders
        for t in (1.0, 0.0)
    ]
    return cases + _cases_of_caches(method)


def _cases_of_caches(method: registry.Method) -> list[Case]:
    """Both policies, aligned and shifted, a block that ends with a refresh and one that a refresh
    falls into. There are two blocks, so drafts cross a border."""
    target = TableBackbone(vocab=3, seed=1)
    options: list[Options] = [{"block": 2, "refresh": 8}, {"block": 3, "refresh": 2}]
    if "drafts" in method.option_names():
        options[0] |= {"drafts": 4, "tree": "mixed"}
        options[1] |= {"drafts": 2, "tree": "likeliest"}
    prompts: list[Prompt] = [[1, None, None, None, None], [None, None, 1, None, None]]
    return [
        case(
            method.name,
            target,
            prompts[shifted],
            mask=2,
            family=Masked(2, shifted),
            method_options={"cache": cache, **option},
            temperature=t,
        )
        for cache in ("prefix", "dual")
        for shifted in (False, True)
        for option in options
        for t in (1.0, 0.0)
    ]


def _cases_of_blocks(method: registry.Method) -> list[Case]:
    """Aligned and shifted, prompts that end before, at and after the end of a block, every block
    size and draft."""
    target = TableBackbone(vocab=3, seed=1)
    options: list[Options] = [{"block": b} for b in (1, 2, 3, 4)] + [{"block": 4, "sub_block": 2}]
    if "k" in method.option_names():
        options = [{"k": k, "ahead": ahead} for k in (1, 2, 3) for ahead in ("whole", "every")]
    elif "drafts" in method.option_names():
        options += [
            {"block": 4, "drafts": n, "tree": tree}
            for n in (0, 1, 3)
            for tree in ("chain", "mixed")
        ]
    same: dict[str, Any] = dict(mask=2, max_tokens=3)
    cases: list[Case] = [
        case(
            method.name,
            target,
            prompt,
            family=family,
            method_options=option,
            temperature=t,
            **same,
        )
        for family in (Block(2, 4), Block(2, 4, shifted=True))
        for prompt in ([0], [0, 1, 0], [1, 0, 1, 1], [0, 1, 0, 0, 1])
        for option in options
        for t in (1.0, 0.0)
    ]
    if method.reference == "ar":
        for sampling in SAMPLINGS:
            if "allowed_tokens" not in sampling:  # one of the two that it allows is the mask here
                cases += [
                    case(
                        method.name,
                        target,
                        [0, 1],
                        eos=eos,
                        method_options=options[2],
                        **same,
                        **sampling,
                    )
                    for eos in ((), (1,))
                ]
    return cases


def _cases_of_diffusion(method: registry.Method) -> list[Case]:
    """Drafters that fill blanks, good and bad, masked and any-subset, in one step or from left to
    right, keys kept or not."""
    target = TableBackbone(vocab=4, seed=1)
    draft = TableBackbone(vocab=4, seed=2, like=target, blend=0.5, cost=0.1)
    samplings: list[Options] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.8},
    ]
    return [
        case(
            method.name,
            target,
            [0, 1],
            draft=draft,
            draft_family=family,
            eos=eos,
            max_tokens=3,
            logit_bias={3: -1e6},
            method_options={"k": k, "steps": steps, "keep": keep},
            **sampling,
        )
        for family in (Masked(3), AnySubset(3))
        for k, steps, keep in ((1, 1, True), (3, 1, True), (3, 2, True), (3, 3, False))
        for eos in ((), (1,))
        for sampling in samplings
    ] + [
        case(
            method.name,
            target,
            [0, 1],
            draft=draft,
            draft_family=family,
            eos=(1,),
            max_tokens=4,
            logit_bias={3: -1e6},
            method_options={"k": 3},
            **sampling,
        )
        for family in feature_families(4)
        for sampling in samplings
    ]


def feature_families(vocab: int) -> list[Features]:
    """Drafters that look into their target, of every kind. The last token is their mask."""
    before_VR = torch.tensor([[1.5, -0.5], [-1.0, 2.0]]).repeat(vocab, 1)[:vocab].double()
    after_VR = torch.linspace(-1, 1, 2 * vocab).view(vocab, 2).double()
    return [
        Features(vocab, vocab - 1, block=4),
        Features(vocab, vocab - 1, block=3, markov=Markov(before_VR, after_VR)),
        Features(vocab, vocab - 1, block=3, autoregressive=True),
    ]


# Options with which each method drafts, guesses or places as many tokens as can be enumerated.
DEEP_OPTIONS: dict[str, Options] = {
    "auto": {"learn": False},
    "speculative": {"k": 5},
    "lookup": {"k": 6, "adapt": False},
    "predicted": {"k": 6, "adapt": False, "prediction": [0, 1, 1, 0, 1, 0, 0, 1]},
    "specdiff": {"k": 5, "steps": 2},
    "jacobi": {"block": 6},
    "multiblock": {"block": 4, "blocks": 1, "candidates": 4},
    "lookahead": {"window": 3, "ngram": 4, "guesses": 3},
    "assd": {"k": 5, "ahead": "every"},
    "stepwise": {"block": 2},
    "ssd": {"block": 2, "drafts": 5, "tree": "mixed"},
    "block-stepwise": {"block": 3},
    "block-ssd": {"block": 3, "drafts": 5, "tree": "mixed"},
    "s2d2-exact": {"k": 5, "ahead": "every"},
}
# The same at temperature 0, where blocks may be long.
GREEDY_OPTIONS: dict[str, Options] = {
    "speculative": {"k": 8},
    "lookup": {"k": 10, "adapt": False},
    "predicted": {"k": 10, "adapt": False, "prediction": [2, 0, 1, 1, 0, 3, 1, 0, 0, 1, 2, 0]},
    "specdiff": {"k": 8, "steps": 3},
    "jacobi": {"block": 10},
    "multiblock": {"block": 4, "blocks": 3, "spawn": 0.3, "candidates": 4},
    "lookahead": {"window": 5, "ngram": 5, "guesses": 4},
    "assd": {"k": 8, "ahead": "every"},
    "s2d2-exact": {"k": 8, "ahead": "every"},
    "stepwise": {"block": 9},
    "ssd": {"block": 9, "drafts": 5, "tree": "mixed"},
    "block-stepwise": {"block": 8},
    "block-ssd": {"block": 8, "drafts": 5, "tree": "mixed"},
}
DEEP_SEED = 1
# Those that draw their drafts have far more ways to the same text: their laws must be narrow.
DRAWN_DRAFTS = ("auto", "speculative", "specdiff", "assd", "s2d2-exact")
NARROW: Options = {"top_p": 0.85}
# Every open blank draws, so canvases have more ways too: their texts must be shorter.
DEEP_LENGTHS = {"stepwise": 5, "ssd": 5, "block-stepwise": 4, "block-ssd": 4}


def deep_cases(name: str) -> list[Case]:
    """Longer drafts and texts, under every parameter."""
    method = registry.method_named(name)
    narrow = name in DRAWN_DRAFTS
    sampled: Options = {
        "temperature": 1.0,
        "max_tokens": DEEP_LENGTHS.get(name, 6),
        "method_options": DEEP_OPTIONS.get(name, {}),
        **(NARROW if narrow else {}),
    }
    greedy: Options = {
        "temperature": 0.0,
        "max_tokens": 12,
        "method_options": GREEDY_OPTIONS.get(name, sampled["method_options"]),
    }
    edits = [{**sampled, **options} for options in EDITS]
    ends = [{**sampled, **options} for options in ENDS]
    truncated = {**sampled, "max_tokens": 4}
    holes: Prompt = ()
    if SubsetScorer in method.needs or CanvasFiller in method.needs:
        holes = [None, 0, None, None, 0, None, None]
        edits = [{**options, "max_tokens": None} for options in edits]
    cases = _with_outcomes(2, method, edits, holes)
    cases += _with_outcomes(2, method, ends)
    cases += _with_outcomes(4, method, [{**truncated, **options} for options in TRUNCATIONS])
    cases += _with_outcomes(4, method, [{**greedy, **options} for options in GREEDY])
    return cases


def _with_outcomes(
    outcomes: int, method: registry.Method, every: list[Options], prompt: Prompt = ()
) -> list[Case]:
    """Cases on targets with so many outcomes, and a mask after them if the method needs one."""
    masks = bool({SubsetScorer, CanvasFiller, BlockFiller} & set(method.needs))
    if not prompt:
        prompt = [0] if masks else [0, 0, 0]  # what repeats can be copied at once
    sharpness = 4.0 if method.name in DRAWN_DRAFTS else 2.0
    target = TableBackbone(vocab=outcomes + masks, seed=DEEP_SEED, sharpness=sharpness)
    settings: list[Options] = [{"mask": outcomes}] if masks else [{}]
    if BlockFiller in method.needs:
        families = (Block(outcomes, 8), Block(outcomes, 8, shifted=True))
        settings = [{"mask": outcomes, "family": family} for family in families]
    elif method.drafter == "diffusion":
        draft = TableBackbone(vocab=outcomes + 1, seed=2, sharpness=sharpness, cost=0.1)
        settings = [{"draft": draft, "draft_family": Masked(outcomes)}]
    elif method.drafts and not masks and method.drafter is None:
        draft = TableBackbone(
            vocab=outcomes, seed=2, sharpness=sharpness, like=target, blend=0.6, cost=0.1
        )
        settings = [{"draft": draft}]
    return [
        case(method.name, target, prompt, **setting, **options)
        for setting in settings
        for options in every
    ]
