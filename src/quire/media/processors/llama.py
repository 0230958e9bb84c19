"""Llama 3.2 Vision: a picture becomes a few square tiles.

The pixels equal those of transformers' `MllamaImageProcessorPil`, but stay uint8: the model scales
them, and pads missing tiles.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import PIL.Image

from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import (
    BILINEAR,
    CACHE_BYTES,
    Placeholders,
    WholeImageProcessor,
    check_pixels,
)
from quire.media.source import Detail

Size = tuple[int, int]
"""Height and width, in pixels or in tiles."""


def tiles_for(picture: Size, tile: int, maximum: int) -> Size:
    """Return the rows and columns of the canvas of at most `maximum` tiles for a picture.

    If canvases enlarge the picture, the one that enlarges it least is taken; else the one that
    shrinks it least. Of equal ones the smallest is taken.
    """
    height, width = picture
    shapes = [
        (rows, columns)
        for rows in range(1, maximum + 1)
        for columns in range(1, maximum // rows + 1)
    ]
    scales = [min(rows * tile / height, columns * tile / width) for rows, columns in shapes]
    enlarged = [scale for scale in scales if scale >= 1]
    wanted = min(enlarged) if enlarged else max(scales)
    alike = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == wanted]
    return min(alike, key=lambda shape: shape[0] * shape[1])


def fitted(picture: Size, canvas: Size, tile: int) -> Size:
    """Return the size to which a picture is resized within a canvas. It is not enlarged beyond one
    tile.
    """
    height, width = picture
    high = min(max(height, tile), canvas[0])
    wide = min(max(width, tile), canvas[1])
    down, across = high / height, wide / width
    if across < down:
        return min(int(height * across) or 1, high), wide
    return high, min(int(width * down) or 1, wide)


class LlamaImageProcessor(WholeImageProcessor):
    """The image processor of Llama 3.2 Vision.

    Args:
        patch: pixels along each side of a patch.
        tile: pixels along each side of a tile.
        tiles: the most tiles of a picture.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        patch: int,
        tile: int,
        tiles: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(placeholders, cache_bytes=cache_bytes)
        self._patch, self._tile, self._tiles = patch, tile, tiles

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        check_pixels(settings, CLIP_COLOURS, BILINEAR)
        vision = config.nested("vision_config", needed=False)
        size = settings.nested("size")
        tile = size.integer("height")
        if size.integer("width") != tile:
            raise settings.error("size", "and only squares are supported")
        patch = vision.integer("patch_size", default=14)
        if vision.integer("image_size", default=448) != tile or tile % patch:
            raise settings.error("size", "not the encoder's, or no multiple of its patches")
        return cls(
            Placeholders(token=config.integer("image_token_id", "image_token_index", minimum=0)),
            patch=patch,
            tile=tile,
            tiles=settings.integer("max_image_tiles", default=4),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        size, tile = (picture.height, picture.width), self._tile
        rows, columns = tiles_for(size, tile, 1 if detail == "low" else self._tiles)
        high, wide = fitted(size, (rows * tile, columns * tile), tile)
        if (high, wide) != size:
            picture = picture.resize((wide, high), PIL.Image.Resampling.BILINEAR)
        pixels = np.zeros((rows * tile, columns * tile, 3), np.uint8)  # black behind the picture
        pixels[:high, :wide] = np.asarray(picture)
        side = tile // self._patch
        cut = pixels.reshape(rows, side, self._patch, columns, side, self._patch, 3)
        features = cut.transpose(0, 3, 1, 4, 2, 5, 6).tobytes()
        return MediaItem.of("image", features, (rows, columns), tokens=1, bidirectional=False)
