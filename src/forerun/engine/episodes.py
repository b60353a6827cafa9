"""What drafts cost the plain steps around them: nothing was begun behind the one before a draft,
nor for the one after it; or a launch was left, and the next ones have fewer tokens.

An *episode* is some judged steps and the plain ones between and after them, until all is as it
was before. Plain steps of an episode do not count as usual ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forerun.engine.costs import StepCosts

SETTLED = 4  # plain steps after a draft, or a launch: then all is as if there had been none
LONG = 16  # judged steps after which an episode tells what it has lost so far


class Plain(NamedTuple):
    """A plain step, or each of a launch."""

    costs: StepCosts
    rows: int
    seconds: float
    lost: float  # seconds of all of them beyond the usual


@dataclass
class Episode:
    lost: float = 0.0  # seconds that plain steps took more than usual
    judged: int = 0
    quiet: int = 0  # plain steps since the last judged one


class Episodes:
    """Tells costs what plain steps take, and what is lost around judged ones."""

    def __init__(self) -> None:
        self._last: Plain | None = None  # not told yet: a draft may follow
        self._episode: Episode | None = None

    @property
    def runs(self) -> bool:
        return self._episode is not None

    def plain(self, costs: StepCosts, rows: int, seconds: float, tokens: int) -> None:
        """So many plain steps took so long, in one launch if they are several."""
        lost = costs.beyond_usual(rows, tokens, seconds)
        episode = self._episode
        if episode is None:
            self.break_off()
            self._last = Plain(costs, rows, seconds / tokens, lost)
            return
        episode.lost += lost
        episode.quiet += tokens
        if episode.quiet >= max(SETTLED, costs.at_once):
            self._tell(episode, costs)
            self._episode = None

    def judged(self, costs: StepCosts) -> None:
        """A step in which somebody drafted."""
        if self._episode is None:
            self._episode = Episode(0.0 if self._last is None else self._last.lost)
            self._last = None
        self._episode.judged += 1
        self._episode.quiet = 0
        if self._episode.judged >= LONG:
            self._tell(self._episode, costs)

    def break_off(self) -> None:
        """No draft follows the last step."""
        if self._last is not None:
            self._last.costs.observe(self._last.rows, 0, 0, self._last.seconds)
            self._last = None

    def idle(self) -> None:
        self.break_off()
        self._episode = None

    @staticmethod
    def _tell(episode: Episode, costs: StepCosts) -> None:
        if episode.judged:
            costs.observe_around(episode.lost / episode.judged)
        episode.lost = 0.0
        episode.judged = 0
