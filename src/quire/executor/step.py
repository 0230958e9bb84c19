"""A step as an executor holds it: built once, frozen, and read when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from quire.core.media import MediaKey
from quire.core.request import TokenLogprobs
from quire.device.host_copy import HostCopy
from quire.executor.following import Kept
from quire.executor.guessing import FinalStates
from quire.sampling.rows import Moved, RowSampling, Sampled
from quire.scheduler.plan import SampledTokens, ScheduledSequence, StepPlan, StepResult


class SampledRow(NamedTuple):
    """A row of logits: its request, and the position of the token sampled from it."""

    id: str
    position: int


class Unsampled(NamedTuple):
    """Logits `[R, vocab]` that tokens are sampled from, and the parameters of each row.

    Attributes:
        states: for a head that drafts.
        moved: see `sample`.
    """

    logits: mx.array
    rows: Sequence[RowSampling]
    states: FinalStates
    moved: Moved | None = None


class Drawn(NamedTuple):
    """Tokens sampled on the device.

    Attributes:
        tokens: int32 `[R]`.
        sampled: their log-probabilities, if any are wanted.
        guesses: the draft head's tokens after each sequence's last kept one, int32 `[N, count]`,
            if any are wanted.
        kept: see `FinalStates.last_kept`; None if no head is open, too.
    """

    tokens: HostCopy
    sampled: Sampled
    guesses: HostCopy | None = None
    kept: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that there are."""
        own = self.sampled
        guesses = None if self.guesses is None else self.guesses.array
        parts = self.tokens.array, own.logprobs, own.top_ids, own.top_logprobs, guesses, self.kept
        return tuple(part for part in parts if part is not None)


_NONE: Mapping[int, Any] = MappingProxyType({})


class StepRows(NamedTuple):
    """The outputs that a step computes for its sequences.

    Tuples like this one are made in a fraction of the time that frozen dataclasses take.

    Attributes:
        sampling: the sequences that sampled rows belong to, in order.
        row_of: the first sampled row of each of them, by sequence number.
        unsampled: logits that wait for masks; None if none do.
        drawn: sampled tokens; None while `unsampled` waits, and if nothing is sampled.
        vectors: results of vector tasks, by sequence number.
        others: further arrays to compute.
        graphed: whether the layers run as a CUDA graph, whose writes to the pools MLX does not see.
        in_place, recorded: see `Computed`.
        early: whether the step is launched behind the running one, before that is done.
    """

    sampling: tuple[ScheduledSequence, ...] = ()
    row_of: Mapping[int, int] = _NONE
    unsampled: Unsampled | None = None
    drawn: Drawn | None = None
    vectors: Mapping[int, mx.array] = _NONE
    others: tuple[mx.array, ...] = ()
    graphed: bool = False
    in_place: bool = False
    early: bool = False
    recorded: bool = False

    @property
    def tokens(self) -> mx.array | None:
        """Sampled tokens `[R]` on the device."""
        return None if self.drawn is None else self.drawn.tokens.array

    @property
    def kept(self) -> Kept:
        """How far the sequences get, for rows that follow."""
        assert self.drawn is not None, "rows follow sampled tokens"
        drawn, sampling = self.drawn, self.sampling
        return Kept(
            drawn.tokens,
            drawn.guesses,
            drawn.kept,
            lasts=[self.row_of[each.number] + each.sampled - 1 for each in sampling],
            places={each.number: place for place, each in enumerate(sampling)},
        )

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Arrays to compute. What the host reads first comes first."""
        first = () if self.drawn is None else self.drawn.arrays
        logits = () if self.unsampled is None else (self.unsampled.logits,)
        return (*first, *logits, *self.others, *self.vectors.values())


class LaunchedStep(NamedTuple):
    """A step whose arrays are built and which may be running.

    Attributes:
        features: bytes of the media features that it completes, by item.
        to_eval: all arrays that the step has to compute.
    """

    plan: StepPlan
    rows: StepRows
    features: Mapping[MediaKey, int]
    to_eval: tuple[mx.array, ...]

    def with_tokens(self, drawn: Drawn, written: Iterable[mx.array]) -> LaunchedStep:
        """Return the step with the tokens that waited for masks.

        Args:
            written: arrays that were written after sampling.
        """
        rows = self.rows._replace(unsampled=None, drawn=drawn)
        return self._replace(rows=rows, to_eval=(*drawn.arrays, *written, *self.to_eval))

    def wait(self, *, overtaken: bool) -> None:
        """Wait until the step is done.

        Args:
            overtaken: whether the next step is launched already, and is not to be waited for.
        """
        if overtaken:
            mx.eval(self.to_eval)
        elif self.rows.graphed:
            if (drawn := self.rows.drawn) is not None:
                drawn.tokens.read()  # of all that a graph computes, this arrives first
            mx.eval(self.to_eval)
        else:
            mx.synchronize()

    @property
    def done(self) -> bool:
        """Whether nothing of it is to be computed any more."""
        return not self.to_eval

    def without_arrays(self) -> LaunchedStep:
        """Return the step, which is done, without references to arrays of the pools."""
        return self._replace(to_eval=())

    def read(self, seconds: float) -> StepResult:
        """Return the results of the step, which is done, on the host.

        Args:
            seconds: how long it ran.
        """
        rows = self.rows
        vectors = {
            number: tuple(np.array(vector, dtype=np.float32).tolist())
            for number, vector in rows.vectors.items()
        }
        tokens = {} if rows.drawn is None else _tokens(rows, rows.drawn)
        guesses = _guesses(rows)
        return StepResult(
            tokens,
            vectors,
            self.features,
            guesses=guesses,
            seconds=seconds,
            graphed=rows.graphed,
            recorded=rows.recorded,
        )


def sampled_rows(each: ScheduledSequence) -> list[SampledRow]:
    """Return the sampled rows of a sequence."""
    return [
        SampledRow(each.id, position)
        for position in range(each.end - each.sampled + 1, each.end + 1)
    ]


def _tokens(rows: StepRows, drawn: Drawn) -> dict[int, SampledTokens]:
    """Return the sampled tokens, by sequence number."""
    sampled, tokens = drawn.sampled, drawn.tokens.read().tolist()
    chosen = None if sampled.logprobs is None else np.array(sampled.logprobs)
    ids = None if sampled.top_ids is None else np.array(sampled.top_ids)
    values = None if sampled.top_logprobs is None else np.array(sampled.top_logprobs)
    result = {}
    for each in rows.sampling:
        first = rows.row_of[each.number]
        stop = first + len(each.sampling)
        own = tuple(tokens[first:stop])
        count = each.sampling[0].params.logprobs
        if count is None:
            result[each.number] = SampledTokens(own)
            continue
        logprobs: list[TokenLogprobs] = []
        for row in range(first, stop):
            assert chosen is not None, "a row wants logprobs, and none were computed"
            top: tuple[tuple[int, float], ...] = ()
            if ids is not None and values is not None:
                pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
                top = tuple(pairs)
            logprobs.append(TokenLogprobs(tokens[row], float(chosen[row]), top))
        result[each.number] = SampledTokens(own, tuple(logprobs))
    return result


def _guesses(rows: StepRows) -> dict[int, tuple[int, ...]]:
    """Return the draft head's tokens after each sequence's last kept one, by sequence number."""
    if rows.drawn is None or rows.drawn.guesses is None:
        return {}
    guesses = rows.drawn.guesses.read().tolist()
    pairs = zip(rows.sampling, guesses, strict=True)
    return {each.number: tuple(guessed) for each, guessed in pairs}
