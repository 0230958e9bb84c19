"""The last stage of tasks that return a vector: from final hidden states to numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import mlx.core as mx

from quire.core.request import Classify, Embed, Generate, Score, ScorePrompt
from quire.models.base import LanguageModel
from quire.sampling.top import top
from quire.scheduler.plan import ScheduledSequence

_SCORED_TOGETHER = 128
"""Rows whose logits over the whole vocabulary are held at once."""


class VectorStage:
    """Computes the vectors of sequences that do not generate.

    For tasks that need every token, it keeps each prompt's sum over the chunks so far, or its
    tokens' scores.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._sums: dict[int, mx.array] = {}

    def vector(self, rows: ScheduledSequence, hidden: mx.array) -> mx.array | None:
        """Return the result, float32 `[n]`; None before the sequence's last rows.

        Args:
            hidden: final normalised hidden states, `[rows.pooled, hidden]`.
        """
        hidden = self._model.final(hidden)
        match rows.task:
            case Embed() as task:
                return self._embed(task, rows, hidden)
            case Classify():
                return self._model.classify(hidden)
            case Score() as task:
                logits = self._model.logits(hidden[-1:]).squeeze(0)
                return logits[mx.array(task.labels)] - mx.logsumexp(logits)
            case ScorePrompt() as task:
                return self._score(task, rows, hidden)
            case Generate():
                raise AssertionError("tokens are sampled")
            case _ as unknown:
                assert_never(unknown)

    def _embed(self, task: Embed, rows: ScheduledSequence, hidden: mx.array) -> mx.array | None:
        vectors = hidden.astype(mx.float32)
        if task.needs_every_row and rows.start:
            vectors = mx.concatenate([self._sums.pop(rows.number)[None], vectors])
        match task.pooling:
            case "cls":
                vector = vectors[0]
            case "last":
                vector = vectors[-1]
            case "max":
                vector = vectors.max(axis=0)
            case "mean":
                # Row after row: the bits do not depend on where the prompt was cut into chunks.
                vector = mx.cumsum(vectors, axis=0)[-1]
        if not rows.completes:
            self._sums[rows.number] = vector
            return None
        if task.pooling == "mean":
            vector = vector / rows.end
        for layer in self._model.projections:
            vector = layer(vector)
        if task.normalized:
            vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
        return vector

    def _score(
        self, task: ScorePrompt, rows: ScheduledSequence, hidden: mx.array
    ) -> mx.array | None:
        """Score the prompt's tokens, each by the row of the previous token."""
        parts = [self._sums.pop(rows.number)] if rows.start else []
        end = min(rows.end, len(task.targets))  # the last row says what would follow the prompt
        for first in range(rows.start, end, _SCORED_TOGETHER):
            last = min(end, first + _SCORED_TOGETHER)
            logits = self._model.logits(hidden[first - rows.start : last - rows.start])
            parts.append(_scored(logits.astype(mx.float32), task.targets[first:last], task.top))
        scores = mx.concatenate(parts)
        if not rows.completes:
            self._sums[rows.number] = scores
            return None
        return scores.flatten()

    @property
    def sums(self) -> list[mx.array]:
        """Arrays to compute with the step, beside the vectors."""
        return list(self._sums.values())

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the state of ended sequences, also before their last rows."""
        for number in numbers:
            self._sums.pop(number, None)

    def clear(self) -> None:
        """Drop everything, after a failed step."""
        self._sums.clear()


def _scored(logits: mx.array, targets: tuple[int, ...], count: int) -> mx.array:
    """Return the rows of `ScorePrompt`'s vector, `[R, 2 + 2 * count]`, for logits `[R, vocab]`."""
    normal = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(normal, mx.array(targets)[:, None], axis=-1)
    rank = 1 + (normal > own).sum(axis=-1, keepdims=True)
    columns = [own, rank.astype(mx.float32)]
    if count:
        ids, values = top(normal, count)
        columns += [ids.astype(mx.float32), values]  # ids below 2 ** 24 are exact
    return mx.concatenate(columns, axis=-1)
