"""Kimi K2.5 and Kimi-VL: a picture is shrunk if it is too large, and padded with black to whole
squares.

The sizes equal those of transformers' `Kimi_K25ImageProcessor`, the pixels too, but for the
rounding of Pillow's resizing; they stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import PIL.Image

from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import Placeholders, WholeImageProcessor, check_pixels
from quire.media.processors.qwen import max_pixels, patches, resized
from quire.media.processors.tiles import side_of
from quire.media.source import Detail


class KimiImageProcessor(WholeImageProcessor):
    """The image processor of Kimi K2.5 and Kimi-VL.

    Args:
        patch: pixels on a patch's side.
        merge: patches on the side of a square, which becomes one row.
        most: the most patches of a picture, before it is padded to whole squares.
        across: the most patches along one side.
    """

    def __init__(
        self, placeholders: Placeholders, *, patch: int, merge: int, most: int, across: int
    ) -> None:
        super().__init__(placeholders)
        self._patch = patch
        self._merge = merge
        self._most = most
        self._across = across

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`. Both the
        published keys and those of transformers are known.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        published = settings.nested("media_proc_cfg", needed=False)
        own = published if published.values else settings
        check_pixels(own, EVEN_COLOURS)
        size = own.nested("size", needed=False)
        across = own.integer(
            "patch_limit_on_one_side", default=size.integer("max_height", default=512)
        )
        size.only("max_width", across)
        own.only("fixed_output_tokens")
        own.only("do_pad", True)
        older = config.value("model_type") == "kimi_vl"
        if older and not own.flag("pad_input", default=False):
            raise own.error("pad_input", "and only true is supported")
        return cls(
            # The chat template writes what goes around a picture.
            Placeholders(config.integer("image_token_id", default=163_605, minimum=0)),
            patch=own.integer("patch_size", default=14),
            merge=own.integer("merge_size", default=side_of(own, "merge_kernel_size", 2)),
            most=own.integer(
                "max_patches", "in_patch_limit", "in_token_limit", default=4096 if older else 16_384
            ),
            across=across,
        )

    def _fitted(self, height: int, width: int, most: float) -> tuple[int, int]:
        """Return the height and width to which a picture is shrunk."""
        patch, longest = self._patch, self._across * self._patch
        count = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(most / count), longest / height, longest / width)
        down, across = (min(max(1, int(side * scale)), longest) for side in (height, width))
        return down, across

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        cell = self._patch * self._merge
        most = min(self._most, max_pixels(detail, cell) / self._patch**2)
        height, width = self._fitted(picture.height, picture.width, most)
        down, across = (-(-side // cell) * cell for side in (height, width))
        ground = np.zeros((1, down, across, 3), np.uint8)
        ground[0, :height, :width] = resized(picture, height, width)
        rows, columns = down // self._patch, across // self._patch
        cut = patches(ground, self._patch, self._merge)
        tokens = rows * columns // self._merge**2
        return MediaItem.of(
            "image", cut.tobytes(), (rows, columns), tokens=tokens, bidirectional=False
        )
