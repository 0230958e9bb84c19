"""Pictures in terminals that support them."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Mapping

from PIL import Image, UnidentifiedImageError

_WIDTH, _HEIGHT = 640, 320
_PIECE = 4096
"""Most characters of a picture in one escape sequence."""
_PROGRAMS = ("WezTerm", "ghostty")


def shows_pictures(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the terminal supports kitty's graphics protocol, judged by its variables."""
    return (
        "KITTY_WINDOW_ID" in environment
        or environment.get("TERM") in ("xterm-kitty", "xterm-ghostty")
        or environment.get("TERM_PROGRAM") in _PROGRAMS
    )


def picture(data: bytes) -> str:
    """Return the escape sequences that show a scaled-down picture; "" if it cannot be read.

    The protocol is https://sw.kovidgoyal.net/kitty/graphics-protocol/: a PNG in base64, in pieces.
    """
    small = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.thumbnail((_WIDTH, _HEIGHT))
            image.convert("RGBA").save(small, "PNG")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return ""
    return "".join(_sequences(base64.b64encode(small.getvalue()).decode()))


def _sequences(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        keys = ["a=T", "f=100", "q=2"] if start == 0 else []
        keys.append(f"m={int(start + _PIECE < len(text))}")
        yield f"\033_G{','.join(keys)};{text[start : start + _PIECE]}\033\\"
