"""Mistral Small 3.1 and its heirs: pictures of any shape within a square of pixels.

The pixels equal those of transformers' `PixtralImageProcessorPil`, but stay uint8: the model scales
them.
"""

from __future__ import annotations

import math
from typing import Self

import PIL.Image

from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import Placeholders, WholeImageProcessor, check_pixels
from quire.media.processors.qwen import LOW_DETAIL, check_stretch, patches, resized
from quire.media.processors.tiles import check_room, side_of
from quire.media.source import Detail


class PixtralImageProcessor(WholeImageProcessor):
    """The image processor of Mistral Small 3.1 and its heirs.

    Args:
        patch: pixels on a patch's side.
        merge: patches on the side of a square, which becomes a row; one more ends each line.
        longest: pixels that no side exceeds, but for the rounding up to squares.
    """

    def __init__(self, placeholders: Placeholders, *, patch: int, merge: int, longest: int) -> None:
        super().__init__(placeholders)
        self._patch = patch
        self._merge = merge
        self._longest = longest

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """As `preprocessor_config.json` and `config.json` say.

        Raises:
            ModelError: a value asks for pixels other than this computes.
        """
        check_pixels(settings, CLIP_COLOURS)
        vision = config.nested("vision_config", needed=False)
        usual = None if settings.has("size") else 1024
        return cls(
            Placeholders(config.integer("image_token_index", "image_token_id", default=10)),
            patch=side_of(vision, "patch_size", 16),
            merge=config.integer("spatial_merge_size", default=2),
            longest=settings.nested("size", needed=False).integer("longest_edge", default=usual),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        check_stretch(picture, param)
        most = detail if isinstance(detail, int) else LOW_DETAIL if detail == "low" else math.inf
        cell, longest = self._patch * self._merge, self._longest
        down, across = self._squares(picture, longest)
        while down * (across + 1) > most and longest > cell:
            longest = max(cell, min(longest, max(down, across) * cell) - cell)
            down, across = self._squares(picture, longest)
        rows = down * (across + 1)
        check_room(param, detail, rows)
        pixels = resized(picture, down * cell, across * cell)[None]
        cut = patches(pixels, self._patch, self._merge)
        shape = down * self._merge, across * self._merge
        return MediaItem.of("image", cut.tobytes(), shape, rows, bidirectional=False)

    def _squares(self, picture: PIL.Image.Image, longest: int) -> tuple[int, int]:
        """Down and across, of a picture whose sides are that long at most."""
        height, width = picture.height, picture.width
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        cell = self._patch * self._merge
        return max(1, (height - 1) // cell + 1), max(1, (width - 1) // cell + 1)
