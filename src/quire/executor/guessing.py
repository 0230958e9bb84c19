"""Heads that guess tokens within a step, from the final hidden states of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from quire.device.device import current_device
from quire.device.dtypes import int32
from quire.executor.ahead import Ahead
from quire.executor.computed import Computed
from quire.executor.inputs import SomeRows, StepInputs
from quire.models.base import ForwardContext, LanguageModel, Module
from quire.models.draft_head import TokenGuesser
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_assistant import Assistant
from quire.program.trace import BehindStep

_NO_TOKEN = -1
"""Stands behind a sequence's last draft. It equals no sampled token."""


class FinalStates(NamedTuple):
    """Final hidden states of a step.

    Attributes:
        inputs: the step's rows, as the model saw them.
        hidden: `[T, hidden]`, normalised, of all rows; None where the model computed its last
            layers for some rows only.
        rows: indices of the sampled rows among them.
        counts: number of sampled rows of each of the N sequences that sample, in order.
        sampled: `[R, hidden]`, of the sampled rows.
        least_chance: see `StepPlan`; for guessers that weigh their guesses.
    """

    inputs: StepInputs
    hidden: mx.array | None
    rows: Sequence[int]
    counts: Sequence[int]
    sampled: mx.array
    least_chance: float = 0.0

    def last_kept(self, tokens: mx.array) -> mx.array | None:
        """Return which sampled row of each sequence the answer goes on from, int32 `[N]`.

        That is the one after its right drafts. None if no sequence has drafts.

        Args:
            tokens: int32 `[R]`, the sampled ones.
        """
        if len(self.counts) == len(self.rows):
            return None
        starts = [0, *accumulate(self.counts)]
        return current_device().operations.first_different(tokens, self._drafts(), starts)

    def _drafts(self) -> mx.array:
        """Return the draft of each sampled token, int32 `[R]`. A sequence's last one counts for
        nothing.
        """
        inputs = self.inputs
        if inputs.following is not None:
            last = len(inputs.tokens) - 1
            return inputs.tokens[int32([min(row + 1, last) for row in self.rows])]
        drafts: list[int] = []
        for each in inputs.ending:
            if each.sampled:
                drafts += each.tokens[len(each.tokens) - each.sampled + 1 :]
                drafts.append(_NO_TOKEN)
        return int32(drafts)


RunBehind = Callable[[int, SomeRows, Callable[[], mx.array]], Computed]
"""Computes rows by one of `Guesser.behind`, given by its number, or by a function that runs it
eagerly.
"""


class Guesser(ABC):
    """Guesses what follows the tokens that a step samples.

    Attributes:
        layers: layers whose keys and values it writes.
        arrays: arrays of the last step that must be evaluated, beside guesses, keys and values.
        behind: what it runs on rows of the step; empty if nothing of it can be traced.
        weighs: whether it knows how likely its guesses are.
    """

    layers = range(0)
    weighs = False
    arrays: tuple[mx.array, ...] = ()
    behind: Sequence[BehindStep] = ()
    _run: RunBehind | None = None

    @abstractmethod
    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> mx.array | None:
        """Return tokens that may follow the last kept one of each sequence, int32 `[N, count]`.

        None if `count` is 0. Every step that samples calls it.

        Args:
            tokens: int32 `[R]`, the sampled ones.
            kept: see `FinalStates.last_kept`.
        """

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:  # noqa: B027  # most need not
        """Take in a step that samples nothing; `hidden` is `[T, hidden]`."""

    def may_follow(self, count: int) -> bool:
        """Return whether it guesses so many tokens after rows that only the device places, if
        graphs run what is `behind`.
        """
        return False

    def run_by(self, run: RunBehind) -> None:
        """Let a function of the executor run what is `behind`."""
        self._run = run

    def _computed(self, rows: SomeRows, number: int = 0) -> Computed:
        """Run one of the modules in `behind` over rows; return its hidden states and logits. They
        become `arrays`, so that its writes to the pools are evaluated, too: no other array depends
        on these.
        """
        assert rows.hidden is not None, "it reads hidden states"
        eagerly = partial(self.behind[number].run, rows.hidden, rows.tokens, rows)
        found = Computed(eagerly()) if self._run is None else self._run(number, rows, eagerly)
        self.arrays = (found.output,)
        return found

    def _best(self, computed: Computed, number: int = 0) -> mx.array:
        """Return the likeliest tokens after rows that one of `behind` computed, int32 `[R]`."""
        logits = computed.logits
        if logits is None:
            logits = self.behind[number].logits(computed.hidden)
        return mx.argmax(logits, axis=-1).astype(mx.int32)


class DraftHeadGuesser(Guesser):
    """Guesses by a `draft_head`, which has no layers of its own and reads sampled rows alone."""

    weighs = True

    def __init__(self, guesser: TokenGuesser) -> None:
        self.guesser = guesser

    def may_follow(self, count: int) -> bool:
        return True

    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> mx.array | None:
        if not count:
            return None
        least = states.least_chance
        if kept is None:
            return self.guesser(states.sampled, tokens, count, least=least)
        return self.guesser(states.sampled[kept], tokens[kept], count, least=least)


