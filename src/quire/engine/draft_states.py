"""Drafts by a head that goes on from hidden states of the model: EAGLE-3.

The head is a draft model whose input has states beside tokens. Its row `i` goes on from the model's
states of token `i` and holds token `i + 1`. After a prefix of the prompt that was found in the
cache, whose states nobody computed, it sees the rest of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.cache.pools import Pools
from quire.engine.draft_model import ModelDrafter
from quire.executor.computed import Computed
from quire.executor.eager import EagerExecutor
from quire.executor.executor import Executor
from quire.executor.hidden_rows import HiddenRows
from quire.executor.inputs import StepInputs
from quire.models.eagle import EagleHead
from quire.models.weights.loader import LoadedModel
from quire.scheduler.drafts import Draft, DraftQuery


class HeadExecutor(EagerExecutor):
    """Runs the steps of a head. Implements `Executor`.

    A step either reads known tokens of its sequences, or goes on from a guess of each.

    Args:
        states: the model's states.
        offsets: by sequence number, the index in the sequence of the head's first row.
    """

    def __init__(
        self, head: EagleHead, pools: Pools, states: HiddenRows, offsets: dict[int, int]
    ) -> None:
        super().__init__(head, pools)
        self._head, self._states, self._offsets = head, states, offsets
        self._ahead: dict[int, mx.array] = {}
        """The head's states `[1, hidden]` after each sequence's last row."""

    def _run(self, inputs: StepInputs) -> Computed:
        reads = bool(inputs.sequences[0].tokens)
        given = []
        for each in inputs.sequences:
            if reads:
                first = self._offsets[each.number] + each.start
                given.append(self._states.rows(each.number, first, each.count))
            else:
                given.append(self._ahead[each.number])
        states = given[0] if len(given) == 1 else mx.concatenate(given)
        hidden = self._head.forward(inputs, self._head.project(states) if reads else states)
        last = hidden if inputs.wanted is None else hidden[inputs.wanted]
        self._ahead = {each.number: last[n : n + 1] for n, each in enumerate(inputs.ending)}
        return Computed(hidden)


@dataclass(frozen=True)
class StatesParts:
    """The parts from which a drafter that reads the model's hidden states is built.

    Attributes:
        loaded: the drafter's own model.
        budget, block_size, read_s: see `ModelDrafter`.
        states: the model's states.
        offsets: see `HeadExecutor`; the drafter writes them.
    """

    loaded: LoadedModel
    budget: int
    block_size: int
    read_s: float
    states: HiddenRows
    offsets: dict[int, int]


class StatesDrafter(ModelDrafter):
    """Drafts by a head."""

    keeps_guesses = False  # their keys come from the head's own states
    skipped = 1
    """Tokens between a row's state and its token."""

    def __init__(self, executor: Executor, parts: StatesParts) -> None:
        super().__init__(
            parts.loaded, executor, parts.budget, block_size=parts.block_size, read_s=parts.read_s
        )
        self._states, self._offsets = parts.states, parts.offsets

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        own = [self._own(query) for query in queries]
        found = iter(super().propose([query for query in own if query is not None]))
        drafts = [None if query is None else next(found) for query in own]
        for query in own:
            if query is not None and (read := self._read(query.number)) is not None:
                self._states.drop_before(query.number, self._offsets[query.number] + read)
        return drafts

    def reading_s(self, query: DraftQuery) -> float:
        number = query.number
        known = self._read(number) is not None
        first = self._offsets[number] if known else self._states.span(number).start
        return super().reading_s(query._replace(tokens=query.tokens[first:]))

    def _shift(self, number: int) -> int:
        return self._offsets[number] + self.skipped

    def forget(self, number: int) -> None:
        super().forget(number)
        self._states.forget(number)
        self._offsets.pop(number, None)

    def _own(self, query: DraftQuery) -> DraftQuery | None:
        """Return the query with the tokens of the head's rows; None without the model's states."""
        number, there = query.number, self._states.span(query.number)
        if there.stop < len(query.tokens) - 1 or not there:
            return None
        read = self._read(number)
        if read is None or not there.start <= self._offsets[number] + read <= there.stop:
            super().forget(number)
            self._offsets[number] = there.start
        return query._replace(tokens=query.tokens[self._shift(number) :])
