"""The last stage of tasks that return a vector: from final hidden states to numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import mlx.core as mx

from quire.core.request import Embed, Generate, Score
from quire.models.base import LanguageModel
from quire.scheduler.plan import ScheduledSequence


class VectorStage:
    """Computes the vectors of sequences that do not generate.

    Keeps, of each prompt whose every token counts, the sum over the chunks that were read so far.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._sums: dict[int, mx.array] = {}

    def vector(self, rows: ScheduledSequence, hidden: mx.array) -> mx.array | None:
        """Return the result, float32 `[n]`; None before the sequence's last rows.

        Args:
            hidden: `[rows.pooled, hidden]`, final and normalised.
        """
        match rows.task:
            case Embed() as task:
                return self._embed(task, rows, hidden)
            case Score() as task:
                logits = self._model.logits(hidden[-1:]).squeeze(0)
                return logits[mx.array(task.labels)] - mx.logsumexp(logits)
            case Generate():
                raise AssertionError("tokens are sampled")
            case _ as unknown:
                assert_never(unknown)

    def _embed(self, task: Embed, rows: ScheduledSequence, hidden: mx.array) -> mx.array | None:
        vector = hidden.astype(mx.float32)
        if not task.needs_every_row:
            vector = vector.sum(axis=0)
        else:
            # Row after row: the sum's bits do not depend on where the prompt was cut into chunks.
            if rows.start:
                vector = mx.concatenate([self._sums.pop(rows.number)[None], vector])
            vector = mx.cumsum(vector, axis=0)[-1]
            if not rows.completes:
                self._sums[rows.number] = vector
                return None
            vector = vector / rows.end
        if task.normalized:
            vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
        return vector

    @property
    def sums(self) -> list[mx.array]:
        """Arrays to compute with the step, beside the vectors."""
        return list(self._sums.values())

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget ended sequences, also before their last rows."""
        for number in numbers:
            self._sums.pop(number, None)

    def clear(self) -> None:
        """Forget everything, after a failed step."""
        self._sums.clear()
