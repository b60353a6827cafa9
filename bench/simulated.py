"""`auto` against every fixed method where nothing is noisy: texts and a draft model's agreement
are replayed, and time is what a given cost curve says. The engine, its methods and its choices are
the real ones; only forwards are not run and the clock is not the machine's.

    python bench/simulated.py              (prints the table)
    python bench/simulated.py --write      (puts it into docs/auto.md)
    python bench/simulated.py --only "nothing is accepted" --machine CPU
    python bench/simulated.py --machine int4 --keep FILE     (in parts: one machine at a time)
    python bench/simulated.py --publish FILE ...             (puts those into docs/auto.md)

The texts are the worst there are for a method that chooses: copies that never go on and a draft
model that is never right, or always; both that change in mid-text; a batch that fills. And such as
a server meets: requests of all lengths that come at random moments.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.api import Model
from forerun.engine.backbone import SlottedBackbone
from forerun.engine.continuation import Continuations, WrittenBatch
from forerun.engine.costs import ROWS, StepCosts, interpolated
from forerun.engine.engine import Engine
from forerun.engine.flag import Flag
from forerun.engine.host import Host
from forerun.engine.pace import Pace
from forerun.engine.pack import Batch
from forerun.engine.pages import PageShape, PageTable
from forerun.families.causal import Causal
from forerun.sequence.question import Continuation
from forerun.sequence.rows import TOKEN

VOCAB = 256
CONTEXT = 512
PROMPT = 32  # tokens
PROMPTS = (64, 8192)  # and of requests that come at random moments, from the least to the most
OUTPUTS = (16, 512)
START = "<!-- simulated: bench/simulated.py writes this part -->"
END = "<!-- end of simulated -->"


@dataclass(frozen=True)
class Machine:
    """What forwards cost, in seconds by rows, and what a step costs more in which somebody drafts:
    once, and for each sequence that does. `auto` is told only what it would have measured.

    Where a model writes several tokens of plain text `at_once`, a step with a draft costs something
    for each sequence that is in it, and one without is begun ahead."""

    name: str
    curve: dict[int, float]
    host: float
    draft: float  # one forward of the draft model
    draft_row: float = 0.0  # and more for each of its rows
    judged: float = 0.0
    at_once: int = 1
    beside: float = 0.0
    ahead: bool = False  # is each plain step begun before it is asked for?
    late: float = 0.0  # what it costs more if it was not; and half of `beside` for each sequence
    capture: float = 0.0  # what each length takes at first that the draft model drafts

    def seconds(self, rows: int, drafting: int, sequences: int, begun: bool) -> float:
        host = 0.0
        if drafting:
            host = self.judged + self.host * drafting + self.beside * sequences
        elif self.ahead and not begun:
            host = self.late + self.beside / 2 * sequences
        return interpolated(self.curve, rows) + host

    @property
    def measured(self) -> dict[int, float]:
        return {rows: interpolated(self.curve, rows) for rows in ROWS}

    def draft_seconds(self, rows: int) -> float:
        return self.draft + self.draft_row * (rows - 1)


def tiles(base: float, each: float, height: int = 16, most: int = 1024) -> dict[int, float]:
    """A staircase: every so many rows cost as much as one of them."""
    curve = {}
    for first in range(1, most, height):
        curve[first] = curve[first + height - 1] = base + each * (first // height)
    return curve


GPU = Machine(
    "GPU: flat up to 64 rows",
    {1: 5e-3, 64: 5e-3, 128: 7e-3, 256: 1.1e-2, 512: 2e-2},
    host=1e-4,
    draft=1e-3,
)
TILES = Machine("GPU: tiles of 16 rows", tiles(2e-3, 5e-4), host=5e-5, draft=5e-4, judged=3e-4)
SMALL = Machine(
    "GPU: a small model, 16 tokens at once",
    {1: 7e-4, 8: 8e-4, 16: 8.4e-4, 32: 1e-3, 64: 1.4e-3, 128: 1.5e-3, 512: 4e-3},
    host=1e-4,
    draft=5e-4,
    judged=8e-4,
    at_once=16,
    beside=1e-4,
)
STEPS = replace(SMALL, name="GPU: a small model, step by step", at_once=1, ahead=True, late=3e-4)
CPU = Machine(
    "CPU: every row costs",
    {1: 0.020, 2: 0.026, 4: 0.034, 8: 0.050, 16: 0.090, 32: 0.170, 64: 0.330, 128: 0.650},
    host=5e-5,
    draft=5e-3,
)
INT4 = Machine(
    "CPU, int4",
    {1: 0.010, 2: 0.0143, 4: 0.023, 8: 0.043, 16: 0.085, 32: 0.170, 64: 0.340, 128: 0.680},
    host=5e-5,
    draft=2e-3,
)
FLOAT32 = Machine(
    "CPU, float32",
    {1: 0.030, 2: 0.033, 4: 0.039, 8: 0.057, 16: 0.105, 32: 0.210, 64: 0.420, 128: 0.840},
    host=5e-5,
    draft=6e-3,
)
MACHINES = (GPU, TILES, SMALL, STEPS, CPU, INT4, FLOAT32)

# For requests that come at random moments. Forwards are those of an H200.
SEVEN = Machine(
    "GPU: 7B, a draft model of 0.5B",
    {1: 4.05e-3, 8: 4.16e-3, 32: 4.34e-3, 64: 5.12e-3, 128: 5.85e-3, 256: 9.5e-3, 512: 1.57e-2},
    host=5e-5,
    draft=9e-4,
    draft_row=3e-6,
    judged=3e-4,
    beside=5e-5,
    ahead=True,
    late=3e-4,
    capture=0.3,
)
PAIR = replace(
    SEVEN,
    name="GPU: 1.5B, a draft model of 0.5B",
    curve={1: 1.55e-3, 16: 1.59e-3, 32: 1.79e-3, 64: 2.42e-3, 128: 2.65e-3, 512: 6e-3},
    draft=8e-4,
)
SERVERS = (SEVEN, PAIR)


class Text(NamedTuple):
    """What the model writes, and at which places its draft model says the same."""

    tokens: list[int]  # the first one is no other text's
    prompt: int  # tokens of it that are the prompt
    agrees: list[bool]


class Now:
    """A clock that stands still unless a forward runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class NoSlots:
    """Pages without memory."""

    def __init__(self, table: PageTable):
        self.table = table

    def copy(self, source: int, target: int, count: int) -> None:
        pass


