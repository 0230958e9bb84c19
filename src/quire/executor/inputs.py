"""Turns a plan into the flat arrays of one step, and into the model's view of the step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionUse, Scoring
from quire.attention.reference.cuts import in_preferred_order
from quire.attention.step import Attention
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.device.dtypes import int32, noting
from quire.executor.adapters import AdaptedRows, Adapters
from quire.executor.encoder_cache import EncoderCache
from quire.executor.following import Following
from quire.executor.recurrent_rows import RecurrentLayers, RecurrentRows, recurrent_rows, state_rows
from quire.models.base import CrossRows, ForwardContext
from quire.models.media_rows import MediaRows
from quire.scheduler.plan import Positions, ScheduledSequence, StepPlan
from quire.scheduler.positions import joined_positions


class FlatRows(RecurrentLayers, ForwardContext):
    """Rows as a model sees them.

    Attributes:
        sequences: in the order of the rows.
        attention: the attention of the rows.
        following: the rows' tokens and places, where these are on the device. Tables made on the
            host are then those of the rows' latest places.
        known_tokens: the rows' tokens; None if one of them is on the device.
        hidden: `[T, hidden]`, final states that a drafter reads; None for other rows.
        adapted: the rows with their LoRA adapters; None if no row has one.
        wanted, wanted_rows: `[R]` rows whose final hidden states are needed, on the device and on
            the host; None for all.
        narrowed: whether the model computed its last layers for these rows only.
    """

    following: Following | None = None
    known_tokens: array[int] | None = None
    hidden: mx.array | None = None
    adapted: AdaptedRows | None = None
    wanted: mx.array | None = None
    wanted_rows: list[int] | None = None
    narrowed = False

    def __init__(
        self,
        sequences: list[ScheduledSequence],
        attention: Attention,
        media: MediaRows | None = None,
        cross: CrossRows | None = None,
    ) -> None:
        super().__init__(media=media, cross=cross)
        self.sequences = sequences
        self._attention = attention
        self.attention = attention.step(sequences)
        self._starts = [0, *accumulate([each.count for each in sequences])]
        self._total = self._starts.pop()
        self._states: RecurrentRows | None = None

    # -- what models call ----------------------------------------------------------------------

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
        return self.attention.attend(
            layer, q, k, v=v, scoring=Scoring(scale, softcap, sinks), chosen_by=chosen_by
        )

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        self.attention.choose(layer, q, k, weights=weights, limit=limit)

    @property
    def recurrent(self) -> RecurrentRows:
        if self._states is None:
            self._states = recurrent_rows(self.sequences, self._starts, self._attention)
        return self._states

    def state_rows(self, group: int) -> mx.array:
        """Return which rows advance which states of a group; see `recurrent_rows.state_rows`."""
        return mx.array(state_rows(group, self.sequences, self._starts))

    def sampled_rows_only(self) -> tuple[ForwardContext, mx.array] | None:
        return None


class SomeRows(FlatRows):
    """Some rows of a step, or all of them as a drafter sees them."""

    def __init__(
        self,
        sequences: list[ScheduledSequence],
        attention: Attention,
        tokens: mx.array,
        positions: mx.array,
        hidden: mx.array | None = None,
    ) -> None:
        super().__init__(sequences, attention)
        self.tokens, self.positions, self.hidden = tokens, positions, hidden


class StepUses(NamedTuple):
    """The attention and the states that the layers of a model use in a step.

    Attributes:
        attention: the kinds of attention.
        states: a layer of each group of recurrent layers.
    """

    attention: tuple[AttentionUse, ...]
    states: tuple[int, ...]


class StepInputs(FlatRows):
    """All rows of one step.

    Attributes:
        ending: sequences of the wanted rows, in order.
        ending_rows: `ScheduledSequence.wanted` of each of these.

    Args:
        sampled: maps a sequence's number to the row of `previous` with its last token, which the
            host has not read.
        previous: `[R]` tokens sampled by the previous step.
        encoded: rows of the sequences' media; None if they have none.
        adapters: the adapters that sequences name; None if they name none.
        follow: makes `following` of the sequences in the order of their rows; None if no row
            follows drafts or guesses that the host has not read.
    """

    def __init__(
        self,
        plan: StepPlan,
        attention: Attention,
        sampled: Mapping[int, int],
        previous: mx.array | None,
        encoded: EncoderCache | None = None,
        adapters: Adapters | None = None,
        follow: Callable[[list[ScheduledSequence]], Following] | None = None,
    ) -> None:
        size = attention.pools.block_size
        sequences = _in_row_order(plan.sequences, size)
        super().__init__(
            sequences,
            attention,
            media=None if encoded is None else encoded.rows(sequences),
            cross=None if encoded is None else _cross_rows(sequences, encoded, size),
        )
        self._sampled, self._previous = sampled, previous
        self.following = None if follow is None else follow(sequences)
        self.known_tokens = _known_tokens(sequences)
        wanted = [each.wanted for each in self.sequences]
        self.ending = [each for each, rows in zip(self.sequences, wanted, strict=True) if rows]
        self.ending_rows = list(filter(None, wanted))
        if sum(wanted) < self._total:
            firsts = [*self._starts[1:], self._total]
            ends = zip(firsts, wanted, strict=True)
            self.wanted_rows = [row for end, rows in ends for row in range(end - rows, end)]
            self.wanted = int32(self.wanted_rows)
        if adapters is not None:
            self.adapted = adapters.rows(sequences, self.wanted_rows)

    @cached_property
    def tokens(self) -> mx.array:  # type: ignore[override]  # a field of the base, made when read
        if self.following is not None:
            return self.following.tokens()
        if self.known_tokens is not None:
            return int32(np.frombuffer(self.known_tokens, np.int32))
        assert self._previous is not None, "no step samples the tokens on the device"
        return _gather_tokens(self.sequences, self._sampled, self._previous)

    @cached_property
    def positions(self) -> mx.array:  # type: ignore[override]  # as `tokens`
        latest = mx.array(joined_positions([each.positions for each in self.sequences]))
        if self.following is None:
            return latest
        return self.following.moved(latest, range(len(latest)))

    @property
    def alike(self) -> KVFormat | None:
        """The format of rows whose step has one graph for all arrays of equal shapes; None if the
        graph also depends on other things.

        Each sequence has one row and goes on from earlier ones, and all rows have one format, and
        no media, adapter, or indexer.
        """
        rows = self.sequences
        first = rows[0].format
        plain = self.media is None and self.cross is None and self.adapted is None
        alone = self.wanted is None and all(each.count == 1 and each.start for each in rows)
        one = all(each.format is first or each.format == first for each in rows)
        return (
            first if plain and alone and one and not self._attention.layout.has_indexers else None
        )

    @property
    def uses(self) -> StepUses:
        """The attention and states that the layers computed so far have used."""
        layers = () if self._states is None else self._states.layers
        group = self._attention.layout.group
        return StepUses(self.attention.uses, tuple({group[each]: each for each in layers}.values()))

    def rehearse(self, uses: StepUses) -> list[list[mx.array]]:
        """Make the arrays that such layers read from the host, apart for each use."""
        made: list[list[mx.array]] = []
        for use in uses.attention:
            with noting() as arrays:
                self.attention.rehearse(use)
            made.append(arrays)
        for layer in uses.states:
            with noting() as arrays:
                self.recurrent.rehearse(layer)
            made.append(arrays)
        return made

    def sampled_rows_only(self) -> tuple[SomeRows, mx.array] | None:
        if self.wanted is None or any(each.pooled > 1 for each in self.ending):
            return None
        if not self.ending:
            return None
        self.narrowed = True
        return self._one_by_one(self.ending, self.wanted), self.wanted

    def looking_ahead(self, hidden: mx.array, following: mx.array) -> SomeRows:
        """Return all rows as a head sees them; see `LanguageModel.look_ahead`."""
        own = self.sequences, self._attention
        rows = SomeRows(*own, tokens=following, positions=self.positions, hidden=hidden)
        rows.attention = self.attention  # which has made the tables of the rows
        rows.following = self.following and self.following.places_of(self.sequences)
        return rows

    def sampled_only(self, rows: Sequence[int]) -> SomeRows:
        """Return a step of the sampled rows, whose indices are `rows`."""
        return self._one_by_one([each for each in self.ending if each.sampled], int32(rows))

    def sampled_alone(self) -> tuple[list[ScheduledSequence], Attention]:
        """Return the sampled rows, each as if it were alone, and their attention."""
        return _one_row_each(each for each in self.ending if each.sampled), self._attention

    def halves(self) -> tuple[ForwardContext, ForwardContext] | None:
        """Return the step as two of about as many rows; None if there is one sequence, media, or
        an adapter.
        """
        if len(self.sequences) < 2 or self.media is not None or self.cross is not None:
            return None
        if self.adapted is not None:
            return None
        cut = min(range(1, len(self._starts)), key=lambda n: abs(2 * self._starts[n] - self._total))
        row = self._starts[cut]
        first = self._of_rows(self.sequences[:cut], slice(0, row))
        return first, self._of_rows(self.sequences[cut:], slice(row, self._total))

    def _of_rows(self, sequences: list[ScheduledSequence], rows: slice) -> FlatRows:
        tokens, positions = self.tokens[rows], self.positions[..., rows]
        return SomeRows(sequences, self._attention, tokens=tokens, positions=positions)

    def _one_by_one(self, sequences: list[ScheduledSequence], index: mx.array) -> SomeRows:
        """Return a step of the wanted rows of some sequences, each as if it were alone."""
        ends, positions = _one_row_each(sequences), mx.take(self.positions, index, axis=-1)
        rows = SomeRows(ends, self._attention, tokens=self.tokens[index], positions=positions)
        rows.following = self.following and self.following.places_of(ends)
        return rows

    def known_next(self) -> dict[int, int]:
        """Return the token after each chunk that samples nothing, by the chunk's last row."""
        pairs = zip(self.last_rows(), self.sequences, strict=True)
        return {row: each.next_token for row, each in pairs if each.next_token is not None}

    def last_rows(self) -> list[int]:
        """Return the index of each sequence's last row."""
        return [end - 1 for end in (*self._starts[1:], self._total)]


