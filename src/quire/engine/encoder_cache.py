"""Media becomes rows of embeddings, once an item, for all requests that bring it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from quire.core.errors import RequestError
from quire.core.lru import LruCache
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import Request
from quire.models.base import MediaEncoder, MediaRows
from quire.scheduler.plan import ScheduledSequence

_KEPT_BYTES = 64 << 20
"""Rows that are kept for requests to come: some 45 images of Gemma 4 26B."""

Key = tuple[str, bytes]
"""An item's kind and digest."""
Encoded = tuple[mx.array, ...]
"""See `MediaEncoder.__call__`."""


class EncoderCache:
    """Makes the rows of a step's media. Owned by the runner's thread.

    Args:
        encoders: the model's, by kind; empty in a model that takes text only.
    """

    def __init__(self, encoders: Mapping[str, MediaEncoder]) -> None:
        self._encoders = encoders
        self._items: WeakValueDictionary[Key, MediaItem] = WeakValueDictionary()
        self._kept: LruCache[Key, Encoded] = LruCache(
            _KEPT_BYTES, lambda arrays: sum(each.nbytes for each in arrays)
        )

    def check(self, request: Request) -> None:
        """Whether the media of a request is such as this model's encoders take.

        Raises:
            RequestError: it is not; nothing was computed.
        """
        end = 0
        for placed in request.media:
            item = placed.item
            encoder = self._encoders.get(item.kind)
            if encoder is None:
                raise RequestError(f"media: the model takes no {item.kind}", param="media")
            size, rows = encoder.feature_bytes(item.shape), encoder.rows(item.shape)
            if len(item.features) != size or item.tokens != rows:
                raise RequestError(
                    f"media: {item.kind} of shape {item.shape} holds {size} bytes and becomes "
                    f"{rows} tokens, not {len(item.features)} and {item.tokens}",
                    param="media",
                )
            if placed.start < end or placed.end > len(request.prompt):
                raise RequestError("media: places overlap or leave the prompt", param="media")
            end = placed.end

    def shared(self, request: Request) -> Request:
        """The request with items that others have too held once, as an agent's turns do."""
        if not request.media:
            return request
        media = (
            PlacedMedia(each.start, self._items.setdefault(_key(each.item), each.item))
            for each in request.media
        )
        return replace(request, media=tuple(media))

    def rows(self, sequences: Sequence[ScheduledSequence]) -> MediaRows | None:
        """The rows of a step that stand for media; None if there are none.

        Args:
            sequences: of the whole step, in the order of its rows.
        """
        found: list[tuple[np.ndarray, Encoded]] = []
        first = 0
        for item in sequences:
            for placed in item.media:
                if self._encoders[placed.item.kind].cross_keys(placed.item.shape):
                    continue
                begin, end = max(placed.start, item.start), min(placed.end, item.end)
                rows = np.arange(begin, end, dtype=np.int32) + (first - item.start)
                part = slice(begin - placed.start, end - placed.start)
                found.append((rows, tuple(array[part] for array in self._encoded(placed.item))))
            first += item.count
        return MediaRows.of(found) if found else None

    def looked_at(self, sequences: Sequence[ScheduledSequence], multiple: int) -> mx.array | None:
        """The rows of media whose keys and values a step computes, `[M, hidden]`; None if none.

        Args:
            sequences: as above.
            multiple: what each `LookedAt` is brought to a multiple of, by its last row again.
        """
        parts: list[mx.array] = []
        for each in (crossed for sequence in sequences for crossed in sequence.crossed):
            if not each.writes:
                continue
            rows = mx.concatenate([self._encoded(item)[0] for item in each.look.items])
            more = -len(rows) % multiple
            parts += [rows, mx.broadcast_to(rows[-1:], (more, rows.shape[1]))] if more else [rows]
        return mx.concatenate(parts) if parts else None

    def _encoded(self, item: MediaItem) -> Encoded:
        """Computed with the step that asks first."""
        key = _key(item)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        features = mx.array(np.frombuffer(item.features, dtype=np.uint8))
        return self._kept.put(key, self._encoders[item.kind](features, item.shape))

    def clear(self) -> None:
        """Forgets all: after a step that failed, what it should have computed never was."""
        self._kept.clear()


def _key(item: MediaItem) -> Key:
    return item.kind, item.digest
