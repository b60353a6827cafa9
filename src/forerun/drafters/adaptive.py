"""How many tokens are worth drafting, from the outcome of the last drafts.

It is a function of what is decided already. So whatever it says, exact methods stay exact.
"""

from __future__ import annotations

import math

from forerun.sequence.canvas import Canvas

RECENT = 8  # verdicts that count
LEAST_CHANCE = 0.1  # a token is worth drafting if it is accepted at least this often
PRIOR_ACCEPTED = 2.0  # tokens that count as accepted before the first verdict
PRIOR_TRIED = 2.5


def adaptive_length(seq: Canvas, most: int) -> int:
    """At least one token, if any may be drafted, and at most `most`: while the chance that all are
    accepted is worth it."""
    drafts = seq.trace.drafts()[-RECENT:]
    accepted = sum(event.accepted for event in drafts) + PRIOR_ACCEPTED
    tried = sum(min(len(event.drafted), event.accepted + 1) for event in drafts) + PRIOR_TRIED
    rate = accepted / tried
    return min(most, max(1, int(math.log(LEAST_CHANCE) / math.log(rate))))
