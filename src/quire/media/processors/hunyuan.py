"""HunyuanOCR: patches as for Qwen2-VL, with one more row for each line and two around the
picture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import PIL.Image

from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import Placeholders, check_pixels
from quire.media.processors.qwen import QwenImageProcessor, pixel_bounds
from quire.media.source import Detail


class HunyuanImageProcessor(QwenImageProcessor):
    """The image processor of HunyuanOCR.

    Pictures are resized with the bicubic filter: the published code does not read `resample`.
    """

    _usual_pixels = 512 * 512, 2048 * 2048

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        read = {key: value for key, value in settings.values.items() if key != "resample"}
        settings = settings.like(read)
        check_pixels(settings, CLIP_COLOURS)
        return cls(
            Placeholders(token=config.integer("image_token_id", default=120_120, minimum=0)),
            patch=settings.integer("patch_size", default=16),
            merge=settings.integer("merge_size", default=2),
            pixels=pixel_bounds(settings, *cls._usual_pixels),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        item = super().item(picture, param, detail)
        return replace(item, tokens=item.tokens + item.shape[0] // self._merge + 2)
