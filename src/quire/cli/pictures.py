"""Pictures in terminals that support them: kitty's graphics protocol, or sixels."""

from __future__ import annotations

import base64
import io
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from PIL import Image, UnidentifiedImageError

_WIDTH, _HEIGHT = 640, 320
_PIECE = 4096
"""Most characters of a picture in one escape sequence of kitty's protocol."""
_KITTY_PROGRAMS = ("WezTerm", "ghostty")
_COLOURS = 256
_BAND = 6
"""Rows of pixels that one row of sixels holds."""
_SIXEL_ATTRIBUTE = "4"
_ANSWER_S = 0.3
_ATTRIBUTES = re.compile(rb"\033\[\?([\d;]*)c")

Draw = Callable[[bytes], str]


def picture_format(
    environment: Mapping[str, str], attributes: Callable[[], frozenset[str]]
) -> Draw | None:
    """Return the function that draws pictures for a terminal; None if it shows none.

    Args:
        environment: variables by which terminals with kitty's protocol are known.
        attributes: asks the terminal for its attributes; called if the variables do not tell.
    """
    if (
        "KITTY_WINDOW_ID" in environment
        or environment.get("TERM") in ("xterm-kitty", "xterm-ghostty")
        or environment.get("TERM_PROGRAM") in _KITTY_PROGRAMS
    ):
        return kitty_picture
    return sixel_picture if _SIXEL_ATTRIBUTE in attributes() else None


def terminal_attributes(terminal: int, timeout_s: float = _ANSWER_S) -> frozenset[str]:
    """Ask a terminal for its primary device attributes (DA1), of which "4" stands for sixels.

    Args:
        terminal: file descriptor of the terminal, open for reading and writing.

    Returns:
        The attributes; none if the terminal does not answer in time.
    """
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return frozenset()
    try:
        before = termios.tcgetattr(terminal)
    except termios.error:
        return frozenset()
    try:
        tty.setcbreak(terminal)
        os.write(terminal, b"\033[c")
        found = _ATTRIBUTES.search(_answer(terminal, timeout_s))
    except OSError:  # open for reading alone
        found = None
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
    return frozenset() if found is None else frozenset(found[1].decode().split(";"))


def _answer(terminal: int, timeout_s: float) -> bytes:
    """Read until the end of a device attributes report, or until the time is over."""
    answer = b""
    end = time.monotonic() + timeout_s
    while not _ATTRIBUTES.search(answer):
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            break
        answer += os.read(terminal, 64)
    return answer


def kitty_picture(data: bytes) -> str:
    """Return the escape sequences that show a scaled-down picture; "" if it cannot be read.

    The protocol is https://sw.kovidgoyal.net/kitty/graphics-protocol/: a PNG in base64, in pieces.
    """
    image = _opened(data)
    if image is None:
        return ""
    small = io.BytesIO()
    image.save(small, "PNG")
    return "".join(_sequences(base64.b64encode(small.getvalue()).decode()))


def _sequences(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE):
        keys = ["a=T", "f=100", "q=2"] if start == 0 else []
        keys.append(f"m={int(start + _PIECE < len(text))}")
        yield f"\033_G{','.join(keys)};{text[start : start + _PIECE]}\033\\"


def sixel_picture(data: bytes) -> str:
    """Return a scaled-down picture as sixels; "" if it cannot be read.

    The format is that of DEC's VT340 (https://vt100.net/docs/vt3xx-gp/chapter14.html): a palette in
    percent, then for each band of six rows and each colour in it the columns that have it.
    Transparent pixels stay as the terminal has them.
    """
    image = _opened(data)
    if image is None:
        return ""
    width, height = image.size
    reduced = image.convert("RGB").quantize(_COLOURS)
    shares = [round(value * 100 / 255) for value in reduced.getpalette() or ()]
    colours, opaque = reduced.tobytes(), image.getchannel("A").tobytes()
    palette = "".join(
        f"#{index};2;{';'.join(map(str, shares[3 * index : 3 * index + 3]))}"
        for index in sorted(set(colours))
    )
    bands = "-".join(
        _band(colours, opaque, width, rows=range(top, min(top + _BAND, height)))
        for top in range(0, height, _BAND)
    )
    return f'\033P0;1;0q"1;1;{width};{height}{palette}{bands}\033\\'


def _band(colours: bytes, opaque: bytes, width: int, rows: range) -> str:
    """Return one band: for each of its colours a line of sixels, written over each other."""
    lines: dict[int, bytearray] = {}
    for bit, row in enumerate(rows):
        for column in range(width):
            if opaque[row * width + column] > 127:
                colour = colours[row * width + column]
                lines.setdefault(colour, bytearray(width))[column] |= 1 << bit
    return "$".join(f"#{colour}{_runs(line)}" for colour, line in lines.items())


def _runs(line: bytearray) -> str:
    """Return sixels, with repetitions counted."""
    runs = ((chr(63 + value), len(list(run))) for value, run in groupby(line))
    return "".join(f"!{count}{sixel}" if count > 3 else sixel * count for sixel, count in runs)


def _opened(data: bytes) -> Image.Image | None:
    """Return a picture scaled down to the terminal; None if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.thumbnail((_WIDTH, _HEIGHT))
            return image.convert("RGBA")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return None
