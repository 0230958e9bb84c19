"""Pictures: real files of each format, made here; transformers as the judge of pixels."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags
from PIL.PngImagePlugin import PngInfo

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.media.images import decode
from quire.media.kinds import KINDS
from quire.media.processors.base import ImageProcessor, MediaProcessor, Placeholders
from quire.media.processors.gemma4 import BUDGETS, Cutter, Gemma4ImageProcessor, fitted
from quire.media.source import Detail, FileLimits

DEMO = Path(__file__).parents[2] / "src" / "quire" / "demo" / "model"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def noise(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    *,
    bits: int,
    colour: int,
    rows: bytes = b"",
    extra: bytes = b"",
    interlaced: int = 0,
) -> bytes:
    """Return a PNG whose header says what it is told to; `rows` start with a filter byte each."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    body = (
        chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + body


def pixel(data: bytes, at: tuple[int, int] = (0, 0)) -> Any:
    image = decode(data, param="p")
    assert image.mode == "RGB"
    return image.getpixel(at)


def refused(data: bytes, code: str = "media_invalid", **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        decode(data, param="messages[0].content[1]", **options)
    error = caught.value
    assert (error.code, error.status, error.param) == (code, 400, "messages[0].content[1]")
    assert "'messages[0].content[1]'" in error.message
    return error.message


def decoded_or_refused(data: bytes) -> PIL.Image.Image | None:
    """Return a sound picture, or None if it was refused in the way that refusals are."""
    image = refused = None
    try:
        image = decode(data, param="p", limits=FileLimits(pixels=100_000))
    except RequestError as error:
        refused = error
    if image is None:
        assert refused is not None
        assert refused.code in ("media_invalid", "media_too_large")
        return None
    assert image.mode == "RGB"
    assert len(image.tobytes()) == image.width * image.height * 3 > 0
    return image


def processor(**options: Any) -> Gemma4ImageProcessor:
    sizes = {
        name: options.pop(name, default)
        for name, default in (("patch", 8), ("pooling", 2), ("max_soft_tokens", 70))
    }
    return Gemma4ImageProcessor(Placeholders(18, (17,), (19,)), Cutter(**sizes), **options)


def read(ours: MediaProcessor, data: bytes, param: str = "p", detail: Detail = "auto") -> MediaItem:
    """Return the one item of a picture."""
    (part,) = ours.read(data, param=param, detail=detail)
    assert (part.before, part.after) == ("", "")
    return part.item


class TestDecoding:
    @pytest.mark.parametrize("kind", ["PNG", "BMP"])
    def test_pixels_come_back(self, kind: str) -> None:
        image = noise(13, 7)
        assert decode(encoded(image, kind), param="p").tobytes() == image.tobytes()

    @pytest.mark.parametrize("kind", FORMATS)
    def test_each_format(self, kind: str) -> None:
        image = PIL.Image.new("RGB", (33, 17), (200, 30, 90))
        found = decode(encoded(image, kind), param="p")
        assert (found.mode, found.size) == ("RGB", (33, 17))
        assert np.abs(np.asarray(found).astype(int) - (200, 30, 90)).max() <= 3

    @pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "TGA", "JPEG2000", "PDF", "DDS"])
    def test_other_formats_are_refused(self, kind: str) -> None:
        assert "not a PNG, JPEG" in refused(encoded(noise(16, 16), kind))

    def test_psd_svg_and_nothing_are_refused(self) -> None:
        for data in (b"8BPS\0\1" + bytes(60), b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0", b""):
            assert "not a PNG, JPEG" in refused(data)

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_an_animation_is_its_first_frame(self, kind: str) -> None:
        frames = [PIL.Image.new("RGB", (8, 8), c) for c in ("red", "lime", "blue")]
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert pixel(data) == (255, 0, 0)

    def test_a_gif_frame_that_leaves_the_screen_counts_with_its_own_size(self) -> None:
        data = bytearray(encoded(PIL.Image.new("L", (8, 8)), "GIF"))
        at = data.index(b",\0\0\0\0\x08\0\x08\0")
        data[at + 5 : at + 9] = struct.pack("<HH", 8000, 7000)
        assert "8000 x 7000" in refused(bytes(data), "media_too_large")
        data[at + 5 : at + 9] = struct.pack("<HH", 65000, 65000)
        refused(bytes(data), "media_too_large")

    def test_a_jpeg_with_a_second_picture_is_its_first(self) -> None:
        first, second = (PIL.Image.new("RGB", (8, 8), c) for c in ("white", "black"))
        data = encoded(first, "MPO", save_all=True, append_images=[second])
        assert pixel(data) == (255, 255, 255)


class TestModes:
    @pytest.mark.parametrize(
        ("mode", "colour", "expected"),
        [
            ("1", 1, (255, 255, 255)),
            ("L", 77, (77, 77, 77)),
            ("LA", (77, 255), (77, 77, 77)),
            ("LA", (0, 0), (255, 255, 255)),
            ("RGB", (1, 2, 3), (1, 2, 3)),
            ("RGBA", (1, 2, 3, 255), (1, 2, 3)),
            ("RGBA", (9, 9, 9, 0), (255, 255, 255)),
            ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
            ("I;16", 0xABCD, (0xAB, 0xAB, 0xAB)),
            ("I;16", 0xFFFF, (255, 255, 255)),
            ("P", 3, (30, 31, 32)),
        ],
    )
    def test_png(self, mode: str, colour: Any, expected: tuple[int, int, int]) -> None:
        image = PIL.Image.new(mode, (4, 3), colour)
        if mode == "P":
            image.putpalette([value for i in range(4) for value in (i * 10, i * 10 + 1, i + 29)])
        assert pixel(encoded(image), (3, 2)) == expected

    def test_a_palettes_transparent_entry_is_white(self) -> None:
        for kind in ("PNG", "GIF"):
            image = PIL.Image.new("P", (2, 1))
            image.putpalette([10, 20, 30, 40, 50, 60])
            image.putpixel((1, 0), 1)
            data = encoded(image, kind, transparency=1)
            assert (pixel(data), pixel(data, (1, 0))) == ((10, 20, 30), (255, 255, 255))

    def test_a_palettes_half_transparent_entries(self) -> None:
        image = PIL.Image.new("P", (2, 1))
        image.putpalette([0, 0, 0, 40, 50, 60])
        image.putpixel((1, 0), 1)
        data = encoded(image, transparency=bytes([128, 255]))
        assert (pixel(data), pixel(data, (1, 0))) == ((127, 127, 127), (40, 50, 60))

    def test_transparent_colours(self) -> None:
        grey = png(2, 1, bits=8, colour=0, rows=b"\0\x05\x06", extra=chunk(b"tRNS", b"\0\x05"))
        assert (pixel(grey), pixel(grey, (1, 0))) == ((255, 255, 255), (6, 6, 6))
        rows, key = b"\0\x12\x34\x12\x35", chunk(b"tRNS", b"\x12\x34")
        deep = png(2, 1, bits=16, colour=0, rows=rows, extra=key)
        assert (pixel(deep), pixel(deep, (1, 0))) == ((255, 255, 255), (0x12, 0x12, 0x12))
        rows, key = b"\0\1\2\3\4\5\6", chunk(b"tRNS", b"\0\1\0\2\0\3")
        colour = png(2, 1, bits=8, colour=2, rows=rows, extra=key)
        assert (pixel(colour), pixel(colour, (1, 0))) == ((255, 255, 255), (4, 5, 6))
        rows, key = b"\0" + bytes(range(1, 13)), chunk(b"tRNS", bytes(range(1, 7)))
        colour = png(2, 1, bits=16, colour=2, rows=rows, extra=key)
        assert (pixel(colour), pixel(colour, (1, 0))) == ((255, 255, 255), (7, 9, 11))

    def test_16_bit_colour_with_alpha(self) -> None:
        rows = b"\0" + bytes([0xAB, 1, 0xCD, 2, 0xEF, 3, 0xFF, 0xFF])
        assert pixel(png(1, 1, bits=16, colour=6, rows=rows)) == (0xAB, 0xCD, 0xEF)

    def test_cmyk_jpeg(self) -> None:
        image = PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0))
        red, green, blue = pixel(encoded(image, "JPEG", quality=100))
        assert red > 250
        assert max(green, blue) < 5

    def test_transparency_equals_transformers(self) -> None:
        transforms = pytest.importorskip("transformers.image_transforms")
        pixels = np.random.default_rng(3).integers(0, 256, (40, 50, 4), dtype=np.uint8)
        image = PIL.Image.fromarray(pixels)
        expected = transforms.convert_to_rgb(image, return_numpy=True)
        assert np.array_equal(np.asarray(decode(encoded(image), param="p")), expected)


