"""How many tokens are worth drafting, from what became of the last drafts. A function of what is decided already, so whatever it
says, exact methods stay exact."""

from __future__ import annotations

import math

from forerun.core import Canvas

RECENT = 8  # verdicts that are looked back on
WORTH = 0.1  # a token is worth drafting if it will be accepted at least this often
HOPE = 2.0  # accepted tokens of two that are taken for granted before anything is known


def pace(seq: Canvas, most: int) -> int:
    """At least one token, at most `most`: while the chance that all of them are accepted is worth it."""
    drafts = [event for event in seq.trace if event.drafted][-RECENT:]
    accepted = sum(len(event.drafted) - len(event.rejected) for event in drafts) + HOPE
    tried = sum(min(len(event.drafted), len(event.drafted) - len(event.rejected) + 1) for event in drafts) + HOPE + 0.5
    alpha = accepted / tried
    return max(1, min(most, int(math.log(WORTH) / math.log(alpha))))
