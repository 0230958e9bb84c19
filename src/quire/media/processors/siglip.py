"""Pictures of any shape for SigLIP 2 encoders: Youtu-VL's and Phi-4's."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Self

import PIL.Image

from quire.core.media import EVEN_COLOURS
from quire.core.values import Values
from quire.media.processors.base import BILINEAR, Placeholders, check_pixels, open_by_model
from quire.media.processors.qwen import QwenImageProcessor

_MOST_PATCHES = 36_864
_PRECISION = 1e-5
_SCALES = _PRECISION / 10, 100.0


class Siglip2ImageProcessor(QwenImageProcessor):
    """Common parts of the two processors for SigLIP 2 encoders."""

    _filter = PIL.Image.Resampling.BILINEAR

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, EVEN_COLOURS, BILINEAR)
        return cls._of(settings, config, config.nested("vision_config", needed=False))

    @classmethod
    @abstractmethod
    def _of(cls, settings: Values, config: Values, vision: Values) -> Self:
        """Make the processor for `open`."""


class YoutuImageProcessor(Siglip2ImageProcessor):
    """The image processor of Youtu-VL.

    A picture is shrunk only if it has too many patches. The limit is a constant of the published
    code, which does not read `max_num_patches`.
    """

    @classmethod
    def _of(cls, settings: Values, config: Values, vision: Values) -> Self:
        patch, merge = (
            vision.integer("patch_size", default=16),
            vision.integer("spatial_merge_size", default=2),
        )
        return cls(
            Placeholders(config.integer("image_token_id", default=128_264, minimum=0)),
            patch=patch,
            merge=merge,
            pixels=((patch * merge) ** 2, _MOST_PATCHES * patch**2),
        )

    def _fitted(self, height: int, width: int, minimum: int, maximum: float) -> tuple[int, int]:
        return shrunk(height, width, self._patch * self._merge, maximum=maximum)


class PhiImageProcessor(Siglip2ImageProcessor):
    """The image processor of Phi-4-reasoning-vision: each patch becomes one row.

    A picture keeps about its own number of patches, within bounds.
    """

    @classmethod
    def _of(cls, settings: Values, config: Values, vision: Values) -> Self:
        patch = vision.integer("patch_size", default=16)
        # The published code reads the bounds from the model's file.
        minimum, maximum = (
            config.integer(
                f"{each}_num_patches",
                default=settings.integer(f"{each}_num_patches", default=usual),
            )
            for each, usual in (("min", 256), ("max", 3600))
        )
        if minimum > maximum:
            raise config.error("min_num_patches", f"over max_num_patches, {maximum}")
        # Rows have no token of their own. What only pads never stands in a prompt.
        token = config.integer("pad_token_id", default=100_349, minimum=0)
        return cls(
            Placeholders(token, mark="<image>"),
            patch=patch,
            merge=1,
            pixels=(minimum * patch**2, maximum * patch**2),
        )

    def _fitted(self, height: int, width: int, minimum: int, maximum: float) -> tuple[int, int]:
        patch = self._patch
        own = max((height // patch) * (width // patch), 1)
        return filling(
            height, width, patch, maximum=min(max(own, minimum / patch**2), maximum / patch**2)
        )


def filling(height: int, width: int, patch: int, maximum: float) -> tuple[int, int]:
    """Return the height and width in pixels of a picture scaled to about `maximum` patches, never
    more.

    Both are rounded up to whole patches. The scale is found by bisection, to one part in 100,000.
    """

    def scaled(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in (height, width))
        return rows, columns

    low, high = _SCALES
    while high - low >= _PRECISION:
        middle = (low + high) / 2
        rows, columns = scaled(middle)
        if rows * columns <= maximum:
            low = middle
        else:
            high = middle
    rows, columns = scaled(low)
    return rows * patch, columns * patch


open_siglip2 = open_by_model(
    {"phi4-siglip": PhiImageProcessor.open, "youtu_vl": YoutuImageProcessor.open}
)
"""Opens the processor of a model whose settings name SigLIP 2's."""


def shrunk(height: int, width: int, cell: int, maximum: float) -> tuple[int, int]:
    """Return the height and width of a picture of at most `maximum` pixels, or else of one cell.

    Both are rounded up to whole cells. The scale falls by a fiftieth until the picture fits.
    """
    scale = 1.0
    while True:
        rows, columns = (max(1, math.ceil(side * scale / cell)) for side in (height, width))
        if rows * columns * cell**2 <= maximum or rows * columns == 1:
            return rows * cell, columns * cell
        scale -= 0.02
