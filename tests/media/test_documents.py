"""PDF documents, made here: their text, their pages' pictures, what is refused."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import RequestError
from quire.media.documents import Page, pages
from quire.media.source import DEFAULT_LIMITS, FileLimits
from tests.media.files import pdf


def read(data: bytes, limits: FileLimits = DEFAULT_LIMITS, *, pictures: bool = True) -> list[Page]:
    return list(pages(data, param="p", limits=limits, pictures=pictures))


def refused(data: bytes, code: str, limits: FileLimits = DEFAULT_LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        read(data, limits)
    assert (caught.value.code, caught.value.param) == (code, "p")
    return caught.value.message


def test_text_and_pictures() -> None:
    first, second = read(pdf("One", "Two"))
    assert (first.text, second.text) == ("One", "Two")
    drawn = np.asarray(PIL.Image.open(io.BytesIO(first.picture)))
    assert drawn.shape == (400, 400, 3)  # 200 points at 144 dots an inch
    assert drawn[240, 160].tolist() == [0, 0, 0]
    assert drawn[380, 380].tolist() == [255, 255, 255]


def test_without_pictures() -> None:
    assert read(pdf("One"), pictures=False) == [Page("One", b"")]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not a PDF" in refused(b"PK\3\4", "media_invalid")
    assert "2 pages, more than 1" in refused(pdf("a", "b"), "media_too_large", FileLimits(pages=1))
    refused(b"%PDF-1.7 and nothing else", "media_invalid")
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    assert "quire-serve[media]" in refused(pdf("a"), "media_unsupported")


def test_damaged_files_are_read_or_refused() -> None:
    whole = pdf("One", "Two")
    rng = np.random.default_rng(5)
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(8, len(data), 6):
            data[at] = rng.integers(0, 256)
        with suppress(RequestError):
            assert read(bytes(data))
