"""The media of requests: checked against the model's encoders before the engine takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakValueDictionary

from quire.core.errors import RequestError
from quire.core.media import MediaItem, MediaKey, Pieces, PlacedMedia
from quire.core.request import Request
from quire.device.device import current_device
from quire.models.base import MediaEncoder

_MOST_TOGETHER, _ROWS_TOGETHER = 4, 10_000
"""Most items, and hidden states of a piece, that one call encodes; bounds its memory."""


class RequestMedia:
    """The media items of an engine's requests.

    Args:
        encoders: the model's encoders, by kind; empty for a text model.
    """

    def __init__(self, encoders: Mapping[str, MediaEncoder]) -> None:
        self._encoders = encoders
        self._items: WeakValueDictionary[MediaKey, MediaItem] = WeakValueDictionary()

    def check(self, request: Request) -> None:
        """Raise `RequestError` if this model's encoders do not take a request's media."""
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
                raise RequestError(
                    "media: placeholder ranges overlap or exceed the prompt", param="media"
                )
            end = placed.end

    def named(self, request: Request) -> Request:
        """Return the request with its items' features left out; their keys name them."""
        if not request.media:
            return request
        media = (PlacedMedia(each.start, self._named(each.item)) for each in request.media)
        return replace(request, media=tuple(media))

    def _named(self, item: MediaItem) -> MediaItem:
        """Return the shared object for equal items, without features."""
        return self._items.setdefault(item.key, replace(item, features=b""))

    def pieces(self, request: Request) -> dict[MediaKey, Pieces]:
        """Return how the encoding of each of a request's items is cut into pieces."""
        return {placed.item.key: self._pieces(placed.item) for placed in request.media}

    def _pieces(self, item: MediaItem) -> Pieces:
        encoder = self._encoders[item.kind]
        pieces = encoder.pieces(item.shape)
        # On a CPU a call costs little beside its work, and items one by one have equal bits.
        several = encoder.takes_several and current_device().fuses
        if not several:
            return pieces
        most = min(_MOST_TOGETHER, _ROWS_TOGETHER // max(1, pieces.rows))
        return replace(pieces, together=max(1, most))
