"""Qwen2-VL to Qwen3.5: pictures of any shape, whose patches follow their number of pixels.

A picture keeps its aspect ratio, but for the rounding of each side to whole squares of
`merge * merge` patches; a square becomes one row. The pixels equal those of transformers'
`Qwen2VLImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import numpy.typing as npt
import PIL.Image

from quire.core.media import CLIP_COLOURS, EVEN_COLOURS, Colours, MediaItem
from quire.core.values import Values
from quire.media.processors.base import (
    CACHE_BYTES,
    Placeholders,
    WholeImageProcessor,
    check_pixels,
)
from quire.media.source import Detail, refusal

LOW_DETAIL = 256
"""Rows of a picture of low detail: the minimum that Qwen2-VL's model card recommends."""

_MOST_STRETCHED = 200
"""The largest accepted ratio of the longer side to the shorter one."""

_EVEN = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_omni_moe_thinker",
    "paddleocr_vl",
    "lfm3_vl",
)


def fitted(
    height: int, width: int, cell: int, minimum: int, maximum: float, frames: int = 1
) -> tuple[int, int]:
    """Return the height and width in pixels to which a picture, or each frame of a video, is
    resized.

    Both are multiples of `cell`. The number of pixels lies between `minimum` and `maximum` if
    possible.

    Args:
        frames: number of frames that share the bounds; it is rounded to an even number.
    """
    rows, columns = round(height / cell), round(width / cell)
    counted = 1 if frames == 1 else 2 * round(frames / 2)
    pixels = counted * rows * columns * cell**2
    if pixels > maximum:
        shrink = math.sqrt(frames * height * width / maximum)
        rows, columns = (max(1, math.floor(side / shrink / cell)) for side in (height, width))
    elif pixels < minimum:
        grow = math.sqrt(minimum / (frames * height * width))
        rows, columns = (math.ceil(side * grow / cell) for side in (height, width))
    return rows * cell, columns * cell


def enlarged(height: int, width: int, cell: int) -> tuple[int, int]:
    """Return the height and width of a picture, enlarged if either is shorter than `cell`."""
    scale = max(cell / height, cell / width, 1.0)
    return int(height * scale), int(width * scale)


def patches(frames: npt.NDArray[np.uint8], patch: int, merge: int) -> npt.NDArray[np.uint8]:
    """Cut frames into patches: `[frames, height, width, 3]` -> `[patches, frames, patch, patch,
    3]`.

    Squares follow each other row by row, and so do the patches within a square.
    """
    count, height, width, _ = frames.shape
    down, across = height // patch // merge, width // patch // merge
    grid = frames.reshape(count, down, merge, patch, across, merge, patch, 3)
    cut = grid.transpose(1, 4, 2, 5, 0, 3, 6, 7)
    return cut.reshape(-1, count, patch, patch, 3)


def check_stretch(picture: PIL.Image.Image, param: str) -> None:
    """Refuse a picture with an extreme aspect ratio."""
    if max(picture.size) > _MOST_STRETCHED * min(picture.size):
        shape = f"{picture.width} x {picture.height} pixels"
        raise refusal(
            param,
            f"its shape, {shape}, is too long: one side is over {_MOST_STRETCHED} times the other",
        )


def max_pixels(detail: Detail, cell: int) -> float:
    """Return the most pixels of a picture or frame that is read at this detail."""
    rows = LOW_DETAIL if detail == "low" else detail
    return rows * cell**2 if isinstance(rows, int) else math.inf


def resized(
    picture: PIL.Image.Image,
    height: int,
    width: int,
    filter: PIL.Image.Resampling = PIL.Image.Resampling.BICUBIC,
) -> npt.NDArray[np.uint8]:
    """Return the resized picture as `[height, width, 3]`."""
    if (width, height) != picture.size:
        picture = picture.resize((width, height), filter)
    return np.asarray(picture)