class MTPGuesser(Guesser):
    """Guesses by the checkpoint's head for multi-token prediction (MTP).

    Its layer reads every row of every step. After its first guess it goes on from its own state and
    guess, as if these were the model's.
    The keys of such rows are not kept.

    Args:
        model: a model with a head.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.layers = range(len(model.own_layout), len(model.layout))
        self.behind = [
            BehindStep(model, partial(model.look_ahead, head=number), model.logits)
            for number in range(len(self.layers))
        ]

    def may_follow(self, count: int) -> bool:
        return count <= 1  # further guesses run eagerly, with tables of the host

    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> mx.array | None:
        inputs, hidden, rows = states.inputs, states.hidden, states.rows
        assert hidden is not None, "models with a head compute all rows"
        ahead = self._computed(inputs.looking_ahead(hidden, _next(inputs, rows, tokens)))
        if not count:
            return None
        if len(rows) < hidden.shape[0]:
            ahead = ahead.rows(int32(rows))
        guesses: list[mx.array] = []
        further = Ahead(inputs, rows)
        for number in range(count):
            if number:
                step = further.next(guesses[-1])
                ahead = Computed(self._model.look_ahead(ahead.hidden, guesses[-1], step))
            guesses.append(self._best(ahead))
        return _of_sequences(guesses, kept)

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        self._computed(inputs.looking_ahead(hidden, _known_next(inputs)))


class MTPChainGuesser(MTPGuesser):
    """Guesses by several MTP heads of the checkpoint, each from the states of the one before.

    The layer of each head reads every row of every step. A head's row needs the token as far behind
    it as the head guesses ahead; where that is not known yet, the guess of the head before stands
    for it, also if it turns out to be wrong.
    """

    def may_follow(self, count: int) -> bool:
        return True

    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> mx.array | None:
        inputs, rows = states.inputs, states.rows
        assert states.hidden is not None, "models with heads compute all rows"
        lasts = inputs.last_rows()
        fronts = int32(lasts)
        samples = [place for place, each in enumerate(inputs.sequences) if each.sampled]
        if kept is not None:
            fronts[int32(samples)] = int32(rows)[kept]
        following = _next(inputs, rows, tokens)
        guesses = self._chain(inputs, states.hidden, following, fronts=fronts, count=count)
        if not count:
            return None
        every = len(samples) == len(lasts)
        return _of_sequences(guesses[:count], None if every else int32(samples))

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        fronts = int32(inputs.last_rows())
        self._chain(inputs, hidden, _known_next(inputs), fronts=fronts, count=0)

    def _chain(
        self,
        inputs: StepInputs,
        hidden: mx.array,
        following: mx.array,
        fronts: mx.array,
        count: int,
    ) -> list[mx.array]:
        """Run the heads; return the guesses of each at the rows `fronts`, int32 `[S]`.

        Args:
            following: `[T]`, the token after each row's token.
            fronts: the last row of each sequence whose token stays.
            count: number of guesses that are wanted; only what further heads read is made beyond.
        """
        guesses: list[mx.array] = []
        for number in range(len(self.layers)):
            ahead = self._computed(inputs.looking_ahead(hidden, following), number)
            hidden = ahead.hidden
            if number + 1 < max(count + 1, len(self.layers)):
                guesses.append(self._best(ahead.rows(fronts)))
                following = mx.concatenate([following[1:], following[:1]])
                following[fronts] = guesses[-1]
        return guesses


class AssistantGuesser(Guesser):
    """Guesses by an assistant of Gemma 4, which reads the model's keys and writes none.

    Args:
        model: the model, which shares its keys with the assistant.
    """

    def __init__(self, model: Gemma4, assistant: Assistant) -> None:
        self._model, self._assistant = model, assistant
        both = Module()
        both.model, both.assistant = model, assistant
        self.behind = [BehindStep(both, self._rows, assistant.logits)]

    def may_follow(self, count: int) -> bool:
        return True

    def guess(
        self, states: FinalStates, tokens: mx.array, kept: mx.array | None, *, count: int
    ) -> mx.array | None:
        if not count:
            return None
        step = states.inputs.sampled_only(states.rows)
        step.hidden, step.tokens = states.sampled, tokens
        guesses: list[mx.array] = []
        for number in range(count):
            computed = self._computed(step)
            guesses.append(self._best(computed))
            if number + 1 < count:
                step.hidden, step.tokens = self._assistant.further(computed.hidden), guesses[-1]
        return _of_sequences(guesses, kept)

    def _rows(self, hidden: mx.array, tokens: mx.array, step: ForwardContext) -> mx.array:
        embedding = self._model.model.embedded(tokens)
        rows: mx.array = self._assistant(hidden, embedding, step, positions=step.positions + 1)
        return rows


def _of_sequences(guesses: Sequence[mx.array], rows: mx.array | None) -> mx.array:
    """Return guesses side by side, int32 `[N, count]`.

    Args:
        guesses: int32 `[R]` each.
        rows: the row of each sequence, `[N]`; None if every row is one.
    """
    whole = mx.stack(list(guesses), axis=1)
    return whole if rows is None else whole[rows]


def _next(inputs: StepInputs, rows: Sequence[int], tokens: mx.array) -> mx.array:
    """Return the token after each row's token, int32 `[T]`.

    Args:
        rows: indices of the sampled rows, whose tokens `[R]` are `tokens`.
    """
    if len(rows) == inputs.tokens.shape[0]:
        return tokens
    following = _known_next(inputs)
    following[int32(rows)] = tokens
    return following


def _known_next(inputs: StepInputs) -> mx.array:
    """Return the token after each row's token, int32 `[T]`, where it is known."""
    following = mx.concatenate([inputs.tokens[1:], inputs.tokens[:1]])
    if ends := inputs.known_next():
        following[int32(list(ends))] = int32(list(ends.values()))
    return following
