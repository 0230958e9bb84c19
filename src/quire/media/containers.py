"""Opens untrusted sound and video files with PyAV, which is optional.

FFmpeg knows hundreds of formats, and some of them are lists of other files. Here a file's first
bytes choose one of a few demuxers, and only the codecs named below are decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.media.source import FileLimits, refusal

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

_CODECS = frozenset(
    (
        *("aac", "alac", "amr_nb", "amr_wb", "flac", "mp2", "mp3", "opus", "vorbis"),
        *("pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_u8", "pcm_f32le", "pcm_alaw", "pcm_mulaw"),
        *("av1", "h263", "h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9"),
    )
)
_MPEG_AUDIO = (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3", b"\xff\xe2")


def _demuxer(data: bytes) -> str | None:
    """Return FFmpeg's name of a file's format, judged by its first bytes; None if unknown."""
    head = data[:12]
    if head[4:8] == b"ftyp":
        return "mov"
    if head.startswith(b"RIFF"):
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:])
    if head.startswith((b"ID3", *_MPEG_AUDIO)):
        return "mp3"
    named = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "matroska"}
    if head[:4] in named:
        return named[head[:4]]
    return "aac" if head.startswith((b"\xff\xf1", b"\xff\xf9")) else None


@contextmanager
def opened(data: bytes, param: str, formats: str) -> Iterator[InputContainer]:
    """Open a file. Errors of FFmpeg within the `with` block become a `RequestError`.

    Args:
        formats: the accepted formats, for the error message.

    Raises:
        RequestError: the format is unknown or the file damaged (`media_invalid`), or PyAV is
            missing (`media_unsupported`).
    """
    format = _demuxer(data)
    if format is None:
        raise refusal(param, f"it is not a {formats} file")
    try:
        import av
    except ImportError as error:
        reason = "reading it needs PyAV, which this server lacks (pip install 'quire-serve[media]')"
        raise refusal(param, reason, "unsupported") from error
    av.logging.set_level(None)
    try:
        with av.open(
            io.BytesIO(data), "r", format=format, options={"protocol_whitelist": ""}
        ) as found:
            yield found
    except RequestError:
        raise
    except Exception as error:  # damaged data makes PyAV raise nearly every kind there is
        # FFmpeg lacks memory for the sizes that damaged files name; Python's own lack is no fault.
        if isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError):
            raise
        raise refusal(param, "it cannot be decoded; it is damaged or cut short") from error


def check_codec(stream: AudioStream | VideoStream, param: str) -> None:
    """Refuse a stream with an unsupported codec."""
    codec = stream.codec_context.codec.canonical_name
    if codec not in _CODECS:
        raise refusal(param, f"its codec is {codec}, which is not supported")


def check_seconds(seconds: float, limits: FileLimits, param: str) -> None:
    """Refuse a file that lasts longer than the limit."""
    if seconds > limits.seconds:
        reason = f"it lasts {seconds:.1f} s, more than {limits.seconds:g} s"
        raise refusal(param, reason, "too_large")


def duration(container: InputContainer, stream: AudioStream | VideoStream) -> float:
    """Return the duration in seconds that the file's header states; 0 if it states none."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1e6
