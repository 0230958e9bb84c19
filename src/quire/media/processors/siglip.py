"""Pictures of any shape for SigLIP's encoders: Youtu-VL's."""

from __future__ import annotations

import math
from typing import Self

import PIL.Image

from quire.core.media import EVEN_COLOURS
from quire.media.processors.base import BILINEAR, Placeholders, check_pixels
from quire.media.processors.qwen import QwenImageProcessor
from quire.media.processors.tiles import part
from quire.media.settings import Settings

_MOST_PATCHES = 36_864


class YoutuImageProcessor(QwenImageProcessor):
    """The image processor of Youtu-VL.

    A picture is shrunk only where it would have too many patches. That is a constant of the
    published code, which does not read the `max_num_patches` of its settings.
    """

    _filter = PIL.Image.Resampling.BILINEAR

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Self:
        """As `preprocessor_config.json` and `config.json` say.

        Raises:
            ModelError: a value asks for pixels other than this computes.
        """
        check_pixels(settings, EVEN_COLOURS, BILINEAR)
        vision = part(config, "vision_config")
        patch, merge = vision.integer("patch_size", 16), vision.integer("spatial_merge_size", 2)
        return cls(
            Placeholders(config.integer("image_token_id", 128_264, least=0)),
            patch=patch,
            merge=merge,
            pixels=((patch * merge) ** 2, _MOST_PATCHES * patch**2),
        )

    def _fitted(self, height: int, width: int, least: int, most: float) -> tuple[int, int]:
        return shrunk(height, width, self._patch * self._merge, most)


def shrunk(height: int, width: int, cell: int, most: float) -> tuple[int, int]:
    """The height and width in pixels of a picture of `most` pixels, or of one cell.

    Both are whole cells, rounded up. A picture of more is shrunk by one part in fifty at a time.
    """
    scale = 1.0
    while True:
        rows, columns = (max(1, math.ceil(side * scale / cell)) for side in (height, width))
        if rows * columns * cell**2 <= most or rows * columns == 1:
            return rows * cell, columns * cell
        scale -= 0.02
