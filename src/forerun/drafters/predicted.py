"""Predicted output: the caller says what it expects, and that is the draft. Free, and strong where
a text is rewritten with few changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.drafters.base import NO_DRAFT, Draft
from forerun.errors import BadOption
from forerun.options import check_flag, check_whole
from forerun.sequence.canvas import Canvas

LONGEST_MATCH = 32  # tokens that are compared to tell places of the prediction apart
ALIGNED = 2  # tokens in a row that were foreseen: this is the place


@dataclass
class PredictedDrafter:
    """A point mass on the prediction, from where the output has got to in it.

    After an edit it finds its place again: where the last tokens of the output stand in the
    prediction. Of several such places the longest match counts, then the nearest one.
    """

    prediction: Sequence[int] | str = field(
        default=(), metadata={"help": "the output that is expected, as text or token ids"}
    )
    adapt: bool = field(
        default=True,
        metadata={"help": "draft longer while the prediction holds and shorter while it does not"},
    )

    def __post_init__(self) -> None:
        check_flag("adapt", self.adapt)
        if not isinstance(self.prediction, str):
            self.prediction = _token_ids(self.prediction)
        if not len(self.prediction):
            raise BadOption("prediction is empty: give the text that you expect, or its token ids.")
        ids = () if isinstance(self.prediction, str) else self.prediction
        self._largest = max(ids, default=0)
        self._place = Alignment(ids)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        if isinstance(self.prediction, str):
            raise BadOption("prediction is text, and this model has no tokenizer: give token ids.")
        if self._largest >= seq.history.vocab:  # it would fail the forward of everybody
            raise BadOption(
                f"prediction has token id {self._largest}, but this model's ids run from 0 to "
                f"{seq.history.vocab - 1}."
            )
        if not seq.remaining or seq.known < len(seq.tokens) - seq.remaining:
            return NO_DRAFT  # a canvas with text behind its blanks: the prediction is for its end
        output = seq.tokens[seq.blanks[0] : seq.known]
        start = self._place.after(output)
        count = min(k, self._adapted(seq, k)) if self.adapt else k
        tokens = seq.up_to_end(self.prediction[start : start + count])
        return Draft(seq.next(len(tokens)), tokens)

    @staticmethod
    def _adapted(seq: Canvas, k: int) -> int:
        """All at first; then twice what was accepted last time and one more."""
        for event in reversed(seq.trace.events):
            if event.drafted:
                return 2 * len(event.tokens) + 1
        return k


class Alignment:
    """Where an output has got to in a prediction.

    It depends on the output alone, never on what a draft would gain: exact methods stay exact.
    """

    def __init__(self, prediction: Sequence[int]):
        self.prediction = np.asarray(prediction, np.int64)
        self._at = 0  # where the last draft began
        self._seen = 0  # tokens of the output before it
        self._anchor = 0  # the last place that is certain

    def after(self, output: np.ndarray) -> int:
        """The place in the prediction of what comes next."""
        new = output[self._seen :]
        foreseen = common_prefix(new, self.prediction[self._at :])
        if foreseen == len(new):  # nothing but what was expected
            place = self._at + foreseen
            self._anchor = place
        else:
            if foreseen >= ALIGNED:
                self._anchor = self._at + foreseen
            place = self._found(output)
        self._at = place
        self._seen = len(output)
        return place

    def _found(self, output: np.ndarray) -> int:
        """The place whose past is most like the output's; where nothing is like its last token,
        one token further than before: it may replace another."""
        places = 1 + np.flatnonzero(self.prediction == output[-1])
        if not len(places):
            return self._at + len(output) - self._seen
        for back in range(2, min(LONGEST_MATCH, len(output)) + 1):
            longer = places[places >= back]
            longer = longer[self.prediction[longer - back] == output[-back]]
            if not len(longer):
                break
            places = longer
        return int(places[np.abs(places - self._anchor).argmin()])


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are the same."""
    most = min(len(a), len(b))
    same = a[:most] == b[:most]
    return most if same.all() else int(same.argmin())


def _token_ids(prediction: object) -> tuple[int, ...]:
    if not isinstance(prediction, Sequence | np.ndarray):
        raise BadOption(f"prediction={prediction!r} must be text or token ids.")
    for token in prediction:
        check_whole("prediction", int(token) if isinstance(token, np.integer) else token, 0)
    return tuple(int(token) for token in prediction)
