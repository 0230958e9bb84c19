"""MiniCPM-V 4.6: a picture of any shape, followed by the slices of a larger rendering of it.

Each slice is an item, since slices do not see each other and text stands between them. The pixels
equal those of transformers' `MiniCPMV4_6ImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import PIL.Image

from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import ImageProcessor, Placeholders, VideoProcessor, check_pixels
from quire.media.processors.qwen import check_stretch, patches, resized
from quire.media.processors.tiles import check_room
from quire.media.source import Detail
from quire.media.video import Frame, VideoInfo

Size = tuple[int, int]
"""Height and width, in pixels; or rows and columns."""

_FRAMES_A_SECOND = 10
"""Frames of a video that is longer than its frames are many, of which evenly spaced ones are
read."""


def to_multiple(length: float, unit: int) -> int:
    """Return the multiple of `unit` that is nearest to a length, at least one."""
    return max(round(length / unit), 1) * unit


@dataclass(frozen=True, slots=True)
class Slicing:
    """How pictures are resized and sliced.

    Attributes:
        patch: pixels on a patch's side.
        merge: patches on the side of a square that becomes one row.
        side: pixels on the side of a square picture that has as many pixels as a slice.
        maximum: the most slices of a picture; 1 stands for none.
    """

    patch: int
    merge: int
    side: int
    maximum: int

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Read a processor's settings and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        # The published processor does not read `do_resize`.
        read = {key: value for key, value in settings.values.items() if key != "do_resize"}
        check_pixels(settings.like(read), EVEN_COLOURS)
        vision = config.nested("vision_config", needed=False)
        patch = vision.integer("patch_size", default=16)
        mode = config.word("downsample_mode", default="16x")
        for key, usual, encoders in (("patch_size", 14, patch), ("downsample_mode", "16x", mode)):
            if settings.values.get(key, usual) != encoders:
                raise settings.error(key, f"and the encoder's is {encoders}")
        sliced = settings.flag("slice_mode", default=True)
        return cls(
            patch,
            merge=2 if mode == "4x" else 4,
            side=settings.integer("scale_resolution", default=448),
            maximum=settings.integer("max_slice_nums", default=9) if sliced else 1,
        )

    @property
    def cell(self) -> int:
        """Pixels on the side of a square that becomes one row."""
        return self.patch * self.merge

    def parts(self, kind: str, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        """Return a picture, and behind it its slices, as items of `kind`.

        Raises:
            RequestError: the picture is too long, or has more rows than `detail` allows.
        """
        check_stretch(picture, param)
        size = picture.height, picture.width
        down, across = self._grid(size, detail)
        height, width = self.fitted(*size, enlarged=down * across == 1)
        check_room(param, detail, self._rows(height, width))
        whole = MediaPart(self._item(kind, resized(picture, height, width)), "<image>", "</image>")
        if down * across == 1:
            return (whole,)
        height, width = self._slice(size, (down, across))
        canvas = resized(picture, down * height, across * width)
        parts = [whole]
        for number in range(down * across):
            row, column = divmod(number, across)
            top, left = row * height, column * width
            pixels = canvas[top : top + height, left : left + width]
            last = number + 1 == down * across
            after = "</slice>" + ("\n" if column + 1 == across and not last else "")
            parts.append(MediaPart(self._item(kind, pixels), "<slice>", after))
        return tuple(parts)

    def fitted(self, height: float, width: float, *, enlarged: bool) -> Size:
        """Return the size of a picture or slice, of sides that are multiples of `cell`.

        Args:
            enlarged: whether a picture of fewer pixels than a slice is enlarged.
        """
        if enlarged or height * width > self.side**2:
            ratio = width / height
            height = int(self.side / math.sqrt(ratio))
            width = int(height * ratio)
        return to_multiple(height, self.cell), to_multiple(width, self.cell)

    def _slice(self, size: Size, grid: Size) -> Size:
        """Return the size of a slice of a picture."""
        height, width = (to_multiple(side, n) / n for side, n in zip(size, grid, strict=True))
        return self.fitted(height, width, enlarged=True)

    def _grid(self, size: Size, detail: Detail) -> Size:
        """Return the rows and columns of slices, as many as `detail` allows; 1 and 1 for none."""
        most = 1 if detail == "low" else self.maximum
        while True:
            grid = slices(size, self.side, most)
            count = grid[0] * grid[1]
            if count == 1 or not isinstance(detail, int):
                return grid
            whole, one = self.fitted(*size, enlarged=False), self._slice(size, grid)
            if self._rows(*whole) + count * self._rows(*one) <= detail:
                return grid
            most = min(most, count) - 1

    def _rows(self, height: int, width: int) -> int:
        return height * width // self.cell**2

    def _item(self, kind: str, pixels: np.ndarray) -> MediaItem:
        """Return pixels `[height, width, 3]` as an item."""
        height, width, _ = pixels.shape
        cut = patches(pixels[None], self.patch, self.merge)
        shape = height // self.patch, width // self.patch
        rows = self._rows(height, width)
        return MediaItem.of(kind, cut.tobytes(), shape, tokens=rows, bidirectional=False)


def slices(size: Size, side: int, most: int) -> Size:
    """Return the rows and columns of slices, at most `most`, that are nearest to squares.

    There are about as many as `side * side` goes into the picture; 1 and 1 stand for none. Of
    equally good grids the one with the most rows is taken.
    """
    height, width = size
    count = min(math.ceil(height * width / side**2), most)
    if count <= 1:
        return 1, 1
    numbers = [n for n in (count - 1, count, count + 1) if 1 < n <= most]
    grids = [(rows, n // rows) for n in numbers for rows in range(1, n + 1) if n % rows == 0]
    wanted = math.log(width / height)
    return min(grids, key=lambda grid: (abs(wanted - math.log(grid[1] / grid[0])), -grid[0]))


def _numbered(settings: Values) -> str:
    """Return the text before each file, with its number."""
    return "<image_id>{}</image_id>" if settings.flag("use_image_id", default=True) else ""


class MiniCpmImageProcessor(ImageProcessor):
    """The image processor of MiniCPM-V 4.6."""

    def __init__(self, placeholders: Placeholders, slicing: Slicing) -> None:
        super().__init__(placeholders)
        self._slicing = slicing

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        token = config.integer("image_token_id", minimum=0)
        placeholders = Placeholders(token, numbered=_numbered(settings))
        return cls(placeholders, Slicing.open(settings, config))

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        return self._slicing.parts("image", picture, param, detail=detail)


class MiniCpmVideoProcessor(VideoProcessor):
    """The video processor of MiniCPM-V 4.6: a frame a second, each like a picture.

    Args:
        maximum: the most frames that are read. Of longer videos they are spread evenly.
    """

    def __init__(self, placeholders: Placeholders, slicing: Slicing, maximum: int) -> None:
        super().__init__(placeholders)
        self._slicing = slicing
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different frames than this class reads.
        """
        settings.only("do_sample_frames", True)
        settings.only("stack_frames", 1)
        token = config.integer("video_token_id", minimum=0)
        placeholders = Placeholders(token, numbered=_numbered(settings))
        maximum = settings.integer("max_num_frames", default=128)
        return cls(placeholders, Slicing.open(settings, config), maximum)

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        most, seconds = min(self._maximum, maximum), info.frames / info.fps
        if seconds <= most:
            wanted = [int(second * info.fps) for second in range(math.ceil(seconds))]
        else:
            count = int(seconds * _FRAMES_A_SECOND)
            chosen = np.linspace(0, count - 1, min(most, count), dtype=int)
            wanted = [int(at / _FRAMES_A_SECOND * info.fps) for at in chosen.tolist()]
        return sorted({min(index, info.frames - 1) for index in wanted})

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        pictures = (frame.picture for frame in frames)
        each = (self._slicing.parts("video", one, param, detail=detail) for one in pictures)
        return tuple(part for parts in each for part in parts)
