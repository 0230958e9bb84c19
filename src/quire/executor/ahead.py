"""Rows that guess ahead of a step: of tokens whose keys and values are in no block."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quire.attention.backend import KeysBeside, Scoring
from quire.attention.step import Attention
from quire.device.dtypes import int32
from quire.executor.inputs import SomeRows, StepInputs
from quire.models.base import ForwardContext
from quire.scheduler.plan import ScheduledSequence

_Beside = dict[int, list[tuple[mx.array, mx.array]]]
"""Keys and values `[T, kv_heads, dim]` of the guesses so far, by layer."""


class _RowsAhead(SomeRows):
    """Rows that are ahead of rows whose keys are written.

    Args:
        ahead: number of tokens by which they are ahead.
        beside: the guesses before; these rows' keys and values are added.
    """

    def __init__(
        self,
        sequences: list[ScheduledSequence],
        attention: Attention,
        tokens: mx.array,
        positions: mx.array,
        ahead: int,
        beside: _Beside,
    ) -> None:
        super().__init__(sequences, attention, tokens=tokens, positions=positions)
        self.attention = attention.step(sequences, ahead)
        self._beside = beside

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chosen_by: int | None = None,
    ) -> mx.array:
        assert k is not None, "a layer that guesses has its own keys"
        assert v is not None, "a layer that guesses has its own values"
        assert chosen_by is None, "rows ahead see all keys"
        own = self._beside.setdefault(layer, [])
        own.append((k, v))
        keys, values = (mx.stack([*each], axis=2) for each in zip(*own, strict=True))
        scoring = Scoring(scale, softcap, sinks, beside=KeysBeside(keys, values))
        return self.attention.attend(layer, q, k=None, v=None, scoring=scoring)


class Ahead:
    """Guesses ahead of the sampled rows of a step, one token after the other.

    Args:
        inputs: the step.
        rows: indices of the sampled rows.
    """

    def __init__(self, inputs: StepInputs, rows: Sequence[int]) -> None:
        self._sequences, self._attention = inputs.sampled_alone()
        self._positions = mx.take(inputs.positions, int32(rows), axis=-1)
        self._beside: _Beside = {}
        self._count = 0

    def next(self, tokens: mx.array) -> ForwardContext:
        """Return the rows of the next guess, one after each sampled row and the guesses so far.

        Args:
            tokens: `[R]` int32, the tokens of these rows.
        """
        self._count += 1
        return _RowsAhead(
            self._sequences,
            self._attention,
            tokens=tokens,
            positions=self._positions + self._count,
            ahead=self._count,
            beside=self._beside,
        )
