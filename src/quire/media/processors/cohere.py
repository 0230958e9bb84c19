"""Command A Vision: a picture on the canvas of tiles that fits it best.

The pixels equal those of transformers' `Cohere2VisionImageProcessor`, but stay uint8: the model
scales them.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from quire.core.values import Values
from quire.media.processors.base import Placeholders
from quire.media.processors.dynamic import AyaImageProcessor, Cutting


def best_canvas(height: int, width: int, size: int, maximum: int) -> tuple[int, int]:
    """Return the rows and columns of the canvas, of at most `maximum` tiles, that fits a picture
    best.

    The canvas that enlarges the picture least is best, or else the one that shrinks it least. Ties
    go to fewer tiles, then fewer columns.

    Args:
        size: pixels on a tile's side.
    """
    grids = [
        (across, down)
        for across in range(1, maximum + 1)
        for down in range(1, maximum + 1)
        if across * down <= maximum
    ]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = (np.array(grids) * size / np.array([width, height])).min(axis=1)
    if (scales < 1).all():
        best = np.argmax(scales)
    else:
        best = np.argmin(np.where(scales < 1, np.inf, scales))
    across, down = grids[best]
    return down, across


class CanvasCutting(Cutting):
    """Cuts a picture into the tiles of the canvas that fits it best."""

    def grid(self, height: int, width: int, maximum: int) -> tuple[int, int]:
        return best_canvas(height, width, self.tiles.size, maximum=maximum)


class CohereImageProcessor(AyaImageProcessor):
    """The image processor of Command A Vision: a line break follows each tile, and tiles have no
    numbers.
    """

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        square = config.integer("downsample_factor", default=2)
        cutting = CanvasCutting.open(settings, config, square, size=512, patch=16)
        settings.neutral({"crop_to_patches": True, "patch_size": cutting.tiles.patches // square})
        token = config.integer("image_token_id", default=255_036, minimum=0)
        return cls(Placeholders(token), cutting)

    def _around(self, number: int, *, last: bool) -> tuple[str, str]:
        return "", "<|IMG_LINE_BREAK|>"
