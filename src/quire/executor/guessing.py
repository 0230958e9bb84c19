"""Heads that guess tokens within a step, from the final hidden states of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from quire.device.dtypes import int32
from quire.executor.inputs import StepInputs
from quire.models.base import LanguageModel
from quire.models.draft_head import TokenGuesser
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_assistant import Assistant


class FinalStates(NamedTuple):
    """Final hidden states of a step.

    Attributes:
        inputs: the step's rows, as the model saw them.
        hidden: `[T, hidden]`, normalised, of all rows; None where the model computed its last
            layers for some rows only.
        rows: indices of the sampled rows among them.
        counts: number of sampled rows of each of the N sequences that sample, in order.
        sampled: `[R, hidden]`, of the sampled rows.
    """

    inputs: StepInputs
    hidden: mx.array | None
    rows: Sequence[int]
    counts: Sequence[int]
    sampled: mx.array

    def last_kept(self, tokens: mx.array) -> mx.array | None:
        """Return which sampled row of each sequence the answer goes on from, int32 `[N]`.

        That is the one after its right drafts. None if no sequence has drafts.

        Args:
            tokens: int32 `[R]`, the sampled ones.
        """
        most = max(self.counts) - 1
        if not most:
            return None
        firsts = np.cumsum([0, *self.counts[:-1]])
        ahead = np.arange(most)
        drafted = ahead[None] < np.array(self.counts)[:, None] - 1  # [N, most]
        places = np.where(drafted, firsts[:, None] + ahead[None], 0)
        drafts = np.array(self.rows)[np.where(drafted, places + 1, 0)]
        right = tokens[int32(places)] == self.inputs.tokens[int32(drafts)]
        right = mx.logical_and(right, mx.array(drafted)).astype(mx.int32)
        return int32(firsts) + mx.cumprod(right, axis=1).sum(axis=1)


class Guesser(Protocol):
    """Guesses what follows the tokens that a step samples."""

    @property
    def layers(self) -> range:
        """Layers whose keys and values it writes."""
        ...

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Arrays of the last step that must be evaluated, beside guesses, keys and values."""
        ...

    def guess(self, states: FinalStates, tokens: mx.array, count: int) -> mx.array | None:
        """Return tokens that may follow the last kept one of each sequence, int32 `[N, count]`.

        None if `count` is 0. Every step that samples calls it.

        Args:
            tokens: int32 `[R]`, the sampled ones.
        """
        ...

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        """Take in a step that samples nothing; `hidden` is `[T, hidden]`."""
        ...


class HeadGuesser:
    """Guesses by a head without layers of its own, which needs the sampled rows alone."""

    layers = range(0)
    arrays = ()

    def __init__(self, guesser: TokenGuesser) -> None:
        self.guesser = guesser

    def guess(self, states: FinalStates, tokens: mx.array, count: int) -> mx.array | None:
        if not count:
            return None
        kept = states.last_kept(tokens)
        if kept is None:
            return self.guesser(states.sampled, tokens, count)
        return self.guesser(states.sampled[kept], tokens[kept], count)

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        pass


class LayerGuesser:
    """Guesses one token by the checkpoint's head, whose layer reads every row of every step.

    Args:
        model: a model with a head.
    """

    arrays = ()

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.layers = range(len(model.own_layout), len(model.layout))

    def guess(self, states: FinalStates, tokens: mx.array, count: int) -> mx.array | None:
        inputs, hidden, rows = states.inputs, states.hidden, states.rows
        assert hidden is not None, "models with a head compute all rows"
        if len(rows) == hidden.shape[0]:
            following = tokens
        else:
            following = _known_next(inputs)
            following[int32(rows)] = tokens
        ahead = self._model.look_ahead(hidden, following, inputs)
        if not count:
            return None
        if len(rows) < hidden.shape[0]:
            ahead = ahead[int32(rows)]
        if (kept := states.last_kept(tokens)) is not None:
            ahead = ahead[kept]
        return mx.argmax(self._model.logits(ahead), axis=-1).astype(mx.int32)[:, None]

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        self._model.look_ahead(hidden, _known_next(inputs), inputs)


class AssistantGuesser:
    """Guesses by an assistant of Gemma 4, which reads the model's keys and writes none.

    Args:
        model: the model, which shares its keys with the assistant.
    """

    layers = range(0)
    arrays = ()

    def __init__(self, model: Gemma4, assistant: Assistant) -> None:
        self._model = model
        self._assistant = assistant

    def guess(self, states: FinalStates, tokens: mx.array, count: int) -> mx.array | None:
        if not count:
            return None
        step = states.inputs.sampled_only(states.rows)
        hidden, kept = states.sampled, states.last_kept(tokens)
        guesses: list[mx.array] = []
        for _ in range(count):
            embedding = self._model.model.embedded(tokens)
            logits, hidden = self._assistant(hidden, embedding, step, positions=step.positions + 1)
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
            guesses.append(tokens)
        whole = mx.stack(guesses, axis=1)
        return whole if kept is None else whole[kept]

    def read(self, inputs: StepInputs, hidden: mx.array) -> None:
        pass


def _known_next(inputs: StepInputs) -> mx.array:
    """Return the token after each row's token, int32 `[T]`, where it is known."""
    following = mx.concatenate([inputs.tokens[1:], inputs.tokens[:1]])
    if ends := inputs.known_next():
        following[int32(list(ends))] = int32(list(ends.values()))
    return following
