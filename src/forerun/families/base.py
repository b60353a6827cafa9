"""What a family is, and the handle through which a method asks a model.

A *family* is a kind of model: it turns a sequence into plans, purely. A *handle* is what a method
holds: its class says what the model can do, and each of its coroutines costs one forward. A method
names the class it needs in the annotation of its parameter `target`; the error for other models is
made from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, stack

from forerun.errors import NotAble
from forerun.probability.acceptance import sample_token
from forerun.probability.distributions import tempered
from forerun.probability.logits import ChainRows
from forerun.probability.outcomes import Outcome, Placement
from forerun.sequence.canvas import Canvas
from forerun.sequence.choosing import Chooser
from forerun.sequence.question import (
    BlankLaws,
    Branch,
    BranchQuestion,
    Continuation,
    Costs,
    ModelHost,
    NextToken,
    Question,
    Written,
)
from forerun.sequence.rows import Plan


class Family(ABC):
    """A kind of model: how it reads a sequence, and what its models can do."""

    name: ClassVar[str]
    handle: ClassVar[type[ModelHandle]]
    default_method: ClassVar[str] = "ar"
    default_reason: ClassVar[str] = "the family says nothing of others"  # why that one
    needs_prompt: bool = True  # must something be given before the first question?
    mask_token: int | None = None
    impossible_tokens: tuple[int, ...] = ()  # never an outcome: a mask
    shifted: bool = False  # does a row speak of the position after its own?
    # Is what asks for the next token plain text, that of the sequence? Then nobody asks
    # `conditionals` for it. A class that defines its own says so again.
    reads_text: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        plans_itself = not vars(cls).keys().isdisjoint(("conditionals", "after"))
        if plans_itself and "reads_text" not in vars(cls):
            cls.reads_text = False

    @classmethod
    @abstractmethod
    def of(cls, config: Any) -> Family | None:
        """The family of a checkpoint with this config, or None if it is of another kind."""

    def can(self, capability: type[ModelHandle]) -> bool:
        """Do models of this family do what this handle class offers?"""
        return issubclass(self.handle, capability)

    def can_begin(self, seq: Canvas) -> bool:
        """Does the sequence hold something that a first question can be about?"""
        return not self.needs_prompt or seq.known > 0

    def slots(self, context: int) -> int:
        """How many cache slots a lane needs for a canvas of `context` tokens."""
        return context

    def masked_as(self, token: int) -> Family:
        """The same kind of model with another number for its mask."""
        raise NotAble(f"family '{self.name}' cannot give its mask another number.")

    def backbone(self, network: Any, vocab: int, context: int) -> Any | None:
        """A backbone of the family's own for a loaded network; None takes the engine's."""
        return None

    def conditionals(
        self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False
    ) -> Plan:
        """A plan that scores chains after the text. The base of `ChainScorer`."""
        raise NotAble(f"family '{self.name}' scores no chains.")

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """A plan that reads blanks, each on its own. The base of `BlankFiller`."""
        raise NotAble(f"family '{self.name}' fills no blanks.")

    def verdict_and_drafts(
        self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]
    ) -> Plan:
        """A plan that scores a chain and drafts what follows it. The base of `SelfDrafter`."""
        raise NotAble(f"family '{self.name}' does not draft and score in one forward.")

    def one_chain(self, chains: Sequence[Sequence[int]]) -> Sequence[int]:
        """The only chain, for families that score one per question."""
        if len(chains) > 1:
            raise NotAble(
                f"a model of the family '{self.name}' scores one chain per question, "
                f"not {len(chains)}."
            )
        return chains[0]


def family_settings(config: Any) -> dict[str, Any]:
    """What a checkpoint's config says about its family: the key `forerun`."""
    return getattr(config, "forerun", None) or {}


class ModelHandle:
    """What a method holds of a model. Its family makes the plan, the engine answers it."""

    does: ClassVar[str] = "decodes"  # for errors: "a model that …"
    family: Family

    def __init__(self, family: Family, host: ModelHost, drafting: bool = False):
        self.family = family
        self.host = host
        self.drafting = drafting

    @property
    def shared_state(self) -> dict[str, Any]:
        """What methods keep from one request to the next. It may change guesses, never
        decisions."""
        return self.host.shared_state

    @property
    def costs(self) -> Costs:
        """What steps of the model cost, here and now. It may change guesses, never decisions."""
        return self.host.costs

    def chooser(self, seq: Canvas, learns: bool) -> Chooser:
        """Whoever says which drafts pay for a sequence. It `learns` from earlier requests, and for
        later ones."""
        return self.host.chooser(seq, learns)

    @property
    def rows_are_cheap(self) -> bool:
        """Do more rows in one forward cost little more time, as on a GPU?"""
        return self.host.rows_are_cheap

    def ask(
        self, seq: Canvas, plan: Plan, branches: Iterable[Branch], with_model_law: bool = False
    ) -> Question:
        """A question to await: run the plan and answer with the laws that it reads."""
        return BranchQuestion(self.host, plan, seq, branches, self.drafting, with_model_law)

    async def features(self, seq: Canvas, layers: Sequence[int]) -> Tensor:
        """The hidden states after these layers of every token of the text, side by side: [n, N].

        They are kept in slots, as keys and values are: what was run before is not run again."""
        self.host.ask_features(layers)
        plan = self.family.conditionals(seq, [()], last_only=True)
        asked = self.ask(seq, plan, [Branch((), [0])])
        asked.features = tuple(layers)
        return (await asked)[-1]

    async def ask_canvases(
        self,
        seq: Canvas,
        plan: Plan,
        positions: Sequence[Sequence[int]],
        placements: Sequence[Placement],
    ) -> list[BlankLaws]:
        """Ask about copies of the canvas: each has some tokens placed on it, and its laws are of
        some of its positions."""
        branches = []
        for where, placement in zip(positions, placements, strict=True):
            tokens = [token for _, token in placement]
            places = [position for position, _ in placement]
            branches.append(Branch(tokens, [len(tokens)] * len(where), where, places))
        return await self.ask(seq, plan, branches, with_model_law=True)


