"""Decodes untrusted pictures in five formats, within limits on size and work.

Pillow's plugins are called by name. So no other decoder can be reached, and the size is checked
before any pixel is decoded, without Pillow's own limit and its warnings.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator

import numpy as np
import PIL.Image
from PIL import ExifTags
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from quire.core.errors import RequestError
from quire.media.source import DEFAULT_LIMITS, FileLimits, refusal

_READERS: tuple[tuple[bytes, type[ImageFile]], ...] = (
    (b"\x89PNG\r\n\x1a\n", PngImageFile),
    (b"\xff\xd8\xff", JpegImageFile),
    (b"RIFF", WebPImageFile),
    (b"GIF87a", GifImageFile),
    (b"GIF89a", GifImageFile),
    (b"BM", BmpImageFile),
)

# EXIF 2.32, tag 274: the transposition that turns stored pixels upright. 1 is upright already.
_UPRIGHT = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}

# A progressive JPEG has about ten scans, each of which walks the whole picture, however few bytes
# it has. Metadata in many segments is joined in quadratic time.
_MAX_JPEG_SCANS = 100
_MAX_JPEG_SEGMENTS = 1000
_JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # markers with a length, and EOI
_EOI, _SOS = 0xD9, 0xDA

# PNG specification, third edition, 11.2.1 (samples of a pixel, by colour type) and 8.1 (the first
# column and row of each pass, and the steps to the next).
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
_PIECE = 1 << 20

_BMP_RUN_LENGTHS = (1, 2)  # BI_RLE8, BI_RLE4: Pillow decodes them in Python

# Pillow warns of damaged metadata: once a tag, thousands of lines for one file.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decode(data: bytes, *, param: str, limits: FileLimits = DEFAULT_LIMITS) -> PIL.Image.Image:
    """Decode a picture to upright RGB, with transparency laid on white. Of an animation, decode the
    first frame.

    Args:
        data: PNG, JPEG, WebP, GIF or BMP.
        param: the request field that holds it, for errors.
        limits: checked before anything is decoded.

    Raises:
        RequestError: the picture has too many pixels (`media_too_large`), or is of another format,
            damaged or truncated (`media_invalid`).
    """
    reader = next((reader for magic, reader in _READERS if data.startswith(magic)), None)
    if reader is None:
        raise refusal(param, "it is not a PNG, JPEG, WebP, GIF or BMP picture")
    try:
        if reader is JpegImageFile:
            _check_jpeg(data, param)
        image = reader(io.BytesIO(data))
        if image.width * image.height > limits.pixels:
            size = f"{image.width} x {image.height} pixels"
            raise refusal(param, f"it has {size}, more than {limits.pixels} in all", "too_large")
        if reader is BmpImageFile and image.info.get("compression") in _BMP_RUN_LENGTHS:
            raise refusal(param, "run-length coded BMP is not supported")
        image.load()
        if reader is PngImageFile:
            _check_png_rows(data, image, param)
        return _upright(image, _to_rgb(image))
    except RequestError:
        raise
    except PIL.Image.DecompressionBombError as error:  # of WebP and GIF, ahead of our own check
        raise refusal(param, f"it has more than {limits.pixels} pixels", "too_large") from error
    except Exception as error:  # damaged data makes the plugins raise nearly every kind there is
        reason = f"it cannot be decoded as {reader.format}; it is damaged or cut short"
        raise refusal(param, reason) from error


def _check_jpeg(data: bytes, param: str) -> None:
    """Refuse a JPEG that takes far longer to decode than its size suggests."""
    segments = scans = at = 0
    while (marker := _JPEG_MARKER.search(data, at)) and marker[1][0] != _EOI:
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        segments += 1
        scans += marker[1][0] == _SOS
        if scans > _MAX_JPEG_SCANS:
            raise refusal(param, f"the JPEG has more than {_MAX_JPEG_SCANS} scans")
        if segments > _MAX_JPEG_SEGMENTS:
            raise refusal(param, f"the JPEG has more than {_MAX_JPEG_SEGMENTS} segments")


def _check_png_rows(data: bytes, image: PIL.Image.Image, param: str) -> None:
    """Refuse a picture whose compressed data ends before its last row.

    Pillow accepts a zlib stream that ends early and leaves the missing rows zero. Decompressed
    bytes are counted only if the last row is zero or the picture is interlaced.
    """
    width, height, bits, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    last = image.crop((0, height - 1, width, height))
    if not interlaced and last.getbbox(alpha_only=False) is not None:
        return
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    missing = 0
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            missing += rows * (1 + -(-columns * bits * _PNG_CHANNELS[colour] // 8))
    unpacked = zlib.decompressobj()
    for packed in _png_data(data):
        while packed and missing > 0 and not unpacked.eof:
            missing -= len(unpacked.decompress(packed, _PIECE))
            packed = unpacked.unconsumed_tail
    if missing > 0 and len(unpacked.flush(_PIECE)) < missing:
        raise refusal(param, "the PNG ends before its last row; it is damaged or cut short")


def _png_data(data: bytes) -> Iterator[bytes]:
    """Yield the compressed pixel data, chunk by chunk."""
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            yield data[at + 8 : at + 8 + length]
        at += length + 12


def _to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert a picture of any mode of the five formats to RGB, with transparency laid on white.

    Only dropping the alpha channel would show the model colours that viewers do not see.
    """
    if image.mode.startswith("I"):
        image = _grey_16_to_8(image)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    if image.mode == "RGB" and max(image.info["transparency"]) > 255:
        # A colour of 16 bits a channel; Pillow has cut the pixels to 8.
        colour = image.info["transparency"]
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    seen = image if image.mode == "RGBA" else image.convert("RGBA")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), seen).convert(
        "RGB"
    )


def _grey_16_to_8(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return a 16-bit grey picture with the high byte of each pixel, as Pillow reduces 16-bit
    colour.
    """
    grey = np.asarray(image)
    high = PIL.Image.fromarray(np.clip(grey >> 8, 0, 255).astype(np.uint8))
    key = image.info.get("transparency")
    if key is None:
        return high
    alpha = PIL.Image.fromarray(np.where(grey == key, 0, 255).astype(np.uint8))
    return PIL.Image.merge("LA", (high, alpha))


def _upright(image: ImageFile, pixels: PIL.Image.Image) -> PIL.Image.Image:
    """Turn `pixels` as the file's EXIF or XMP orientation says. Return them unchanged if it cannot
    be read.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as above; the pixels themselves are whole
        return pixels
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return pixels if method is None else pixels.transpose(method)
