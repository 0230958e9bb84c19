"""Gemma 4: pictures and frames of any shape, with as many patches as a budget of soft tokens
allows.

A picture keeps its aspect ratio, but for the rounding of each side down to whole cells of
`pooling * pooling` patches; a cell becomes one soft token. The pixels equal those of transformers'
`Gemma4ImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image

from quire.core.media import RAW_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import (
    CACHE_BYTES,
    Placeholders,
    VideoProcessor,
    WholeImageProcessor,
    check_pixels,
)
from quire.media.source import Detail, refusal
from quire.media.video import Frame, VideoInfo

BUDGETS = (70, 140, 280, 560, 1120)
"""Numbers of soft tokens per picture that the model was trained with."""

_BUDGETS_NAMED = ", ".join(map(str, BUDGETS))


def fitted(
    height: int, width: int, patch: int, pooling: int, tokens: int
) -> tuple[int, int] | None:
    """Return the height and width in pixels that a picture is resized to.

    Both are multiples of `patch * pooling`, the side of a cell, and there are at most `tokens`
    cells. Return None if no cell would be left; Gemma 4's budgets always leave some.
    """
    cell = patch * pooling
    room = tokens * pooling**2 * patch**2
    factor = math.sqrt(room / (height * width))
    rows = math.floor(factor * height / cell)
    columns = math.floor(factor * width / cell)
    # A strip too thin for one cell gets one along its short side.
    if rows == 0 and columns > 0:
        rows, columns = 1, min(width // height, tokens)
    elif columns == 0 and rows > 0:
        rows, columns = min(height // width, tokens), 1
    if not 0 < rows * columns <= tokens:
        return None
    return rows * cell, columns * cell


@dataclass(frozen=True, slots=True)
class Cutter:
    """Resizes pictures to a size that the encoder takes, and cuts them into patches.

    Attributes:
        patch: pixels on a patch's side.
        pooling: patches on the side of a cell, which becomes one soft token.
        max_soft_tokens: the most soft tokens of a picture; one of `BUDGETS`.
    """

    patch: int
    pooling: int
    max_soft_tokens: int

    @classmethod
    def open(cls, settings: Values, tokens: int) -> Cutter:
        """Read a processor's settings; `tokens` is the default number of soft tokens.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, RAW_COLOURS)
        tokens = settings.integer("max_soft_tokens", default=tokens)
        if tokens not in BUDGETS:
            raise settings.error("max_soft_tokens", f"not one of {_BUDGETS_NAMED}")
        return cls(
            settings.integer("patch_size", default=16),
            settings.integer("pooling_kernel_size", default=3),
            tokens,
        )

    def item(self, kind: str, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        """Resize and cut a picture in RGB into an item of `kind`.

        Raises:
            RequestError: no budget has that many soft tokens, or the picture fits no cell.
        """
        tokens = self._tokens(param, detail)
        size = fitted(
            picture.height, picture.width, patch=self.patch, pooling=self.pooling, tokens=tokens
        )
        if size is None:
            shape = f"{picture.width} x {picture.height} pixels"
            raise refusal(param, f"its shape, {shape}, cannot be resized to {tokens} soft tokens")
        height, width = size
        if size != (picture.height, picture.width):
            picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
        rows, columns = height // self.patch, width // self.patch
        grid = np.asarray(picture).reshape(rows, self.patch, columns, self.patch, 3)
        pixels = grid.transpose(0, 2, 1, 3, 4).tobytes()  # [rows, columns, patch, patch, 3]
        return MediaItem.of(kind, pixels, (rows, columns), tokens=rows * columns // self.pooling**2)

    def _tokens(self, param: str, detail: Detail) -> int:
        if isinstance(detail, str):
            return BUDGETS[0] if detail == "low" else self.max_soft_tokens
        if detail not in BUDGETS:
            raise refusal(param, f"max_soft_tokens is {detail}, not one of {_BUDGETS_NAMED}")
        return detail


class Gemma4ImageProcessor(WholeImageProcessor):
    """Gemma 4's image processor."""

    def __init__(
        self, placeholders: Placeholders, cutter: Cutter, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        super().__init__(placeholders, cache_bytes=cache_bytes)
        self._cutter = cutter

    @classmethod
    def open(cls, settings: Values, config: Values) -> Gemma4ImageProcessor:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        return cls(_placeholders(config, "image_token_id"), Cutter.open(settings, 280))

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        return self._cutter.item("image", picture, param, detail=detail)


class Gemma4VideoProcessor(VideoProcessor):
    """The video processor of Gemma 4: evenly spaced frames, each a picture preceded by its time.

    Args:
        maximum: the most frames that are read.
    """

    def __init__(self, placeholders: Placeholders, cutter: Cutter, maximum: int) -> None:
        super().__init__(placeholders)
        self._cutter = cutter
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Gemma4VideoProcessor:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        placeholders = _placeholders(config, "video_token_id", 258_884)
        return cls(
            placeholders, Cutter.open(settings, 70), settings.integer("num_frames", default=32)
        )

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        count = min(self._maximum, maximum, info.frames)
        return range(0, info.frames // count * count, info.frames // count)

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        parts: list[MediaPart] = []
        for frame in frames:
            minutes, seconds = divmod(int(frame.index / info.fps), 60)
            time = f"{' ' if parts else ''}{minutes:02d}:{seconds:02d} "
            item = self._cutter.item("video", frame.picture, param, detail=detail)
            parts.append(MediaPart(item, before=time))
        return tuple(parts)


def _placeholders(config: Values, token: str, default: int | None = None) -> Placeholders:
    """Return the tokens around a picture or frame."""
    return Placeholders(
        token=config.integer(token, default=default, minimum=0),
        before=(config.integer("boi_token_id", minimum=0),),
        after=(config.integer("eoi_token_id", minimum=0),),
    )
