"""Videos for ERNIE 4.5 VL: frames with their time written on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import Placeholders, VideoProcessor
from quire.media.processors.qwen import check_stretch, fitted, max_pixels, patches, resized
from quire.media.processors.qwen_video import Sampling
from quire.media.source import Detail
from quire.media.video import Frame, VideoInfo

_PAIR = 2
"""Frames that are encoded together."""
_ROWS = 299, 1196
"""Default minimum and maximum of a frame's rows."""
_LETTERS = 0.1
"""Height of letters relative to a frame's shorter side, and width of outlines relative to letters.
"""


class ErnieVideoProcessor(VideoProcessor):
    """The video processor of ERNIE 4.5 VL. A video is one item.

    Args:
        every: whether to read all frames, up to the maximum, instead of a number per second.
        font: font file for the times; None writes no times on frames.
    """

    def __init__(
        self, placeholders: Placeholders, sampling: Sampling, *, every: bool, font: Path | None
    ) -> None:
        super().__init__(placeholders)
        self._sampling, self._every, self._font = sampling, every, font

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `video_preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different pixels than this class computes.
        """
        known = settings.like(settings.values | _frames(settings))
        placeholders = Placeholders(config.integer("video_token_id", minimum=0))
        sampling = Sampling.open(known, config, 14, rows=_ROWS)
        return cls(placeholders, sampling, every=not known.has("fps"), font=_font(known))

    def sample_frames(self, info: VideoInfo, maximum: int) -> Sequence[int]:
        own = self._sampling
        wanted = info.frames if self._every else info.frames / info.fps * own.fps
        wanted = min(max(wanted, own.minimum), own.maximum, maximum, info.frames)
        step = info.frames / wanted
        # As published: in single precision, and one more where the division's rounding gives it.
        count = min(math.ceil(info.frames / step), maximum)
        return [int(each) for each in (np.arange(count) * step).astype(np.float32)]

    def preprocess(
        self, info: VideoInfo, frames: Iterator[Frame], count: int, param: str, detail: Detail
    ) -> Parts:
        own = self._sampling
        shown: list[npt.NDArray[np.uint8]] = []
        for frame in frames:
            if not shown:
                check_stretch(frame.picture, param)
                width, height = frame.picture.size
                minimum, maximum = own.pixels
                maximum = int(max(minimum, min(maximum, max_pixels(detail, own.cell))))
                height, width = fitted(
                    height, width, cell=own.cell, minimum=minimum, maximum=maximum
                )
            timed = self._timed(frame.picture, frame.index / info.fps)
            shown.append(resized(timed, height, width))
        shown += [shown[-1]] * (len(shown) % _PAIR)
        features = b"".join(patches(each[None], own.patch, own.merge).tobytes() for each in shown)
        moments, rows, columns = len(shown) // _PAIR, height // own.patch, width // own.patch
        tokens = moments * rows * columns // own.merge**2
        shape = (moments, rows, columns, 0)
        item = MediaItem.of("video", features, shape, tokens=tokens, bidirectional=False)
        return (MediaPart(item),)

    def _timed(self, picture: PIL.Image.Image, seconds: float) -> PIL.Image.Image:
        """Return the frame with its time in the upper left corner, black with a white outline."""
        if self._font is None:
            return picture
        minutes, rest = divmod(seconds, 60)
        hours, minutes = divmod(int(minutes), 60)
        size = int(min(picture.size) * _LETTERS)
        if size < 1:
            return picture
        timed = picture.copy()
        PIL.ImageDraw.Draw(timed).text(
            (0, 0),
            f"time: {hours:02d}:{minutes:02d}:{rest:05.02f}",
            font=PIL.ImageFont.truetype(self._font, size),
            fill=(0, 0, 0),
            stroke_width=int(size * _LETTERS),
            stroke_fill=(255, 255, 255),
        )
        return timed


def _frames(settings: Values) -> dict[str, int]:
    """Return the bounds of the number of frames."""
    return {
        "min_frames": settings.integer("min_frames", default=16),
        "max_frames": settings.integer("max_frames", default=180),
    }


def _font(settings: Values) -> Path | None:
    """Return the font file for times, beside the settings; None if frames get no times."""
    if not settings.values.get("draw_on_frames", True):
        return None
    name = settings.word("font", default="Roboto-Regular.ttf")
    path = settings.file.parent / Path(name).name
    try:
        PIL.ImageFont.truetype(path, 10)
    except OSError as error:
        raise settings.error("font", f"which is no font file beside {settings.file}") from error
    return path
