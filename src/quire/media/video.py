"""Decodes the frames of untrusted videos that a model needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import PIL.Image

from quire.media import containers
from quire.media.source import FileLimits, refusal

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_DEFAULT_FPS = 24.0


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """Length and frame rate of a video, from its header.

    Attributes:
        frames: number of frames; estimated from the duration if the header has none.
        fps: average frames a second.
    """

    frames: int
    fps: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame of a video.

    Attributes:
        index: the frame's number, from 0.
        picture: the upright picture in RGB.
    """

    index: int
    picture: PIL.Image.Image


class Video:
    """An open video. Valid within the `with` block of `opened`."""

    def __init__(
        self, container: InputContainer, stream: VideoStream, limits: FileLimits, param: str
    ) -> None:
        self._container = container
        self._stream = stream
        self._limits = limits
        self._param = param
        context = stream.codec_context
        self._check_size(context.width, context.height)
        seconds = containers.duration(container, stream)
        containers.check_seconds(seconds, limits, param)
        fps = float(stream.average_rate or stream.guessed_rate or _DEFAULT_FPS)
        self.info = VideoInfo(stream.frames or max(1, round(seconds * fps)), fps)

    def frames(self, wanted: Sequence[int]) -> Iterator[Frame]:
        """Yield the frames with these indices, ascending, each decoded on demand.

        Raises:
            RequestError: a frame is missing, or larger than the header states.
        """
        numbers, found = frozenset(wanted), 0
        for index, frame in enumerate(self._container.decode(self._stream)):
            if index in numbers:
                self._check_size(frame.width, frame.height)
                found += 1
                picture = PIL.Image.fromarray(frame.to_ndarray(format="rgb24"))
                yield Frame(index, _upright(picture, frame.rotation))
            if found == len(numbers):
                return
            containers.check_seconds(index / self.info.fps, self._limits, self._param)
        if not found or self._stream.frames:  # else their number was a guess
            raise refusal(self._param, "it ends before its last frame; it is cut short")

    def _check_size(self, width: int, height: int) -> None:
        maximum = self._limits.pixels
        if width * height > maximum:
            size = f"{width} x {height} pixels"
            raise refusal(
                self._param, f"a frame has {size}, more than {maximum} in all", "too_large"
            )


@contextmanager
def opened(data: bytes, *, param: str, limits: FileLimits) -> Iterator[Video]:
    """Open a video whose header is within the limits. Decoding errors in the `with` block become a
    `RequestError`.

    Args:
        data: MP4, WebM, Matroska, Ogg or AVI.
        param: the request field that holds it, for errors.

    Raises:
        RequestError: the video lasts too long or its frames are too large (`media_too_large`), it
            is of another format, damaged or truncated (`media_invalid`), or PyAV is missing
            (`media_unsupported`).
    """
    with containers.opened(data, param, "MP4, WebM, Matroska or AVI") as container:
        if not container.streams.video:
            raise refusal(param, "it holds no video")
        stream = container.streams.video[0]
        containers.check_codec(stream, param)
        yield Video(container, stream, limits, param=param)


def _upright(picture: PIL.Image.Image, rotation: int) -> PIL.Image.Image:
    """Turn a picture as the file says; `rotation` counts degrees counter-clockwise."""
    turns = {
        90: PIL.Image.Transpose.ROTATE_90,
        180: PIL.Image.Transpose.ROTATE_180,
        270: PIL.Image.Transpose.ROTATE_270,
    }
    method = turns.get(rotation % 360)
    return picture if method is None else picture.transpose(method)