class ChainScorer(ModelHandle):
    """A model that scores chains."""

    does = "scores chains"

    async def conditionals(self, seq: Canvas, *chains: Sequence[int]) -> list[Tensor]:
        """For each chain, the laws [len + 1, V]: of its every token given the text and the tokens
        before it, and of the token after it."""
        chains = chains or ((),)
        plan = self.family.conditionals(seq, chains)
        rows = zip(chains, plan.reads, strict=True)
        return await self.ask(seq, plan, [Branch(c, range(len(read))) for c, read in rows])

    def judged(
        self, seq: Canvas, chain: Sequence[int], rule: Callable[..., Outcome], *given: object
    ) -> Question:
        """To await: what a rule says of a chain, of what else is given, and of the laws that
        `conditionals` answers. It is drawn as soon as those are there."""
        plan = self.family.conditionals(seq, [chain])
        asked = self.ask(seq, plan, [Branch(chain, range(plan.read_count))])
        asked.then = lambda p_LV: seq.draw(rule, chain, *given, p_LV)
        return asked

    async def next_law(self, seq: Canvas, chain: Sequence[int] = ()) -> Tensor:
        """The law [V] of the token after the text and the chain: the last row of `conditionals`,
        without the others."""
        plan = self.family.conditionals(seq, [chain], last_only=True)
        [law_1V] = await self.ask(seq, plan, [Branch(chain, [len(chain)])])
        return law_1V[0]

    def _one(self, seq: Canvas) -> NextToken:
        plain = self.family.reads_text
        return NextToken(self.host, seq, self.drafting, None if plain else self._plan_after)

    def _plan_after(self, seq: Canvas) -> Plan:
        return self.family.conditionals(seq, [()], last_only=True)

    async def write(self, seq: Canvas, most: int | None = None) -> list[int]:
        """The next token, drawn from its law: x ~ p(. | text). Or the next few, at `most` so many,
        where several cost one launch and nobody looks at what is between them."""
        several = self._several(seq, most)
        answer = await (several or self._one(seq))
        return answer.tokens if isinstance(answer, Written) else [answer.token]

    def writes_token_by_token(self, seq: Canvas) -> bool:
        """Is something looked at behind every token, so that `write` never gives several?"""
        return seq.history.edits_logits or seq.logprobs.wanted or seq.recorder is not None

    def _several(self, seq: Canvas, most: int | None) -> Continuation | None:
        k = self.host.at_once
        if most is not None and most < k:
            # Where launches are captured there is one for few lengths, and shorter is not cheaper.
            k = most if self.host.writes_any_length else 1
        if k == 1 or seq.logprobs.wanted or seq.recorder is not None:
            return None
        asked = self._continuation(seq, k, 1.0)
        if asked is not None:
            asked.then = lambda law_1V: seq.draw(sample_token, law_1V[0])
        return asked

    async def write_on(self, seq: Canvas, k: int, temperature: float = 1.0) -> Written:
        """At most k tokens that the model writes after the text, each drawn from its own law, up to
        the one that ends it. The draws' temperature is times the request's own."""
        at_once = self._continuation(seq, k, temperature)
        if at_once is not None:
            return await at_once
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < k and not (tokens and seq.ends(tokens[-1])):
            law_V = tempered(await self.next_law(seq, tokens), temperature)
            drawn = await seq.draw(sample_token, law_V)
            tokens.append(drawn.token)
            laws.append(law_V)
        return Written(tokens, stack(laws))

    def _continuation(self, seq: Canvas, k: int, temperature: float) -> Continuation | None:
        """The same in one launch, where the engine can do it: penalties need the host."""
        if seq.history.edits_logits or not self.host.can_write(seq.known, k):
            return None
        plan = self.family.conditionals(seq, [()], last_only=True)
        if not plan.is_plain_text:
            return None
        first = ChainRows(seq.history, (), [0])
        return Continuation(
            self.host, plan, seq, [first], [()], self.drafting, False, tokens=k,
            temperature=temperature,
        )  # fmt: skip


class BlankFiller(ModelHandle):
    """A model that fills blanks."""

    does = "fills blanks"

    async def marginals(self, seq: Canvas, positions: Sequence[int]) -> Tensor:
        """The laws [len(positions), V] of each blank on its own, given what is decided."""
        plan = self.family.marginals(seq, positions)
        branch = Branch((), [0] * len(positions), positions, drafts=True)
        [law_NV] = await self.ask(seq, plan, [branch])
        return law_NV


class SelfDrafter(ChainScorer, BlankFiller):
    """A model that scores a chain and drafts what follows it in one forward."""

    does = "drafts for itself"

    async def verdict_and_drafts(
        self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]
    ) -> list[Tensor]:
        """What `conditionals` answers for the chain; then, for each prefix of it, given by its
        length, the marginals of up to k blanks after the one that follows the prefix: the next
        draft, should the chain be accepted up to there."""
        plan = self.family.verdict_and_drafts(seq, chain, k, prefixes)
        verdict, *drafts = plan.reads
        branches = [Branch(chain, range(len(verdict)))]
        for n, read in zip(prefixes, drafts):
            branches.append(Branch(chain, [n] * len(read), (), drafts=True))
        return await self.ask(seq, plan, branches)
