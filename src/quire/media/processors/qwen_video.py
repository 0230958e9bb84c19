"""Videos for Qwen2-VL to Qwen3.5: two frames a second, which form a moment."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import Placeholders, VideoProcessor, check_pixels
from quire.media.processors.qwen import (
    check_stretch,
    colours,
    enlarged,
    fitted,
    max_pixels,
    patches,
    pixel_bounds,
    resized,
)
from quire.media.source import Detail
from quire.media.video import Frame, VideoInfo

_START, _END, _PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"

_FRAME_ROWS = 768
"""The most rows of a frame."""
_VIDEO_ROWS = 115_200
"""The most rows of a whole Qwen2-VL video: nine tenths of a context of 128,000 tokens."""
_OVER_LEAST = 1.05
"""A frame may have this many times the minimum of pixels, however many frames share the context."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How frames are sampled and cut into patches.

    Attributes:
        patch: pixels on a patch's side.
        merge: patches on the side of a square, which becomes one row.
        together: frames that a patch spans.
        fps: frames read for each second.
        minimum, maximum: bounds of the frames that are read.
        pixels: bounds of a frame's or a video's pixels, as the processor counts them.
    """

    patch: int
    merge: int
    together: int
    fps: float
    minimum: int
    maximum: int
    pixels: tuple[int, int]

    @classmethod
    def open(cls, settings: Values, config: Values, patch: int, rows: tuple[int, int]) -> Self:
        """Read a processor's settings.

        Args:
            patch: default pixels on a patch's side.
            rows: default bounds, in rows.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, colours(config))
        patch, merge = (
            settings.integer("patch_size", default=patch),
            settings.integer("merge_size", default=2),
        )
        cell = (patch * merge) ** 2
        return cls(
            patch=patch,
            merge=merge,
            together=settings.integer("temporal_patch_size", default=2),
            fps=settings.number("fps", default=2.0, minimum=0),
            minimum=settings.integer("min_frames", default=4),
            maximum=settings.integer("max_frames", default=768),
            pixels=pixel_bounds(settings, rows[0] * cell, rows[1] * cell),
        )

    @property
    def cell(self) -> int:
        """Pixels on a square's side."""
        return self.patch * self.merge

    def squares(self, rows: int, columns: int) -> int:
        """Return the number of rows of a grid of patches."""
        return rows * columns // self.merge**2

    def cut(self, frames: Sequence[npt.NDArray[np.uint8]]) -> bytes:
        """Cut one moment into patches. Its last frame is repeated for missing ones."""
        filled = [*frames, *[frames[-1]] * (self.together - len(frames))]
        return patches(np.stack(filled), self.patch, self.merge).tobytes()


def opened(settings: Values, config: Values) -> tuple[Placeholders, Sampling]:
    """Return the arguments of a `QwenVideoProcessor`."""
    token = config.integer("video_token_id", minimum=0)
    return Placeholders(token), Sampling.open(settings, config, 14, rows=(128, _FRAME_ROWS))


