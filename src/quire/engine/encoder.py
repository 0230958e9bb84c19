"""Images become rows of embeddings, once each; whoever brings the same image again reuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from quire.core.errors import RequestError
from quire.core.kept import Kept
from quire.core.request import Image, PlacedImage, Request
from quire.models.base import MediaRows, VisionEncoder
from quire.scheduler.plan import ScheduledSequence

_KEPT_BYTES = 64 << 20
"""Soft tokens that are kept for requests to come: some 45 images of Gemma 4 26B."""


class ImageEncoder:
    """Makes the soft tokens of a step's images. Owned by the runner's thread.

    Args:
        vision: the model's encoder; None in a model that takes text only.
    """

    def __init__(self, vision: VisionEncoder | None) -> None:
        self._vision = vision
        self._images: WeakValueDictionary[bytes, Image] = WeakValueDictionary()
        self._kept: Kept[bytes, mx.array] = Kept(_KEPT_BYTES, lambda soft: soft.nbytes)

    def check(self, request: Request) -> None:
        """Whether the images of a request are such as this model's encoder takes.

        Raises:
            RequestError: they are not; nothing was computed.
        """
        end = 0
        for placed in request.images:
            image = placed.image
            if self._vision is None:
                raise RequestError("images: the model takes text only", param="images")
            size = image.rows * image.columns * self._vision.patch_values
            expected = self._vision.soft_tokens(image.rows, image.columns)
            if len(image.pixels) != size or image.tokens != expected:
                raise RequestError(
                    f"images: {image.rows} by {image.columns} patches hold {size} bytes and become "
                    f"{expected} tokens, not {len(image.pixels)} and {image.tokens}",
                    param="images",
                )
            if placed.start < end or placed.end > len(request.prompt):
                raise RequestError(
                    "images: their places overlap or leave the prompt", param="images"
                )
            end = placed.end

    def shared(self, request: Request) -> Request:
        """The request with images that others have too held once, as an agent's turns do."""
        if not request.images:
            return request
        images = (
            PlacedImage(placed.start, self._images.setdefault(placed.image.digest, placed.image))
            for placed in request.images
        )
        return replace(request, images=tuple(images))

    def rows(self, sequences: Sequence[ScheduledSequence]) -> MediaRows | None:
        """The rows of a step that stand for images; None if there are none.

        Args:
            sequences: of the whole step, in the order of its rows.
        """
        if self._vision is None:
            return None
        rows: list[np.ndarray] = []
        values: list[mx.array] = []
        first = 0
        for item in sequences:
            for placed in item.media:
                begin, end = max(placed.start, item.start), min(placed.end, item.end)
                rows.append(np.arange(begin, end, dtype=np.int32) + (first - item.start))
                soft = self._soft_tokens(placed.image)
                values.append(soft[begin - placed.start : end - placed.start])
            first += item.count
        if not rows:
            return None
        return MediaRows(mx.array(np.concatenate(rows)), mx.concatenate(values))

    def _soft_tokens(self, image: Image) -> mx.array:
        """`[tokens, hidden]`, computed with the step that asks first."""
        kept = self._kept.get(image.digest)
        if kept is not None:
            return kept
        assert self._vision is not None, "a request with images was let in"
        shape = (image.rows * image.columns, self._vision.patch_values)
        patches = np.frombuffer(image.pixels, dtype=np.uint8).reshape(shape)
        soft = self._vision(mx.array(patches), image.rows, image.columns)
        return self._kept.put(image.digest, soft)

    def clear(self) -> None:
        """Forgets all: after a step that failed, what it should have computed never was."""
        self._kept.clear()
