"""Files of sound and video, made here."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import PIL.Image

Samples = npt.NDArray[np.float64]


def tone(seconds: float, hertz: float = 440.0, rate: int = 16_000) -> Samples:
    """A sine of half the full scale, `[samples]`."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def wav(
    *channels: Samples, rate: int = 16_000, bits: int = 16, code: int = 1, size: int | None = None
) -> bytes:
    """A RIFF file; `size` is what it says of its length."""
    samples = np.stack(channels, axis=1)
    if code == 3:
        body = samples.astype({32: "<f4", 64: "<f8"}[bits]).tobytes()
    elif bits == 8:
        body = (samples * 127 + 128).astype("u1").tobytes()
    else:
        whole = (samples * (2.0 ** (bits - 1) - 1)).astype("<i8")
        body = whole.view("u1").reshape(-1, 8)[:, : bits // 8].tobytes()
    each = len(channels) * bits // 8
    head = struct.pack("<HHIIHH", code, len(channels), rate, rate * each, each, bits)
    chunks = (
        b"fmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    )
    chunks += b"data" + struct.pack("<I", len(body) if size is None else size) + body
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def encoded_sound(samples: Samples, kind: str, codec: str, rate: int = 16_000) -> bytes:
    """Sound by one of FFmpeg's encoders."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(
            samples.astype(np.float32)[None], format="fltp", layout="mono"
        )
        frame.sample_rate = rate
        converted = av.AudioResampler(
            format=stream.format.name,
            layout="mono",
            rate=rate,
            frame_size=stream.frame_size or 1024,
        )
        for part in (*converted.resample(frame), *converted.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()


def video(
    pictures: Sequence[PIL.Image.Image], kind: str = "mp4", codec: str = "mpeg4", fps: int = 10
) -> bytes:
    """A film of pictures of one size."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def greys(count: int, size: tuple[int, int] = (64, 48)) -> list[PIL.Image.Image]:
    """Plain pictures; the grey of each tells its number."""
    return [PIL.Image.new("RGB", size, (20 + 3 * number,) * 3) for number in range(count)]
