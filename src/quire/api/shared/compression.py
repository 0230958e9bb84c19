"""Decompression of request bodies."""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import Callable, Iterator

from quire.core.errors import RequestError, UnsupportedMediaType

_AT_ONCE = 1 << 20
"""Bytes to decompress before other tasks of the event loop get a turn."""
_SLICE = 256
"""Bytes passed to zstd at a time: the densest blocks expand from 4 bytes to 128 KB."""
_WINDOW = 8 << 20
"""Bytes of zstd's window: the most that RFC 8878 asks decoders to support."""


def _zstd(body: bytes) -> Iterator[bytes]:
    import zstandard  # native code, loaded by the first body that needs it

    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    frame = decompressor.decompressobj()
    started = False
    for start in range(0, len(body), _SLICE):
        data = body[start : start + _SLICE]
        while data:
            yield frame.decompress(data)
            started, data = not frame.eof, frame.unused_data
            if frame.eof:
                frame = decompressor.decompressobj()
    if started:
        raise EOFError("the data ends before its last frame is complete")


def _gzip(body: bytes) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BytesIO(body), mode="rb") as reader:
        while piece := reader.read(_AT_ONCE):
            yield piece


_READERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "zstd": _zstd,
}


def check_coding(header: str) -> str:
    """Return the coding that a `Content-Encoding` header names, empty for none.

    Raises:
        UnsupportedMediaType: the server does not read it.
    """
    coding = header.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding not in _READERS:
        raise UnsupportedMediaType(
            f"The body's Content-Encoding is '{coding[:40]}'; this server reads gzip and zstd.",
            code="unsupported_media_type",
        )
    return coding


async def unpacked(body: bytes, coding: str, take: Callable[[int], None]) -> bytes:
    """Return the decompressed body.

    Args:
        coding: result of `check_coding`, not empty.
        take: told of the bytes of each piece before it is kept; raises where they are too many,
            so that a small body cannot unpack to a large one.

    Raises:
        RequestError: the body is not of that coding, or is cut off (code `invalid_encoding`).
    """
    pieces: list[bytes] = []
    unpacking, size = _READERS[coding](body), 0
    while True:
        try:
            piece = next(unpacking, None)
        except Exception as error:  # each library has its own for data that is not of its coding
            raise RequestError(
                f"The body's Content-Encoding is '{coding}', but it cannot be decompressed: "
                f"{error}.",
                code="invalid_encoding",
            ) from None
        if piece is None:
            return b"".join(pieces)
        take(len(piece))
        pieces.append(piece)
        size += len(piece)
        if size >= _AT_ONCE:
            size = 0
            await asyncio.sleep(0)