def _one_row_each(sequences: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return the wanted rows of sequences, each as if it were alone."""
    return [
        each._replace(start=row, count=1, positions=_of_row(each.positions, row - each.start))
        for each in sequences
        for row in range(each.end - each.wanted, each.end)
    ]


def _of_row(positions: Positions, row: int) -> Positions:
    """Return the positions of one of the rows."""
    if isinstance(positions, range):
        return positions[row : row + 1]
    return positions[:, row : row + 1]


def _known_tokens(sequences: Sequence[ScheduledSequence]) -> array[int] | None:
    """Return the rows' tokens; None if the previous step samples some of them."""
    known = array("i")
    for each in sequences:
        if len(each.tokens) < each.count:
            return None
        known += each.tokens
    return known


def _gather_tokens(
    sequences: Sequence[ScheduledSequence], sampled: Mapping[int, int], previous: mx.array
) -> mx.array:
    """Return the rows' tokens, some of which the previous step samples."""
    known: list[int] = []
    places: list[int] = []
    for each in sequences:
        known += each.tokens
        places += [-1] * len(each.tokens)
        if len(each.tokens) < each.count:
            known.append(0)
            places.append(sampled[each.number])
    if places == list(range(previous.shape[0])):
        return previous
    return current_device().operations.mixed_tokens(previous, known=known, places=places)


def _cross_rows(
    sequences: Sequence[ScheduledSequence], encoded: EncoderCache, block_size: int
) -> CrossRows | None:
    """Return the media that rows attend to in cross-attention layers; None if none does."""
    if not [each for each in sequences if each.crossed]:
        return None
    attending = np.zeros(sum(each.count for each in sequences), bool)
    first = 0
    for each in sequences:
        for crossed in each.crossed:
            shift = first - each.start
            attending[crossed.rows.start + shift : crossed.rows.stop + shift] = True
        first += each.count
    states = encoded.cross_states(sequences, block_size)
    return CrossRows(None if attending.all() else mx.array(attending[:, None]), states)


def _in_row_order(sequences: Iterable[ScheduledSequence], size: int) -> list[ScheduledSequence]:
    """Sort sequences by format, then in the order that suits attention. Depends on the plan
    alone.
    """
    by_format: dict[KVFormat, list[ScheduledSequence]] = {}
    own: list[ScheduledSequence] = []
    last: KVFormat | None = None
    for each in sequences:
        if each.format is not last:  # its hash takes a while
            last = each.format
            own = by_format.setdefault(last, [])
        own.append(each)
    return [each for own in by_format.values() for each in in_preferred_order(own, size)]