class QwenImageProcessor(WholeImageProcessor):
    """The image processor of Qwen2-VL to Qwen3.5.

    Args:
        patch: pixels on a patch's side.
        merge: patches on the side of a square, which becomes one row.
        pixels: minimum and maximum of a resized picture's pixels.
    """

    _usual_pixels = 56 * 56, 28 * 28 * 1280
    _frames = 1
    """Frames that a picture counts for in the bounds."""
    _filter = PIL.Image.Resampling.BICUBIC

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        patch: int,
        merge: int,
        pixels: tuple[int, int],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(placeholders, cache_bytes=cache_bytes)
        self._patch = patch
        self._merge = merge
        self._pixels = pixels

    def _fitted(self, height: int, width: int, minimum: int, maximum: float) -> tuple[int, int]:
        return fitted(
            height, width, cell=self._patch * self._merge, minimum=minimum, maximum=maximum
        )

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        check_pixels(settings, colours(config))
        return cls(
            # Chat templates write what goes around a picture.
            Placeholders(token=config.integer("image_token_id", minimum=0)),
            patch=settings.integer("patch_size", default=14),
            merge=settings.integer("merge_size", default=2),
            pixels=pixel_bounds(settings, *cls._usual_pixels),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        cell = self._patch * self._merge
        check_stretch(picture, param)
        minimum, usual = self._pixels
        maximum = max(minimum, min(usual, self._frames * max_pixels(detail, cell)))
        height, width = self._fitted(picture.height, picture.width, minimum, maximum=maximum)
        rows, columns = height // self._patch, width // self._patch
        cut = patches(
            resized(picture, height, width, filter=self._filter)[None], self._patch, self._merge
        )
        tokens = rows * columns // self._merge**2
        return MediaItem.of(
            "image", cut.tobytes(), (rows, columns), tokens=tokens, bidirectional=False
        )


class GlmImageProcessor(QwenImageProcessor):
    """The image processor of GLM-4V and GLM-OCR. A picture counts as two frames of a video."""

    _usual_pixels = 112 * 112, 28 * 28 * 15_000
    _frames = 2

    def _fitted(self, height: int, width: int, minimum: int, maximum: float) -> tuple[int, int]:
        cell = self._patch * self._merge
        height, width = enlarged(height, width, cell)
        return fitted(
            height, width, cell=cell, minimum=minimum, maximum=maximum, frames=self._frames
        )


class ErnieImageProcessor(QwenImageProcessor):
    """The image processor of ERNIE 4.5 VL."""

    _usual_pixels = 56 * 56, 28 * 28 * 6177


class PaddleImageProcessor(QwenImageProcessor):
    """The image processor of PaddleOCR-VL. Sides shorter than a square are first enlarged."""

    _usual_pixels = 384 * 384, 1536 * 1536

    def _fitted(self, height: int, width: int, minimum: int, maximum: float) -> tuple[int, int]:
        cell = self._patch * self._merge
        if height < cell:
            height, width = cell, round(width * cell / height)
        if width < cell:
            height, width = round(height * cell / width), cell
        return fitted(height, width, cell=cell, minimum=minimum, maximum=maximum)


def colours(config: Values) -> Colours:
    """Return the pixel normalisation of this model's encoder."""
    return EVEN_COLOURS if config.value("model_type") in _EVEN else CLIP_COLOURS


def pixel_bounds(settings: Values, minimum: int, maximum: int) -> tuple[int, int]:
    """Return the bounds of a picture's pixels, from any published spelling of the settings.

    Args:
        minimum, maximum: defaults.
    """
    size = settings.value("size")
    within = settings.like(size if isinstance(size, dict) else {}, "size.")
    least, most = (
        settings.integer(old, default=within.integer(new, old, default=usual))
        for old, new, usual in (
            ("min_pixels", "shortest_edge", minimum),
            ("max_pixels", "longest_edge", maximum),
        )
    )
    if least > most:
        raise settings.error("size", f"of which the minimum, {least}, is over the maximum, {most}")
    return least, most
