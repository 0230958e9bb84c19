"""Falcon-OCR and Falcon Perception: sides are bounded first, then patches are cut as for Qwen2-VL.

The pixels equal those of mlx-vlm's processor, but stay uint8: the model scales them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import PIL.Image

from quire.core.media import LEARNED_ROWS, MediaItem
from quire.core.values import Values
from quire.media.processors.base import Placeholders
from quire.media.processors.qwen import QwenImageProcessor, check_stretch
from quire.media.source import Detail

_LONGEST = 1024
"""The most pixels of the longer side."""


class FalconImageProcessor(QwenImageProcessor):
    """The image processor of Falcon-OCR, which only `config.json` describes."""

    _shortest = 64

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `config.json`.

        Raises:
            ModelError: a value is of another type.
        """
        token = config.integer("img_id", default=227, minimum=0)
        after = config.integer("img_end_id", default=230, minimum=0)
        return cls(
            Placeholders(token, after=(after,)),
            patch=config.integer("spatial_patch_size", default=16),
            merge=1,
            pixels=cls._usual_pixels,
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        check_stretch(picture, param)
        size = bounded(*picture.size, self._shortest, _LONGEST)
        if size != picture.size:
            picture = picture.resize(size, PIL.Image.Resampling.BICUBIC)
        if isinstance(detail, int):
            detail = max(1, detail - LEARNED_ROWS)
        item = super().item(picture, param, detail)
        return replace(item, tokens=item.tokens + LEARNED_ROWS, bidirectional=True)


class PerceptionImageProcessor(FalconImageProcessor):
    """The image processor of Falcon Perception."""

    _shortest = 256


def bounded(width: int, height: int, shortest: int, longest: int) -> tuple[int, int]:
    """Return the width and height in pixels that a picture is resized to. Its aspect ratio is kept.

    Args:
        shortest: the least pixels of the shorter side, unless the longer side would then exceed
            `longest`.
        longest: the most pixels of the longer side.
    """
    if shortest <= min(width, height) and max(width, height) <= longest:
        return width, height
    shape = width / height
    wanted = shortest if min(width, height) < shortest else longest
    if width < height:
        width, height = wanted, int(wanted / shape)
    else:
        width, height = int(wanted * shape), wanted
    if width > longest:
        width, height = longest, int(longest / shape)
    if height > longest:
        width, height = int(longest * shape), longest
    return width, height
