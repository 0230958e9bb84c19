"""Idefics 3 and SmolVLM: a picture is a grid of square tiles, and one more tile with all of it.

Each tile is an item, since tiles do not see each other and text stands between them. The pixels
equal those of transformers' `Idefics3ImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from typing import Self

import PIL.Image

from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import ImageProcessor, Placeholders, check_pixels
from quire.media.processors.tiles import FILTERS, Tiles, check_room, side_of
from quire.media.source import Detail

_LONGEST = 4096
"""The most pixels of the longer side, as in the published code."""
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"

Size = tuple[int, int]
"""Height and width in pixels."""


def stretched(picture: Size, longest: int) -> Size:
    """Return the size of a picture scaled to a longer side of `longest`; the other side is even."""
    height, width = picture
    ratio = width / height
    if width >= height:
        shorter = int(longest / ratio)
        return max(shorter + shorter % 2, 1), longest
    shorter = int(longest * ratio)
    return longest, max(shorter + shorter % 2, 1)


def in_tiles(picture: Size, tile: int) -> Size:
    """Return the rows and columns of tiles that a picture is stretched to."""
    height, width = picture
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


class IdeficsImageProcessor(ImageProcessor):
    """The image processor of Idefics 3 and SmolVLM.

    Args:
        rows: rows of a tile.
        longest: pixels to which the longer side of each picture is scaled.
        split: whether the scaled picture is cut into a grid of tiles; else it is one tile.
    """

    def __init__(
        self, placeholders: Placeholders, tiles: Tiles, rows: int, longest: int, split: bool
    ) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._rows = rows
        self._longest = longest
        self._split = split

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        number = settings.value("resample", 1)
        if number not in FILTERS:
            raise settings.error("resample", "not one of 1, 2 and 3")
        check_pixels(settings, EVEN_COLOURS, number)
        vision = config.nested("vision_config", needed=False)
        size, patch = side_of(vision, "image_size", 224), side_of(vision, "patch_size", 32)
        tiles = Tiles(size, patch, PIL.Image.Resampling(number), colours=EVEN_COLOURS)
        tiles.check(settings, "max_image_size")
        usual = None if settings.has("size") else 4 * 364
        longest = settings.nested("size", needed=False).integer("longest_edge", default=usual)
        if longest > _LONGEST:
            raise settings.error("size", f"and at most {_LONGEST} pixels are supported")
        side = tiles.patches // config.integer("scale_factor", default=2)
        token = config.integer("image_token_id", default=128_257, minimum=0)
        split = settings.flag("do_image_splitting", default=True)
        return cls(Placeholders(token), tiles, side**2, longest=longest, split=split)

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        check_room(param, detail, self._rows)
        tiles, size = self._tiles, (picture.height, picture.width)
        longest, (down, across) = self._grid(size, detail)
        height, width = stretched(size, longest)
        picture = tiles.resized(picture, width, height)
        if down * across == 1:
            return (MediaPart(self._item(tiles.squeezed(picture)), _AROUND + _WHOLE, _AROUND),)
        picture = tiles.resized(picture, across * tiles.size, down * tiles.size)
        parts: list[MediaPart] = []
        for number, tile in enumerate(tiles.grid(picture)):
            row, column = divmod(number, across)
            before = f"{_AROUND}<row_{row + 1}_col_{column + 1}>"
            parts.append(MediaPart(self._item(tile), before, "\n" if column + 1 == across else ""))
        whole = self._item(tiles.squeezed(picture))
        return (*parts, MediaPart(whole, f"\n{_AROUND}{_WHOLE}", _AROUND))

    def _item(self, tile: PIL.Image.Image) -> MediaItem:
        return self._tiles.item("image", [tile], self._rows)

    def _grid(self, size: Size, detail: Detail) -> tuple[int, Size]:
        """Return the length of the longer side, and the rows and columns of tiles, within `detail`.

        A grid of one tile shows the whole picture, which is still scaled to `longest` first.
        """
        longest, tile = self._longest, self._tiles.size
        if not self._split or detail == "low":
            return longest, (1, 1)
        while True:
            down, across = in_tiles(stretched(size, longest), tile)
            tiles = down * across + (down * across > 1)
            if tiles == 1 or not isinstance(detail, int) or tiles * self._rows <= detail:
                return longest, (down, across)
            longest = (math.ceil(longest / tile) - 1) * tile