class Replay(SlottedBackbone):
    """A model that writes given texts. After a token that is not in the text it says anything."""

    vocab = VOCAB
    device = torch.device("cpu")
    dtype = torch.float32
    layers = heads = key_heads = head_dim = 1

    def __init__(self, texts: Sequence[Text], now: Now, machine: Machine, drafts: bool = False):
        self.texts = {text.tokens[0]: text for text in texts}
        self.context = max(CONTEXT, *(len(text.tokens) + 1 for text in texts))
        self.now = now
        self.machine = machine
        self.drafts = drafts
        self.cost = 0.1 if drafts else 1.0
        self.engine: Engine | None = None
        self._begun = False  # is the next plain step begun ahead?
        if drafts:  # known, or they would be measured
            self.step_costs = {rows: machine.draft_seconds(rows) for rows in ROWS}

    def bytes_per_lane(self, context: int) -> int:
        return 0

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Any:
        return NoSlots(PageTable(lanes, context, pages))

    def forward(self, batch: Batch, slots: Any) -> torch.Tensor:
        said: list[int] = []
        for segment in batch.segments:
            rows = segment.plan.rows[TOKEN]
            text = self.texts[int(rows[0])]
            right = 0  # tokens that are the text's
            for at in (int(row) for branch in segment.plan.reads for row in branch):
                while right <= at and rows[right] == text.tokens[right]:
                    right += 1
                said.append(self._says(text, at + 1, right > at))
        self.now.seconds += self.seconds(batch)
        logits_RV = torch.zeros(len(said), self.vocab)
        logits_RV[torch.arange(len(said)), torch.tensor(said)] = 30.0
        return logits_RV

    def _says(self, text: Text, place: int, follows: bool) -> int:
        if not follows or place >= len(text.tokens):
            return place * 7919 % self.vocab
        token = text.tokens[place]
        wrong = self.drafts and not text.agrees[place]
        return (token + 1) % self.vocab if wrong else token

    def seconds(self, batch: Batch) -> float:
        if self.drafts:
            return self.machine.draft_seconds(len(batch.slots))
        reads = [sum(map(len, segment.plan.reads)) for segment in batch.segments]
        drafting = sum(count > 1 for count in reads)
        begun = self._begun
        running = self.engine.running if self.engine is not None else []
        self._begun = not drafting and not any(one.seq.draft_follows for one in running)
        return self.machine.seconds(len(batch.slots), drafting, len(reads), begun)


