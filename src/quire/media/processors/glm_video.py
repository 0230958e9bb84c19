"""Videos for GLM-4.1V to GLM-4.6V: each two frames form a moment, with its time in the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from quire.core.values import Values
from quire.media.processors.base import Placeholders
from quire.media.processors.qwen import enlarged, fitted, max_pixels
from quire.media.processors.qwen_video import MomentVideoProcessor, Sampling
from quire.media.source import Detail
from quire.media.video import Frame, VideoInfo

_BEGIN, _END = "<|begin_of_image|>", "<|end_of_image|>"

_PIXELS = 112 * 112, 28 * 28 * 2 * 30_000
"""Default minimum and maximum of the pixels of all frames of a video."""
_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
"""Moments a second that GLM-4.6V reads: (longest video in seconds, rate)."""
_MOST_FRAMES = 640
"""The most frames of a video that GLM-4.6V reads."""


class GlmVideoProcessor(MomentVideoProcessor):
    """The video processor of GLM-4.1V and GLM-4.5V.

    Args:
        seconds: the longest video read at the full frame rate; frames of a longer one are spread
            evenly.
    """

    def __init__(self, placeholders: Placeholders, sampling: Sampling, seconds: int) -> None:
        super().__init__(placeholders, sampling)
        self._seconds = seconds

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        A video's rows use the token `<|video|>`, as chat templates write it. Transformers uses the
        image token there. The model does not read either, as features replace both.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        placeholders = Placeholders(config.integer("video_token_id", minimum=0))
        cell = (
            settings.integer("patch_size", default=14) * settings.integer("merge_size", default=2)
        ) ** 2
        rows = _PIXELS[0] // cell, _PIXELS[1] // cell
        sampling = Sampling.open(settings, config, 14, rows=rows)
        return cls(placeholders, sampling, settings.integer("max_duration", default=300))

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        wanted = sorted(set(self._wanted(info)))
        if len(wanted) <= maximum:
            return wanted
        return [wanted[number * len(wanted) // maximum] for number in range(maximum)]

    def _wanted(self, info: VideoInfo) -> Sequence[int]:
        """Return the frame indices to read; some may occur twice."""
        seconds, rate = info.frames / info.fps, self.sampling.fps
        if seconds <= self._seconds:
            times = np.arange(max(int(seconds * rate), 1)) / rate
        else:
            count = int(self._seconds * rate)
            if count >= info.frames:
                return range(info.frames)
            times = np.linspace(0, seconds, count)
        return [min(info.frames - 1, math.ceil(time * info.fps)) for time in times]

    def words(self, info: VideoInfo, first: Frame, last: Frame) -> tuple[str, str]:
        return _BEGIN, f"{_END}{int(first.index / info.fps)}"

    def size(self, height: int, width: int, frames: int, detail: Detail) -> tuple[int, int]:
        """Return the size of a frame. The bounds hold for all frames together; an odd number is
        rounded up.
        """
        own = self.sampling
        frames += -frames % own.together
        minimum, maximum = own.pixels
        maximum = int(max(minimum, min(maximum, max_pixels(detail, own.cell) * frames)))
        height, width = enlarged(height, width, own.cell)
        return fitted(height, width, cell=own.cell, minimum=minimum, maximum=maximum, frames=frames)


class Glm46VideoProcessor(GlmVideoProcessor):
    """The video processor of GLM-4.6V and GLM-OCR: shorter videos are read at higher rates."""

    def _wanted(self, info: VideoInfo) -> Sequence[int]:
        seconds = info.frames / info.fps
        bounded = min(seconds, _RATES[-1][0])
        rate = next(rate for longest, rate in _RATES if bounded <= longest)
        step = 1 / (self.sampling.together * rate)
        count = min(int(bounded * rate * self.sampling.together), _MOST_FRAMES)
        found: list[int] = []
        start, end = 0, info.frames - 1
        if info.frames >= count:
            found = self._every(info, step, int(seconds))
            if len(found) < count:
                start, end = (found[0], found[-1]) if found else (start, end)
        if len(found) != count:
            found = [int(each) for each in np.linspace(start, end, count)]
        return found or [0]

    @staticmethod
    def _every(info: VideoInfo, step: float, until: int) -> list[int]:
        """Return the first frame of each `step` seconds, up to `until` seconds."""
        found: list[int] = []
        due = 0.0
        for index in range(info.frames):
            if index * (1 / info.fps) >= due:
                found.append(index)
                due += step
                if due >= until:
                    break
        return found

    def words(self, info: VideoInfo, first: Frame, last: Frame) -> tuple[str, str]:
        return _BEGIN, f"{_END}{first.index / info.fps:.1f} seconds"