class TestOrientation:
    STORED = PIL.Image.fromarray(np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10)

    @pytest.mark.parametrize("orientation", range(10))
    @pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
    def test_exif_is_applied_as_pillow_does(self, orientation: int, kind: str) -> None:
        image_ops = pytest.importorskip("PIL.ImageOps")
        exif = PIL.Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(self.STORED, kind, exif=exif, **options)
        expected = image_ops.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB")
        found = decode(data, param="p")
        assert found.size == ((2, 3) if 5 <= orientation <= 8 else (3, 2))
        assert found.tobytes() == expected.tobytes()

    def test_known_corners(self) -> None:
        exif = PIL.Image.Exif()
        exif[ExifTags.Base.Orientation] = 6  # the camera's right side is up
        found = decode(encoded(self.STORED, exif=exif), param="p")
        assert found.getpixel((1, 0)) == self.STORED.getpixel((0, 0))
        assert found.getpixel((1, 2)) == self.STORED.getpixel((2, 0))

    def test_xmp_counts_where_there_is_no_exif(self) -> None:
        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="3"/>')
        expected = self.STORED.transpose(PIL.Image.Transpose.ROTATE_180)
        found = decode(encoded(self.STORED, pnginfo=info), param="p")
        assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("exif", [b"Exif\0\0II", b"Exif\0\0rubbish", b"Exif\0\0", bytes(100)])
    def test_damaged_exif_leaves_the_picture_as_it_is(self, exif: bytes) -> None:
        found = decode(encoded(self.STORED, exif=exif), param="p")
        assert found.tobytes() == self.STORED.tobytes()


