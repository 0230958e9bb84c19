"""Llama 4: a picture on the canvas of tiles that fits it best, and one more tile with all of it.

Each tile is an item, since tiles do not see each other and separators stand between them. Pixels
stay uint8: the model scales them, in its own precision. Transformers' `Llama4ImageProcessor` scales
them in bfloat16.
"""

from __future__ import annotations

from typing import Self

import PIL.Image

from quire.core.media import EVEN_COLOURS
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import BILINEAR, ImageProcessor, Placeholders, check_pixels
from quire.media.processors.llama import fitted, tiles_for
from quire.media.processors.tiles import Tiles, check_room, side_of
from quire.media.source import Detail

_WHOLE = "<|image|>"
_BEGIN, _END = "<|image_start|>", "<|image_end|>"
_TILE_END, _LINE_END = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4ImageProcessor(ImageProcessor):
    """The image processor of Llama 4.

    Args:
        rows: rows of a tile.
        maximum: the most tiles of a picture, not counting the one with all of it.
    """

    def __init__(self, placeholders: Placeholders, tiles: Tiles, rows: int, maximum: int) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._rows = rows
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, EVEN_COLOURS, BILINEAR)
        settings.neutral({"resize_to_max_canvas": False})
        vision = config.nested("vision_config", needed=False)
        size, patch = side_of(vision, "image_size", 448), side_of(vision, "patch_size", 14)
        tiles = Tiles(size, patch, PIL.Image.Resampling.BILINEAR, colours=EVEN_COLOURS)
        tiles.check(settings, "size")
        square = round(1 / vision.positive("pixel_shuffle_ratio", default=0.5))
        token = config.integer("image_token_id", "image_token_index", default=200_092, minimum=0)
        maximum = settings.integer("max_patches", default=16)
        rows = (tiles.patches // square) ** 2
        return cls(Placeholders(token, mark=_WHOLE), tiles, rows, maximum=maximum)

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        check_room(param, detail, self._rows)
        size, side = (picture.height, picture.width), self._tiles.size
        down, across = tiles_for(size, side, self._most(detail))
        high, wide = fitted(size, (down * side, across * side), side)
        canvas = PIL.Image.new("RGB", (across * side, down * side))  # black behind the picture
        canvas.paste(self._tiles.resized(picture, wide, high))
        if down * across == 1:
            return (self._part(canvas, before=_BEGIN + _WHOLE, after=_END),)
        parts = [
            self._part(
                tile,
                before="" if number else _BEGIN,
                after=_TILE_END if (number + 1) % across else _LINE_END,
            )
            for number, tile in enumerate(self._tiles.grid(canvas))
        ]
        whole = self._part(self._tiles.squeezed(picture), before=_WHOLE, after=_END)
        return (*parts, whole)

    def _part(self, tile: PIL.Image.Image, before: str, after: str) -> MediaPart:
        return MediaPart(self._tiles.item("image", [tile], self._rows), before, after)

    def _most(self, detail: Detail) -> int:
        """Return the most tiles that `detail` allows besides the one with the whole picture."""
        if detail == "low":
            return 1
        if isinstance(detail, int):
            return max(1, min(self._maximum, detail // self._rows - 1))
        return self._maximum
