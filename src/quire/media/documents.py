"""Reads untrusted PDF documents with pypdfium2, which is optional."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import RequestError
from quire.media.source import FileLimits, refusal

if TYPE_CHECKING:
    import pypdfium2

_MAGIC = b"%PDF-"
_HEAD = 1024  # bytes in which readers look for the magic; mail programs put headers before it
_SCALE = 2.0  # 144 dots an inch
_MAX_PIXELS = 4_000_000  # of a page; models scale it down


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a document.

    Attributes:
        text: the page's text layer; empty for a scan.
        picture: the rendered page as a BMP file; empty if no pictures were asked for.
    """

    text: str
    picture: bytes


def pages(data: bytes, *, param: str, limits: FileLimits, pictures: bool) -> Iterator[Page]:
    """Yield the pages of a document, each read when it is asked for.

    Args:
        data: the PDF file.
        param: the request field that holds it, for errors.
        pictures: whether pages are drawn.

    Raises:
        RequestError: the document has too many pages (`media_too_large`), is damaged, locked or not
            a PDF (`media_invalid`), or pypdfium2 is missing (`media_unsupported`).
    """
    if _MAGIC not in data[:_HEAD]:
        raise refusal(param, "it is not a PDF document")
    try:
        import pypdfium2
    except ImportError as error:
        reason = (
            "reading it needs pypdfium2, which this server lacks (pip install 'quire-serve[media]')"
        )
        raise refusal(param, reason, "unsupported") from error
    try:
        with pypdfium2.PdfDocument(data) as document:
            count = len(document)
            if count > limits.pages:
                reason = f"it has {count} pages, more than {limits.pages}"
                raise refusal(param, reason, "too_large")
            for page in document:
                text = page.get_textpage().get_text_range(errors="replace")
                yield Page(text.strip(), _drawn(page) if pictures else b"")
    except RequestError:
        raise
    except pypdfium2.PdfiumError as error:
        raise refusal(param, "it cannot be read; it is damaged or locked") from error
    if not count:
        raise refusal(param, "it has no pages")


def _drawn(page: pypdfium2.PdfPage) -> bytes:
    width, height = page.get_size()
    scale = min(_SCALE, math.sqrt(_MAX_PIXELS / max(1.0, width * height)))
    file = io.BytesIO()
    page.render(scale=scale).to_pil().convert("RGB").save(file, "BMP")
    return file.getvalue()