class TextAtOnce(Continuations):
    """Writes plain text of a simulated model in one launch."""

    def __init__(self, host: Host, backbone: Replay):
        super().__init__(host, Flag())
        self._backbone = backbone

    @property
    def at_once(self) -> int:
        return self._backbone.machine.at_once

    def can_write(self, end: int, tokens: int) -> bool:
        return tokens == self.at_once

    def begin(
        self, asked: Sequence[Continuation], lanes: Sequence[int], logits_BV: torch.Tensor
    ) -> WrittenBatch:
        machine = self._backbone.machine
        self.wrote = max(min(one.tokens, one.seq.remaining) for one in asked)
        forward = interpolated(machine.curve, len(asked))  # the first has been paid for
        host = 1e-5 * len(asked) * self.wrote
        self._backbone.now.seconds += forward * (self.wrote - 1) + host
        rows = []
        for one in asked:
            end = one.plan.stored
            text = self._backbone.texts[int(one.plan.rows[TOKEN, 0])]
            rows.append([*text.tokens[end : end + self.wrote], *[0] * self.wrote][: self.wrote])
        return WrittenBatch(torch.tensor(rows), logits_BV.new_empty(0))


class FirstTimes(Continuations):
    """Of a draft model that writes token by token, and has to make something for each length."""

    def __init__(self, host: Host, backbone: Replay):
        super().__init__(host, Flag())
        self._backbone = backbone
        self.made: set[int] = set()

    def can_write(self, end: int, tokens: int) -> bool:
        if tokens not in self.made:
            self.made.add(tokens)
            self._backbone.now.seconds += self._backbone.machine.capture
        return False


@dataclass
class Scene:
    """Texts that are written, how many at once, and how much time lies between two arrivals: in
    steps of one row. Time, not steps: whoever takes fewer must not meet fewer texts."""

    name: str
    texts: list[Text]
    lanes: int = 1
    every: float = 0.0
    has_draft: bool = True
    at_random: bool = False  # as many, but at random moments: what counts is how long each takes

    @property
    def arrivals(self) -> list[float]:
        """Of each text, in steps of one row."""
        if not self.at_random:
            return [i * self.every for i in range(len(self.texts))]
        chance = random.Random(0)
        return list(accumulate(chance.expovariate(1 / self.every) for _ in self.texts))

    @property
    def context(self) -> int:
        return max(CONTEXT, *(len(text.tokens) + 1 for text in self.texts))


Contestant = tuple[str, dict[str, Any]]
GRID: list[Contestant] = [
    ("ar", {}),
    *[("lookup", {"k": k}) for k in (2, 5, 10)],
    ("lookup", {"k": 10, "adapt": False}),
    *[("jacobi", {"block": block}) for block in (4, 16)],
]
DRAFTED: list[Contestant] = [("speculative", {"k": k}) for k in (2, 4, 7)]
FEW: list[Contestant] = [  # for long runs: those that were best anywhere
    ("ar", {}),
    ("lookup", {"k": 5}),
    ("lookup", {"k": 10, "adapt": False}),
    ("speculative", {"k": 2}),
    ("speculative", {"k": 7}),
]


def label(contestant: Contestant) -> str:
    method, options = contestant
    return ", ".join([method, *(f"{name} {value}" for name, value in options.items())])


def loops(chance: random.Random, length: int) -> list[int]:
    """A text that repeats itself."""
    period = [chance.randrange(60, VOCAB) for _ in range(17)]
    return [period[i % 17] for i in range(length)]


