"""Encodes each media item once, for all requests that contain it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.core.media import MediaItem, MediaKey
from quire.models.base import Encoding, MediaEncoder, finished
from quire.models.media_rows import MediaRows
from quire.scheduler.plan import EncoderWork, ScheduledSequence

Encoded = tuple[mx.array, ...]
"""The result of `MediaEncoder.__call__`: one array of rows per level."""


class _Started(NamedTuple):
    """Items whose encoding has begun, in the order of their rows, and its state."""

    items: tuple[MediaKey, ...]
    encoding: Encoding


class EncoderCache:
    """Encoded rows of media, computed and dropped as plans say. Owned by the executor.

    Args:
        encoders: the model's encoders, by kind; empty for a text model.
        features: returns an item's features, the encoder's input, by its key.
        encode: begins to encode items of one kind and shape from the features of all; None leaves
            this to the encoders.
    """

    def __init__(
        self,
        encoders: Mapping[str, MediaEncoder],
        features: Callable[[MediaKey], bytes],
        encode: Callable[[Sequence[MediaItem], mx.array], Encoding] | None = None,
    ) -> None:
        self._encoders, self._given = encoders, features
        self._begin = self._by_encoder if encode is None else encode
        self._made: dict[MediaKey, Encoded] = {}
        self._started: dict[MediaKey, _Started] = {}

    def rows(self, sequences: Sequence[ScheduledSequence]) -> MediaRows | None:
        """Return the rows of a step that are media; None if there are none.

        Args:
            sequences: all sequences of the step, in the order of its rows.
        """
        found: list[tuple[np.ndarray, Encoded]] = []
        first = 0
        for item in sequences:
            for placed in item.media:
                if self._encoders[placed.item.kind].cross_keys(placed.item.shape):
                    continue
                start, end = max(placed.start, item.start), min(placed.end, item.end)
                rows = np.arange(start, end, dtype=np.int32) + (first - item.start)
                part = slice(start - placed.start, end - placed.start)
                found.append((rows, tuple(array[part] for array in self._features(placed.item))))
            first += item.count
        return MediaRows.of(found, first) if found else None

    def cross_states(
        self, sequences: Sequence[ScheduledSequence], multiple: int
    ) -> mx.array | None:
        """Return the media rows whose keys and values a step computes, `[M, hidden]`; None if none.

        Args:
            sequences: all sequences of the step, in the order of its rows.
            multiple: each `CrossMedia` is padded to a multiple of this by repeating its last row.
        """
        parts: list[mx.array] = []
        for each in (crossed for sequence in sequences for crossed in sequence.crossed):
            if not each.writes:
                continue
            rows = mx.concatenate([self._features(item)[0] for item in each.media.items])
            more = -len(rows) % multiple
            parts += [rows, mx.broadcast_to(rows[-1:], (more, rows.shape[1]))] if more else [rows]
        return mx.concatenate(parts) if parts else None

    # -- encoding ------------------------------------------------------------------------------

    def forget(self, keys: Iterable[MediaKey]) -> None:
        """Forget features, complete or not."""
        for key in keys:
            self._made.pop(key, None)
            self._started.pop(key, None)

    def advance(self, work: Iterable[EncoderWork]) -> list[mx.array]:
        """Build the graph of pieces; the caller evaluates it in the same step."""
        groups: dict[int, list[EncoderWork]] = {}
        for each in work:
            groups.setdefault(each.group, []).append(each)
        return [array for group in groups.values() for array in self._advance(group)]

    def _advance(self, group: Sequence[EncoderWork]) -> Encoded:
        """Build the graph of pieces of items that one call encodes; return its last arrays."""
        keys, some = [each.item.key for each in group], group[0]
        if some.first == 0:
            started = _Started(tuple(keys), self._encode([each.item for each in group]))
            self._started |= dict.fromkeys(keys, started)
        items, encoding = self._started[keys[0]]
        state: Encoded = ()
        for _ in range(some.count - some.completes):
            state = next(encoding)
        if some.completes:
            state = finished(encoding, pieces=1)
            parts = zip(*(mx.split(level, len(items)) for level in state), strict=True)
            made = dict(zip(items, parts, strict=True)) if len(items) > 1 else {items[0]: state}
            for key in keys:
                self._made[key] = made[key]
                del self._started[key]
        return state

    def sizes(self, work: Iterable[EncoderWork]) -> dict[MediaKey, int]:
        """Return the bytes of the features that these pieces complete."""
        keys = [each.item.key for each in work if each.completes]
        return {key: sum(a.nbytes for a in self._made[key]) for key in keys if key in self._made}

    def _encode(self, items: Sequence[MediaItem]) -> Encoding:
        """Begin to encode items of one kind and shape."""
        features = b"".join(self._given(each.key) for each in items)
        return self._begin(items, mx.array(np.frombuffer(features, dtype=np.uint8)))

    def _by_encoder(self, items: Sequence[MediaItem], features: mx.array) -> Encoding:
        some = items[0]
        return self._encoders[some.kind].encode(features, some.shape)

    def _features(self, item: MediaItem) -> Encoded:
        """Return an item's cached features, or compute them uncached.

        They are uncached if cross-attention keys were evicted after a step that needs them was
        planned.
        """
        made = self._made.get(item.key)
        return finished(self._encode([item])) if made is None else made

    def clear(self) -> None:
        """Drop everything, after a failed step."""
        self._made.clear()
        self._started.clear()