class TestRefusals:
    def test_too_many_pixels_are_named_beside_the_limit(self) -> None:
        message = refused(encoded(noise(11, 10)), "media_too_large", limits=FileLimits(pixels=109))
        assert "11 x 10" in message
        assert "109" in message
        found = decode(encoded(noise(11, 10)), param="p", limits=FileLimits(pixels=110))
        assert found.size == (11, 10)

    def test_a_header_of_enormous_size(self) -> None:
        data = png(100_000, 100_000, bits=8, colour=2)
        assert "100000 x 100000" in refused(data, "media_too_large")

    def test_a_small_file_of_many_pixels(self) -> None:
        deflate = zlib.compressobj(9)
        rows = b"".join(deflate.compress(bytes(2501)) for _ in range(20_000)) + deflate.flush()
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0))
        data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        assert len(data) < 100_000
        assert "20000 x 20000" in refused(data, "media_too_large")

    def test_enormous_sizes_in_the_other_formats(self) -> None:
        bmp = bytearray(encoded(noise(4, 4), "BMP"))
        bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
        refused(bytes(bmp), "media_too_large")
        jpeg = bytearray(encoded(noise(4, 4), "JPEG"))
        at = jpeg.index(b"\xff\xc0")
        jpeg[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
        refused(bytes(jpeg), "media_too_large")
        gif = bytearray(encoded(noise(4, 4), "GIF"))
        gif[6:10] = struct.pack("<HH", 60_000, 60_000)
        refused(bytes(gif), "media_too_large")
        frames = [noise(4, 4), noise(4, 4, 1)]
        webp = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
        at = webp.index(b"VP8X")
        webp[at + 12 : at + 18] = (15_999).to_bytes(3, "little") * 2
        refused(bytes(webp), "media_too_large")

    @pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
    def test_no_pixels(self, size: tuple[int, int]) -> None:
        refused(png(*size, bits=8, colour=2))
        gif = bytearray(encoded(PIL.Image.new("L", (8, 8)), "GIF"))
        at = gif.index(b",\0\0\0\0\x08\0\x08\0")
        gif[6:10] = gif[at + 5 : at + 9] = struct.pack("<HH", *size)
        refused(bytes(gif))

    def test_text_and_profiles_that_unfold_without_end(self) -> None:
        bomb = zlib.compress(bytes(200_000_000), 9)
        for kind, head in ((b"zTXt", b"k\0\0"), (b"iCCP", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0")):
            extra = chunk(kind, head + bomb)
            refused(png(1, 1, bits=8, colour=0, rows=b"\0\0", extra=extra))

    def test_a_jpeg_of_countless_scans(self) -> None:
        data = encoded(noise(64, 64), "JPEG", progressive=True)
        scan = data[data.rindex(b"\xff\xda") : -2]
        assert decode(data, param="p").size == (64, 64)
        assert "scans" in refused(data[:-2] + scan * 200 + data[-2:])

    def test_a_jpeg_of_countless_segments(self) -> None:
        data = encoded(noise(8, 8), "JPEG")
        assert "segments" in refused(data[:2] + b"\xff\xe1\0\x09Exif\0\0x" * 2000 + data[2:])

    def test_what_follows_a_jpeg_is_not_counted(self) -> None:
        data = encoded(noise(8, 8), "JPEG") + b"\xff\xda\0\2" * 2000  # a phone's film, say
        assert decode(data, param="p").size == (8, 8)

    def test_a_run_length_coded_bmp(self) -> None:
        palette = bytes(range(256)) * 4
        header = struct.pack("<IiiHHIIiiII", 40, 5_000_000, 1, 1, 8, 1, 0, 0, 0, 256, 0)
        start = struct.pack("<IHHI", 2000, 0, 0, 14 + 40 + 1024)
        assert "run-length" in refused(b"BM" + start + header + palette + b"\1\5\0\0")

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_truncated_file_is_refused_unless_all_its_pixels_are_there(self, kind: str) -> None:
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(noise(24, 20), kind, **options)
        whole = decode(data, param="p").tobytes()
        kept = 0
        for length in range(len(data)):
            found = decoded_or_refused(data[:length])
            assert found is None or found.tobytes() == whole
            kept += found is not None
        assert kept <= 24  # an end mark, a checksum

    @pytest.mark.parametrize(("colour", "bits"), [(0, 1), (0, 8), (0, 16), (2, 8), (2, 16), (6, 8)])
    @pytest.mark.parametrize("value", [0, 0x5A])
    def test_a_png_whose_compressed_data_ends_early(
        self, colour: int, bits: int, value: int
    ) -> None:
        row = b"\0" + bytes([value]) * -(-10 * bits * {0: 1, 2: 3, 6: 4}[colour] // 8)
        whole = png(10, 20, bits=bits, colour=colour, rows=row * 20)
        assert decode(whole, param="p").size == (10, 20)
        for rows in (row * 19, row * 19 + row[:-1], row, b""):
            refused(png(10, 20, bits=bits, colour=colour, rows=rows))

    def test_an_interlaced_png_whose_compressed_data_ends_early(self) -> None:
        rows = b"".join(
            (b"\0" + b"\7" * columns) * count
            for columns, count in ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4))
        )
        assert decode(png(8, 8, bits=8, colour=0, rows=rows, interlaced=1), param="p")
        for length in (0, 20, len(rows) - 9, len(rows) - 1):
            refused(png(8, 8, bits=8, colour=0, rows=rows[:length], interlaced=1))

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(FORMATS), st.data())
    def test_damaged_files_are_decoded_or_refused(self, kind: str, data: st.DataObject) -> None:
        file = bytearray(SMALL[kind])
        for at in data.draw(st.lists(st.integers(0, len(file) - 1), min_size=1, max_size=8)):
            file[at] = data.draw(st.integers(0, 255))
        decoded_or_refused(bytes(file))

    @settings(max_examples=300, deadline=None)
    @given(
        st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF89a", b"BM"]),
        st.binary(max_size=300),
    )
    def test_garbage_is_refused(self, magic: bytes, rest: bytes) -> None:
        decoded_or_refused(magic + rest)


SMALL = {kind: encoded(noise(9, 6), kind) for kind in FORMATS}


class TestGemma4:
    @pytest.mark.parametrize(
        ("size", "shape"),  # width x height; rows x columns of patches of 8, in cells of 2 x 2
        [
            ((64, 64), (16, 16)),  # 8 x 8 cells: 64 of 70
            ((112, 160), (20, 14)),  # 7 x 10: exactly the budget, not resized
            ((1920, 1080), (12, 22)),
            ((1, 1), (16, 16)),
            ((10_000, 1), (2, 140)),  # one cell high, all the budget wide
            ((1, 10_000), (140, 2)),
            ((90, 1), (2, 140)),  # the width that the ratio gives is over the budget
            ((4900, 69), (2, 140)),
        ],
    )
    def test_shapes(self, size: tuple[int, int], shape: tuple[int, int]) -> None:
        image = read(processor(), encoded(noise(*size)), param="p")
        assert image.shape == shape
        assert image.tokens == shape[0] * shape[1] // 4
        assert len(image.features) == shape[0] * shape[1] * 8 * 8 * 3

    def test_the_layout_of_patches(self) -> None:
        width, height = 112, 160  # what the budget asks for: no resizing
        pixels = np.zeros((height, width, 3), dtype=np.uint8)
        pixels[..., 0] = np.arange(height)[:, None]
        pixels[..., 1] = np.arange(width)
        pixels[..., 2] = 7
        image = read(processor(), encoded(PIL.Image.fromarray(pixels)), param="p")
        patches = np.frombuffer(image.features, np.uint8).reshape(20 * 14, 8 * 8 * 3)
        patch = patches[3 * 14 + 5]  # row 3, column 5
        assert patch[:6].tolist() == [24, 40, 7, 24, 41, 7]
        assert patch[8 * 3 :][:3].tolist() == [25, 40, 7]

    def test_golden_pixels(self) -> None:
        """Enlarged from 48 x 32; what transformers 5.23 with Pillow 13 makes of it."""
        y, x, channel = np.ogrid[:32, :48, :3]
        source = ((y * 37 + x * 91 + channel * 53) % 256).astype(np.uint8)
        image = read(processor(), encoded(PIL.Image.fromarray(source)), param="p")
        assert (image.shape, image.tokens) == ((12, 20), 60)
        patches = np.frombuffer(image.features, np.uint8).reshape(240, 192)
        assert patches[100, :6].tolist() == [243, 12, 65, 229, 20, 73]
        assert patches[239, -6:].tolist() == [48, 108, 160, 33, 118, 168]
        assert hashlib.sha256(image.features).hexdigest()[:16] == "de06c670f70e1a53"

    def test_the_digest_is_of_pixels_and_shape(self) -> None:
        source = encoded(PIL.Image.new("RGB", (40, 80)))
        image = read(processor(), source, param="p")
        shape = struct.pack("<II", *image.shape)
        assert (
            image.digest
            == hashlib.blake2b(image.features + shape, digest_size=24, person=b"image").digest()
        )
        turned = read(processor(), encoded(PIL.Image.new("RGB", (80, 40))), param="p")
        assert turned.features == image.features
        assert turned.digest != image.digest

    def test_low_detail_takes_the_smallest_budget(self) -> None:
        data = encoded(noise(300, 300))
        large = processor(patch=16, pooling=3, max_soft_tokens=280)
        images = {detail: read(large, data, detail=detail) for detail in DETAILS}
        assert images["low"].tokens == 64
        assert images["auto"] == images["high"]
        assert images["auto"].tokens == 256

    def test_a_budget_of_its_own(self) -> None:
        data = encoded(noise(300, 300))
        ours = processor(patch=16, pooling=3, max_soft_tokens=280)
        counts = {tokens: read(ours, data, detail=tokens).tokens for tokens in BUDGETS}
        assert counts == {70: 64, 140: 121, 280: 256, 560: 529, 1120: 1089}
        with pytest.raises(RequestError, match="max_soft_tokens is 71, not one of 70, 140"):
            read(ours, data, detail=71)

    def test_a_picture_that_cannot_be_brought_to_a_size_is_refused(self) -> None:
        tiny = processor(max_soft_tokens=0)  # which the configuration does not allow
        with pytest.raises(RequestError, match="30 x 20 pixels") as caught:
            tiny.read(encoded(noise(30, 20)), param="p")
        assert caught.value.code == "media_invalid"
        assert fitted(20, 30, 8, 2, 0) is None

    @settings(max_examples=500, deadline=None)
    @given(
        st.integers(1, 20_000),
        st.integers(1, 20_000),
        st.sampled_from([(8, 2), (16, 3), (14, 1)]),
        st.sampled_from(BUDGETS),
    )
    def test_every_picture_fits_its_budget(
        self, height: int, width: int, shape: tuple[int, int], tokens: int
    ) -> None:
        size = fitted(height, width, *shape, tokens)
        assert size is not None
        cell = shape[0] * shape[1]
        assert all(side > 0 and side % cell == 0 for side in size)
        assert size[0] * size[1] <= tokens * cell * cell


DETAILS: tuple[Any, ...] = ("auto", "low", "high")


class TestAgainstTransformers:
    SIZES = (
        *[(1, 1), (7, 3), (16, 16), (17, 31), (112, 160), (128, 128), (640, 480), (481, 1023)],
        *[
            (1920, 1080),
            (3000, 200),
            (5000, 3),
            (2, 4001),
            (70, 1),
            (1, 71),
            (1121, 16),
            (16, 1135),
        ],
    )

    @pytest.mark.parametrize(
        ("patch", "pooling", "tokens"), [(8, 2, 70), (16, 3, 280), (16, 3, 70)]
    )
    def test_patches_and_counts_are_equal(self, patch: int, pooling: int, tokens: int) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
        theirs = oracle.Gemma4ImageProcessorPil(
            patch_size=patch, pooling_kernel_size=pooling, max_soft_tokens=tokens
        )
        ours = processor(patch=patch, pooling=pooling, max_soft_tokens=tokens)
        for seed, (width, height) in enumerate(self.SIZES):
            picture = noise(width, height, seed)
            out = theirs.preprocess(picture, do_rescale=False, return_tensors="np")
            image = read(ours, encoded(picture), param="p")
            assert image.tokens == int(out["num_soft_tokens_per_image"][0])
            count = image.shape[0] * image.shape[1]
            found = np.frombuffer(image.features, np.uint8).reshape(count, patch * patch * 3)
            assert np.array_equal(found, out["pixel_values"][0][:count]), (width, height)
            places = np.stack(np.divmod(np.arange(count), image.shape[1])[::-1], axis=-1)
            assert np.array_equal(out["image_position_ids"][0][:count], places)
            assert (out["image_position_ids"][0][count:] == -1).all()

    def test_sizes_are_equal(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
        draw = random.Random(5)
        for _ in range(20_000):
            height, width = (int(10 ** draw.uniform(0, 4.5)) for _ in range(2))
            patch, pooling = draw.choice([8, 14, 16]), draw.choice([1, 2, 3])
            tokens = draw.choice(BUDGETS)
            expected = oracle.get_aspect_ratio_preserving_size(
                height, width, patch, tokens * pooling**2, pooling
            )
            assert fitted(height, width, patch, pooling, tokens) == expected


class TestCache:
    def test_the_same_bytes_give_the_same_object(self) -> None:
        ours, data = processor(), encoded(noise(30, 20))
        image = read(ours, data, param="a")
        assert read(ours, bytes(bytearray(data)), param="b") is image
        assert read(ours, encoded(noise(30, 20, 1)), param="a") is not image

    def test_detail_is_part_of_the_key(self) -> None:
        ours, data = processor(max_soft_tokens=280), encoded(noise(30, 20))
        low, high = (read(ours, data, param="p", detail=d) for d in ("low", "high"))
        assert low.tokens < high.tokens

    def test_the_least_recently_used_goes_first(self) -> None:
        files = [encoded(noise(64, 64, seed)) for seed in range(3)]
        size = len(read(processor(), files[0], param="p").features)
        ours = processor(cache_bytes=2 * size)
        first, second = (read(ours, file, param="p") for file in files[:2])
        assert read(ours, files[0], param="p") is first
        read(ours, files[2], param="p")
        assert read(ours, files[0], param="p") is first
        assert read(ours, files[1], param="p") is not second

    def test_what_is_larger_than_the_cache_is_not_kept(self) -> None:
        ours, data = processor(cache_bytes=100), encoded(noise(64, 64))
        first = read(ours, data, param="p")
        assert read(ours, data, param="p") is not first
        assert read(ours, data, param="p") == first

    def test_refusals_are_not_kept_and_name_their_own_field(self) -> None:
        ours = processor()
        for param in ("a", "b"):
            with pytest.raises(RequestError) as caught:
                read(ours, b"x", param=param)
            assert caught.value.param == param

    def test_many_threads(self) -> None:
        files = [encoded(noise(40, 30, seed)) for seed in range(6)]
        expected = [read(processor(), file, param="p") for file in files]
        ours = processor(cache_bytes=3 * len(expected[0].features))
        wrong: list[int] = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(60):
                at = draw.randrange(len(files))
                if read(ours, files[at], param="p") != expected[at]:
                    wrong.append(at)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def folder(path: Path, processor_config: Any = None, config: Any = None) -> Path:
    """Return the demonstration model's files with some values changed; a value of None goes
    away.
    """

    def change(values: dict[str, Any], by: Any) -> dict[str, Any]:
        return {k: v for k, v in (values | (by or {})).items() if v is not None}

    mine = json.loads((DEMO / "processor_config.json").read_text())
    mine["image_processor"] = change(mine["image_processor"], processor_config)
    (path / "processor_config.json").write_text(json.dumps(mine))
    theirs = change(json.loads((DEMO / "config.json").read_text()), config)
    (path / "config.json").write_text(json.dumps(theirs))
    return path


class TestOpening:
    def test_the_demonstration_model(self) -> None:
        found = KINDS["image"].open(DEMO)
        assert isinstance(found, ImageProcessor)
        assert found.placeholders == Placeholders(18, (17,), (19,))
        image = read(found, encoded(noise(112, 160)), param="p")
        assert isinstance(image, MediaItem)
        assert (image.shape, image.tokens) == ((20, 14), 70)

    def test_without_vision(self, tmp_path: Path) -> None:
        assert KINDS["image"].open(folder(tmp_path, config={"vision_config": None})) is None
        (tmp_path / "config.json").write_text('{"vision_config": null}')
        assert KINDS["image"].open(tmp_path) is None

    def test_without_a_processors_file(self, tmp_path: Path) -> None:
        (folder(tmp_path) / "processor_config.json").unlink()
        assert KINDS["image"].open(tmp_path) is None

    def test_the_old_file(self, tmp_path: Path) -> None:
        path = folder(tmp_path) / "processor_config.json"
        values = json.loads(path.read_text())
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values["image_processor"]))
        path.write_text(json.dumps({"processor_class": "Gemma4Processor"}))
        assert isinstance(KINDS["image"].open(tmp_path), Gemma4ImageProcessor)
        path.unlink()
        assert isinstance(KINDS["image"].open(tmp_path), Gemma4ImageProcessor)

    @pytest.mark.parametrize("kind", ["Gemma4ImageProcessorPil", "Gemma4UnifiedImageProcessor"])
    def test_other_names_of_the_same(self, tmp_path: Path, kind: str) -> None:
        assert KINDS["image"].open(folder(tmp_path, {"image_processor_type": kind})) is not None

    @pytest.mark.parametrize("kind", ["Idefics9ImageProcessor", None, ["x"]])
    def test_an_unknown_processor_is_named_in_the_log(
        self, tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "quire.media"):
            assert KINDS["image"].open(folder(tmp_path, {"image_processor_type": kind})) is None
        assert repr(kind) in caplog.text

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("patch_size", "8"),
            ("patch_size", 0),
            ("patch_size", True),
            ("pooling_kernel_size", 1.5),
            ("max_soft_tokens", 71),
            ("max_soft_tokens", []),
            ("do_resize", False),
            ("do_rescale", False),
            ("do_convert_rgb", False),
            ("resample", 2),
            ("rescale_factor", 1 / 127.5),
            ("rescale_factor", "x"),
        ],
    )
    def test_bad_values_are_named(self, tmp_path: Path, key: str, value: Any) -> None:
        with pytest.raises(ModelError) as caught:
            KINDS["image"].open(folder(tmp_path, {key: value}))
        named = f"{tmp_path / 'processor_config.json'}: image_processor.{key} = {value!r}"
        assert str(caught.value).startswith(named)

    def test_normalization(self, tmp_path: Path) -> None:
        assert KINDS["image"].open(folder(tmp_path, {"do_normalize": True})) is not None
        for key, value in (("image_mean", [0.5] * 3), ("image_std", [0.5] * 3)):
            with pytest.raises(ModelError, match=key):
                KINDS["image"].open(folder(tmp_path, {"do_normalize": True, key: value}))
            assert KINDS["image"].open(folder(tmp_path, {key: value})) is not None

    @pytest.mark.parametrize("key", ["image_token_id", "boi_token_id", "eoi_token_id"])
    def test_token_ids_are_needed(self, tmp_path: Path, key: str) -> None:
        for value in (None, "18", -1):
            with pytest.raises(ModelError) as caught:
                KINDS["image"].open(folder(tmp_path, config={key: value}))
            assert str(caught.value).startswith(str(tmp_path / "config.json"))
            assert key in str(caught.value)

    def test_files_that_are_no_objects(self, tmp_path: Path) -> None:
        path = folder(tmp_path) / "processor_config.json"
        for text in ("[]", "{", '{"image_processor": 3}'):
            path.write_text(text)
            with pytest.raises(ModelError, match=r"processor_config\.json"):
                KINDS["image"].open(tmp_path)
