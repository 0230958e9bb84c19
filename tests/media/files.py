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
    """Return a sine of half the full scale, `[samples]`."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def wav(
    *channels: Samples, rate: int = 16_000, bits: int = 16, code: int = 1, size: int | None = None
) -> bytes:
    """Return a RIFF file; `size` is what it says of its length."""
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
    """Return sound by one of FFmpeg's encoders."""
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
    pictures: Sequence[PIL.Image.Image],
    kind: str = "mp4",
    codec: str = "mpeg4",
    fps: int = 10,
    sound: Samples | None = None,
) -> bytes:
    """Return a film of pictures of one size; its sound is of 16,000 samples a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        heard = None if sound is None else container.add_stream("aac", rate=16_000, layout="mono")
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if heard is not None and sound is not None:
            for at in range(0, len(sound), 1024):
                part = sound[None, at : at + 1024].astype(np.float32)
                piece = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                piece.sample_rate, piece.pts = 16_000, at
                container.mux(heard.encode(piece))
            container.mux(heard.encode(None))
    return file.getvalue()


def greys(count: int, size: tuple[int, int] = (64, 48)) -> list[PIL.Image.Image]:
    """Return plain pictures; the grey of each tells its number."""
    return [PIL.Image.new("RGB", size, (20 + 3 * number,) * 3) for number in range(count)]


def pdf(*pages: str) -> bytes:
    """Return a document; each page has one line of text, and a black square below it."""
    count = len(pages)
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(count))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 24 Tf 20 150 Td ({text}) Tj ET 50 50 60 60 re f"
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents "
            f"{5 + 2 * number} 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{each}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return body + f"{end}startxref\n{len(body)}\n%%EOF\n".encode()