def traps(chance: random.Random, length: int) -> list[int]:
    """A text whose runs all stood somewhere before, and never go on as they did."""
    return [chance.randrange(50, 54) for _ in range(length)]


def chat(chance: random.Random, length: int) -> list[int]:
    """A text of which hardly anything stood there before: one token in seven follows the one before
    it as it did last."""
    text: list[int] = []
    follows: dict[int, int] = {}
    for _ in range(length):
        token = chance.randrange(60, VOCAB)
        if text:
            if chance.random() < 1 / 7:
                token = follows.get(text[-1], token)
            follows[text[-1]] = token
        text.append(token)
    return text


def between(chance: random.Random, least: int, most: int) -> int:
    """A number, uniform by its logarithm."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def requests(count: int, share: float) -> list[Text]:
    """Chat of all lengths, with a draft model that is right about this share of the time: in some
    texts more often, in others less."""
    chance = random.Random(0)
    found = []
    for name in range(count):
        prompt = between(chance, *PROMPTS)
        length = prompt + between(chance, *OUTPUTS)
        own = share + chance.uniform(-0.15, 0.15)
        agrees = [chance.random() < own for _ in range(length)]
        found.append(Text([name, *chat(chance, length)], 1 + prompt, [True, *agrees]))
    return found


class Writer:
    """Makes texts of some length, with a draft model's agreement. With `varied` they have half as
    many tokens to half as many more: if all texts of a batch ended in the same step, plain decoding
    would read all prompts at once, and whoever ends one sooner would not."""

    def __init__(self, tokens: int, varied: bool = False):
        self.chance = random.Random(0)
        self.varied = varied
        self.length = PROMPT + tokens + varied * tokens // 2
        self.turns = [i // 40 % 2 == 0 for i in range(self.length)]

    def traps(self, count: int, share: float = 0.0) -> list[Text]:
        """Nothing is accepted, or this share of drafts."""
        return self._texts(count, lambda: traps(self.chance, self.length), share)

    def loops(self, count: int) -> list[Text]:
        """Everything is accepted."""
        return self._texts(count, lambda: loops(self.chance, self.length), 1.0)

    def halves(self, count: int) -> list[Text]:
        """Every second text has everything accepted, the others nothing."""
        pairs = zip(self.loops(count), self.traps(count))
        return [pair[i % 2] for i, pair in enumerate(pairs)]

    def mixed(self, count: int) -> list[Text]:
        """What is accepted changes every 40 tokens."""
        return self._texts(count, self._mixed, None)

    def _mixed(self) -> list[int]:
        pairs = zip(loops(self.chance, self.length), traps(self.chance, self.length))
        return [a if turn else b for (a, b), turn in zip(pairs, self.turns)]

    def apart(self, count: int) -> list[Text]:
        """The same, each at other places than the others."""

        def shifted() -> list[int]:
            shift = self.chance.randrange(80)
            pairs = zip(loops(self.chance, self.length), traps(self.chance, self.length))
            return [a if (i + shift) // 40 % 2 else b for i, (a, b) in enumerate(pairs)]

        return self._texts(count, shifted, 0.0)

    def _texts(self, count: int, make: Callable[[], list[int]], share: float | None) -> list[Text]:
        found = []
        for name in range(count):
            agrees = self.turns
            if share is not None:
                agrees = [self.chance.random() < share for _ in range(self.length)]
            tokens = [name, *make()]
            if self.varied:
                tokens = tokens[: 1 + PROMPT + self._part()]
            found.append(Text(tokens, 1 + PROMPT, [True, *agrees]))
        return found

    def _part(self) -> int:
        most = self.length - PROMPT
        return self.chance.randint(most // 3, most)


def scenes(tokens: int = 160) -> list[Scene]:
    one = Writer(tokens)
    many = Writer(max(16, tokens // 2), varied=True)
    return [
        Scene("nothing is accepted", one.traps(4)),
        Scene("everything is accepted", one.loops(4)),
        Scene("it changes every 40 tokens", one.mixed(4)),
        Scene("seven in ten drafts, no copies", one.traps(4, 0.7)),
        Scene("copies only, no draft model", one.mixed(4), has_draft=False),
        Scene("a batch of 8, nothing", many.traps(20), lanes=8),
        Scene("a batch of 8, everything", many.loops(20), lanes=8),
        Scene("a batch of 8, half of them everything", many.halves(20), lanes=8),
        Scene("8 at once, each changing by itself", one.apart(8), lanes=8, has_draft=False),
        Scene("a batch fills from 1 to 32, nothing", many.traps(40), 32, 0.5),
        Scene("a batch fills from 1 to 32, changing", many.mixed(40), 32, 0.5),
        Scene("a batch fills from 1 to 32, everything", many.loops(40), 32, 0.5),
        Scene("a batch fills from 1 to 32, half of them everything", many.halves(40), 32, 0.5),
        Scene("a batch of 32, seven in ten drafts", many.traps(40, 0.7), lanes=32),
    ]


def load(name: str, share: float, count: int = 12, has_draft: bool = True) -> Scene:
    """Requests that come at random moments, so that one to eight are written at a time."""
    return Scene(name, requests(count, share), 8, 60.0, has_draft, at_random=True)


def loads() -> list[Scene]:
    return [
        load("at random, chat, a usual draft model", 0.72),
        load("at random, chat, a good draft model", 0.88),
        load("at random, chat, a poor draft model", 0.4),
        load("at random, chat, no draft model", 0.0, has_draft=False),
    ]


@dataclass
class Player:
    """A simulated model."""

    scene: Scene
    machine: Machine
    now: Now = field(default_factory=Now)

    def __post_init__(self) -> None:
        self.model = self._model(False)
        self.model.host.costs = StepCosts()  # nothing is begun ahead, neither paid for nor gained
        self.model.host.pace.costs = self.model.host.costs
        self.model.host.costs.curve = self.machine.measured
        if self.machine.at_once > 1 or self.machine.ahead:
            self.model.host.costs.device_type = "cuda"
            self.model.host.costs.at_once = self.machine.at_once
            self.model.host.costs.writes_any_length = False
            self.model.host.pace = Pace(self.model.host.costs)
            self.model.host.writer = TextAtOnce(self.model.host, self.model.backbone)
        self.model.engine.watch.now = self.now
        self.model.backbone.engine = self.model.engine
        self.draft = self._model(True) if self.scene.has_draft else None

    def _model(self, drafts: bool) -> Model:
        backbone = Replay(self.scene.texts, self.now, self.machine, drafts)
        lanes = 1 if drafts else self.scene.lanes
        context = self.scene.context
        return Model("replay", Causal(), backbone, lanes=lanes, context=context, threaded=False)

    def seconds(self, contestant: Contestant) -> float:
        """How long a contestant writes all texts; of those that come at random moments, how long
        all of them take from their arrival to their end."""
        method, options = contestant
        if self.draft is not None and method in ("speculative", "auto"):
            options = {**options, "draft": self.draft}
        self.model.host.forget()  # prompts are read each time
        began = self.now()
        step = self.machine.curve[1]
        moments = [began + at * step for at in self.scene.arrivals]
        waiting = deque(zip(moments, self.scene.texts))
        jobs = []
        ended: list[float] = []
        while waiting or self.model.engine.busy:
            if not self.model.engine.busy:
                self.now.seconds = max(self.now.seconds, waiting[0][0])
            while waiting and waiting[0][0] <= self.now():
                text = waiting.popleft()[1]
                tokens = len(text.tokens) - text.prompt
                how = dict(method=method, max_tokens=tokens, ignore_eos=True, **options)
                jobs.append((text, self.model.submit(text.tokens[: text.prompt], **how)))
            self._count_first_times()
            self.model.engine.step()
            finished = sum(job.finished for _, job in jobs)
            ended += [self.now()] * (finished - len(ended))
        for text, job in jobs:
            assert job.outcome().token_ids == text.tokens[text.prompt :], "another text"
        self.results = [job.outcome() for _, job in jobs]
        if self.scene.at_random:
            return sum(ended) - sum(moments)
        return self.now() - began

    def _count_first_times(self) -> None:
        """Whoever drafts has its own host in the engine, from the first request that names it."""
        for host in self.model.engine.hosts[1:]:
            if not isinstance(host.writer, FirstTimes):
                host.writer = FirstTimes(host, self.model.backbone)

    def twice(self, contestant: Contestant) -> tuple[float, float]:
        return self.seconds(contestant), self.seconds(contestant)


class Row(NamedTuple):
    """One scene on one machine: seconds of a model that has seen nothing, and of one that has
    decoded the same before. What was learnt counts for fixed methods, too: how long steps take says
    how fast prompts are read."""

    machine: str
    scene: str
    by: str  # the best fixed method
    plain: tuple[float, float]
    best: tuple[float, float]
    auto: tuple[float, float]
    drafted: int  # rows, by `auto` at first
    accepted: int

    @property
    def over_plain(self) -> list[float]:
        return [plain / auto for plain, auto in zip(self.plain, self.auto)]

    @property
    def over_best(self) -> list[float]:
        return [best / auto for best, auto in zip(self.best, self.auto)]

    @property
    def of_plain(self) -> float:
        return min(self.over_plain)

    @property
    def of_best(self) -> float:
        return min(self.over_best)


def simulate(
    scene: Scene, machine: Machine, contestants: Sequence[Contestant] | None = None
) -> Row:
    if contestants is None:
        contestants = FEW if scene.lanes > 1 else GRID + DRAFTED
        if scene.at_random:
            contestants = [*FEW, ("speculative", {"k": 4})]
    if not scene.has_draft:
        contestants = [one for one in contestants if one[0] != "speculative"]
    taken = {label(one): Player(scene, machine).twice(one) for one in contestants}
    player = Player(scene, machine)
    cold = player.seconds(("auto", {}))
    events = [event for result in player.results for event in result.trace]
    by = min(taken, key=lambda name: sum(taken[name]))
    return Row(
        machine.name,
        scene.name,
        by,
        plain=taken["ar"],
        best=taken[by],
        auto=(cold, player.seconds(("auto", {}))),
        drafted=sum(len(event.drafted) for event in events),
        accepted=sum(event.accepted for event in events),
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| machine | texts | best fixed | its speed, of `ar` | `auto` over `ar`: first, again | "
        "over the best: first, again | rows drafted, accepted at first |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.machine} | {row.scene} | `{row.by}` | {sum(row.plain) / sum(row.best):.2f} | "
        f"{row.over_plain[0]:.3f}, {row.over_plain[1]:.3f} | "
        f"{row.over_best[0]:.3f}, {row.over_best[1]:.3f} | {row.drafted}, {row.accepted} |"
        for row in rows
    ]
    least = (
        f"Worst: {min(row.of_plain for row in rows):.3f} of `ar`, "
        f"{min(row.of_best for row in rows):.3f} of the best fixed one."
    )
    return "\n".join([*lines, "", least])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="scenes whose name has this in it")
    parser.add_argument("--machine", default="", help="machines whose name has this in it")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--write", action="store_true", help="put the table into docs/auto.md")
    parser.add_argument("--keep", type=Path, help="write the rows of the table into this file")
    parser.add_argument("--publish", type=Path, nargs="+", help="put kept rows into docs/auto.md")
    arguments = parser.parse_args()
    if arguments.publish:
        kept = [json.loads(line) for file in arguments.publish for line in file.open()]
        write(table([Row(*each) for each in kept]), arguments.tokens)
        return
    rows = []
    for machine in [*MACHINES, *SERVERS]:
        for scene in loads() if machine in SERVERS else scenes(arguments.tokens):
            if arguments.only in scene.name and arguments.machine in machine.name:
                rows.append(simulate(scene, machine))
                print(table(rows[-1:]).splitlines()[2], flush=True)
    print(table(rows).splitlines()[-1])
    if arguments.keep:
        arguments.keep.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if arguments.write:
        write(table(rows), arguments.tokens)


def write(told: str, tokens: int) -> None:
    from page import DOCS, write_part

    told = f"{told} {tokens} tokens per text, half of that in batches; {date.today()}."
    write_part(Path(DOCS / "auto.md"), told, START, END)


if __name__ == "__main__":
    main()
