"""From a certification case to its law by definition: how our families and options are said in the
words of `tests/reference.py`."""

from __future__ import annotations

import itertools
import re
from functools import cache

from forerun import registry
from forerun.certify.enumeration import certify_case, family_of, law_by_definition
from forerun.families.any_subset import AnySubset
from forerun.families.block import Block
from forerun.families.masked import Masked
from tests import reference

EXACT = [
    name
    for name in registry.BUILT_IN["methods"]
    if registry.method_named(name).guarantee == "exact"
]


def where_every_pair_meets(cases):
    """Few of some cases, in which whatever two things come together in any case do so too: a
    prompt, an option of the method, a parameter. `forerun certify` runs all of them."""
    things = [_things_of(case) for case in cases]
    meetings = [set(itertools.combinations(sorted(each), 2)) for each in things]
    left = set().union(*meetings)
    chosen = []
    while left:
        best = max(range(len(cases)), key=lambda i: len(meetings[i] & left))
        left -= meetings[best]
        chosen.append(best)
    return [cases[i] for i in sorted(chosen)]


def _things_of(case):
    given = {**case.keywords, **(case.keywords.get("method_options") or {})}
    given.pop("method_options", None)
    return {("prompt", str(case.args[2])), *((name, repr(each)) for name, each in given.items())}


@cache
def table(vocab, seed, sharpness):
    return reference.Table(vocab, seed, sharpness)


@cache
def left_to_right_law(numbers, family, size, asked):
    kind, mask, shifted, _ = family
    if kind is Block:
        reading = reference.reads_one_by_one(mask, size, shifted)
    elif kind is AnySubset:
        reading = reference.reads_any_subset(mask)
    else:
        reading = reference.reads_causally()
    return reference.left_to_right(numbers, reading, asked.request)


@cache
def stepwise_law(numbers, family, asked, block, sub_block, causal, cache, refresh, by):
    kind, mask, shifted, largest = family
    if kind is Masked and cache != "none":
        policy = reference.Policy(cache, block or 8, refresh, mask, shifted)
        reading = reference.reads_stale(policy, asked.request.blanks)
        order = reference.blocks_of_blanks(asked.request.blanks, block or 8)
        return reference.stepwise(numbers, reading, asked.request, order, in_order=True, by=by)
    if kind is Masked:
        reading = reference.reads_whole(mask, shifted)
        order = reference.blocks_of_blanks(asked.request.blanks, block or 8)
    else:
        reading = reference.reads_in_blocks(mask, block or largest, shifted, causal)
        alone = shifted and causal == "nothing"
        order = reference.blocks_of_text(block or largest, sub_block, alone)
    return reference.stepwise(numbers, reading, asked.request, order, by=by)


class Asked:
    """A request that can be a key: options that only change how fast a text is written leave its
    law as it is, and that law is computed once."""

    def __init__(self, request):
        self.request = request

    def __eq__(self, other):
        return self.request == other.request

    def __hash__(self):
        return hash(repr(self.request))


def law(
    method,
    target,
    prompt,
    *,
    eos=(),
    mask=None,
    family=None,
    size=1,
    method_options=None,
    draft=None,
    draft_family=None,
    spelled=None,
    regex=None,
    choices=None,
    grammar_engine=None,
    **sampling,
):
    """The law that a case must have. What is drafted, and how, makes no difference to it."""
    assert target.like is None, "the target must be a table of its own"
    numbers = table(target.vocab, target.seed, target.sharpness)
    family = family or family_of(method, mask)
    kind = (type(family), family.mask_token, family.shifted, getattr(family, "block", None))
    parameters = reference.Parameters(**sampling)
    words = None
    if spelled is not None:
        chosen = None if choices is None else tuple(choices)
        words = words_of(tuple(spelled), regex, chosen, sampling["max_tokens"])
    asked = Asked(reference.request(prompt, parameters, eos, family.mask_token, words))
    if registry.method_named(method).reference not in ("stepwise", "block-stepwise"):
        return left_to_right_law(numbers, kind, size, asked)
    options = method_options or {}
    blocks = options.get("block"), options.get("sub_block"), options.get("causal", "nothing")
    caches = options.get("cache", "none"), options.get("refresh", 8)
    by = options.get("order", "confidence")
    return stepwise_law(numbers, kind, asked, *blocks, *caches, by)


@cache
def words_of(spelled, regex, choices, tokens):
    """A language by its words: those of a regular expression that a text of so many tokens, or a
    little more, can be."""
    pieces = tuple(piece.decode() for piece in spelled)
    if choices is not None:
        return reference.Words(pieces, frozenset(choices))
    letters = sorted({letter for piece in pieces for letter in piece})
    longest = tokens * max(map(len, pieces)) + 2
    texts = ("".join(t) for n in range(longest + 1) for t in itertools.product(letters, repeat=n))
    return reference.Words(pieces, frozenset(t for t in texts if re.fullmatch(regex, t)))


def certify(method, target, prompt, **case):
    """Our engine against the law by definition."""
    definition = law(method, target, prompt, **case)
    return certify_case(method, target, prompt, reference=definition, **case)


def certify_each(cases):
    """The certificates of some cases, against their laws by definition."""
    return (case(reference=law(*case.args, **case.keywords)) for case in cases)


def packaged_law(method, target, prompt, **case):
    """What the package itself would compare a case with."""
    options = case.pop("method_options", None) or {}
    family = case.pop("family", None) or family_of(method, case.get("mask"))
    for irrelevant in ("draft", "draft_family"):
        case.pop(irrelevant, None)
    return law_by_definition(method, target, prompt, family, options, **case)
