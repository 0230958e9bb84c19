"""Mistral Small 3.1, its successors and LightOnOCR: pictures of any shape within a square of
pixels.

The pixels equal those of transformers' `PixtralImageProcessorPil`, but stay uint8: the model scales
them.
"""

from __future__ import annotations

import math
from typing import Self

import PIL.Image

from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import (
    Placeholders,
    WholeImageProcessor,
    check_pixels,
    open_by_model,
)
from quire.media.processors.qwen import LOW_DETAIL, check_stretch, patches, resized
from quire.media.processors.tiles import check_room, side_of
from quire.media.source import Detail


class PixtralImageProcessor(WholeImageProcessor):
    """The image processor of Mistral Small 3.1 and its successors.

    Args:
        patch: pixels on a patch's side.
        merge: patches on the side of a square, which becomes one row.
        longest: the most pixels of a side, before it is rounded up to whole squares.
    """

    _ends = 1
    """Rows added at the end of each line."""
    _usual_token = 10
    _usual_merge = 2

    def __init__(self, placeholders: Placeholders, *, patch: int, merge: int, longest: int) -> None:
        super().__init__(placeholders)
        self._patch = patch
        self._merge = merge
        self._longest = longest

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, CLIP_COLOURS)
        vision = config.nested("vision_config", needed=False)
        usual = None if settings.has("size") else 1024
        return cls(
            Placeholders(
                config.integer("image_token_index", "image_token_id", default=cls._usual_token)
            ),
            patch=side_of(vision, "patch_size", 16),
            merge=config.integer("spatial_merge_size", default=cls._usual_merge),
            longest=settings.nested("size", needed=False).integer("longest_edge", default=usual),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        check_stretch(picture, param)
        most = detail if isinstance(detail, int) else LOW_DETAIL if detail == "low" else math.inf
        cell, longest = self._patch * self._merge, self._longest
        down, across = self._squares(picture, longest)
        while down * (across + self._ends) > most and longest > cell:
            longest = max(cell, min(longest, max(down, across) * cell) - cell)
            down, across = self._squares(picture, longest)
        rows = down * (across + self._ends)
        check_room(param, detail, rows)
        pixels = resized(picture, down * cell, across * cell)[None]
        cut = patches(pixels, self._patch, self._merge)
        shape = down * self._merge, across * self._merge
        return MediaItem.of("image", cut.tobytes(), shape, tokens=rows, bidirectional=False)

    def _squares(self, picture: PIL.Image.Image, longest: int) -> tuple[int, int]:
        """Return the rows and columns of squares of a picture whose sides are limited to
        `longest`.
        """
        height, width = picture.height, picture.width
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        cell = self._patch * self._merge
        return max(1, (height - 1) // cell + 1), max(1, (width - 1) // cell + 1)


class Pixtral12BImageProcessor(PixtralImageProcessor):
    """The image processor of Pixtral 12B: each patch becomes one row."""

    _usual_merge = 1


class LightOnImageProcessor(PixtralImageProcessor):
    """The image processor of LightOnOCR: no row ends a line."""

    _ends = 0
    _usual_token = 151_655

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        vision = config.nested("vision_config", needed=False)
        merge = config.integer("spatial_merge_size", default=2)
        square = side_of(vision, "patch_size", 16) * merge
        # Here `patch_size` is the side of a square. A smaller one would cut squares apart.
        given = settings.value("patch_size", square)
        sides = set(given.values()) if isinstance(given, dict) else {given}
        if sides != {square}:
            raise settings.error("patch_size", f"and a row is of {square} by {square} pixels")
        return super().open(settings, config)


open_pixtral = open_by_model(
    {
        "lighton_ocr": LightOnImageProcessor.open,
        "llava": Pixtral12BImageProcessor.open,
        "mistral3": PixtralImageProcessor.open,
    }
)
"""Opens the processor of a model whose settings name Pixtral's."""