class QwenVideoProcessor(VideoProcessor):
    """The video processor of Qwen2-VL and Qwen2.5-VL. A video is one item."""

    def __init__(self, placeholders: Placeholders, sampling: Sampling) -> None:
        super().__init__(placeholders)
        self._sampling = sampling

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        return cls(*opened(settings, config))

    @classmethod
    def open_beside_pictures(cls, settings: Values, config: Values) -> Self:
        """Open the processor by the image processor's settings, without their bounds of pixels."""
        bounds = ("size", "min_pixels", "max_pixels")
        values = {key: value for key, value in settings.values.items() if key not in bounds}
        return cls.open(settings.like(values), config)

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        own, together = self._sampling, self._sampling.together
        maximum = min(own.maximum, maximum, info.frames) // together * together
        wanted = min(max(info.frames / info.fps * own.fps, own.minimum), maximum)
        count = max(1, math.floor(wanted / together) * together)
        return [int(number * info.frames / count) for number in range(count)]

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        own = self._sampling
        shown: list[npt.NDArray[np.uint8]] = []
        for frame in frames:
            if not shown:
                check_stretch(frame.picture, param)
                size = frame.picture.size
                height, width = self._size(size[1], size[0], count, detail=detail)
            shown.append(resized(frame.picture, height, width))
        groups = [shown[at : at + own.together] for at in range(0, len(shown), own.together)]
        features = b"".join(own.cut(group) for group in groups)
        # A moment lasts as long as its frames are apart.
        seconds = own.together * info.frames / (len(shown) * info.fps)
        step = math.ceil(round(1e6 * seconds, 3))
        shape = (len(groups), height // own.patch, width // own.patch, step)
        rows = len(groups) * height * width // own.cell**2
        item = MediaItem.of("video", features, shape, tokens=rows, bidirectional=False)
        return (MediaPart(item),)

    def _size(self, height: int, width: int, frames: int, detail: Detail) -> tuple[int, int]:
        """Return the size of each frame. All frames share the rows that the context holds."""
        own = self._sampling
        minimum, own_maximum = own.pixels
        share = _VIDEO_ROWS * own.cell**2 * own.together // frames
        usual = max(min(own_maximum, share), int(minimum * _OVER_LEAST))
        maximum = max(minimum, min(usual, max_pixels(detail, own.cell)))
        return fitted(height, width, cell=own.cell, minimum=minimum, maximum=maximum)


class MomentVideoProcessor(VideoProcessor):
    """Makes an item of each moment of a video, with text around it."""

    def __init__(self, placeholders: Placeholders, sampling: Sampling) -> None:
        super().__init__(placeholders)
        self.sampling = sampling

    @abstractmethod
    def size(self, height: int, width: int, frames: int, detail: Detail) -> tuple[int, int]:
        """Return the height and width in pixels to which each frame is resized."""

    @abstractmethod
    def words(self, info: VideoInfo, first: Frame, last: Frame) -> tuple[str, str]:
        """Return the texts before and after a moment, which lasts from frame `first` to `last`."""

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        together = self.sampling.together
        shown: list[Frame] = []
        parts: list[MediaPart] = []
        for frame in frames:
            if not parts and not shown:
                check_stretch(frame.picture, param)
                width, height = frame.picture.size
                height, width = self.size(height, width, count, detail=detail)
            shown.append(frame)
            if len(shown) == together:
                parts.append(self._moment(info, shown, height, width=width))
                shown = []
        if shown:
            parts.append(self._moment(info, shown, height, width=width))
        return tuple(parts)

    def _moment(
        self, info: VideoInfo, frames: Sequence[Frame], height: int, width: int
    ) -> MediaPart:
        own = self.sampling
        features = own.cut([resized(frame.picture, height, width) for frame in frames])
        shape = (1, height // own.patch, width // own.patch, 0)
        rows = height * width // own.cell**2
        item = MediaItem.of("video", features, shape, tokens=rows, bidirectional=False)
        return MediaPart(item, *self.words(info, frames[0], frames[-1]))


class Qwen3VideoProcessor(MomentVideoProcessor):
    """The video processor of Qwen3-VL and Qwen3.5: each moment is preceded by its time."""

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        token = config.integer("video_token_id", minimum=0)
        placeholders = Placeholders(token, mark=f"{_START}{_PAD}{_END}")
        return cls(placeholders, Sampling.open(settings, config, 16, rows=(128, _FRAME_ROWS)))

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        own = self.sampling
        wanted = int(info.frames / info.fps * own.fps)
        count = min(max(wanted, own.minimum), own.maximum, maximum, info.frames)
        return [int(each) for each in np.linspace(0, info.frames - 1, count).round()]

    def words(self, info: VideoInfo, first: Frame, last: Frame) -> tuple[str, str]:
        seconds = (first.index + last.index) / 2 / info.fps
        return f"<{seconds:.1f} seconds>{_START}", _END

    def size(self, height: int, width: int, frames: int, detail: Detail) -> tuple[int, int]:
        """Return the size of each frame. The bounds hold for all frames together."""
        own = self.sampling
        minimum, maximum = own.pixels
        each = min(_FRAME_ROWS * own.cell**2, maximum // frames)
        each = max(each, int(minimum * _OVER_LEAST))
        maximum = int(max(minimum, min(each, max_pixels(detail, own.cell)) * frames))
        height, width = enlarged(height, width, own.cell)
        return fitted(height, width, cell=own.cell, minimum=minimum, maximum=maximum, frames=frames)
