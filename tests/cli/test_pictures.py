"""Pictures in terminals: who gets them, and that what is written is the picture."""

from __future__ import annotations

import base64
import io
import os
import random
import re
import threading

import pytest
from PIL import Image

from quire.cli.pictures import (
    kitty_picture,
    picture_format,
    sixel_picture,
    terminal_attributes,
)
from tests.support.waiting import HANG_S


@pytest.mark.parametrize(
    ("environment", "attributes", "draws"),
    [
        ({"TERM": "xterm-256color"}, "62;22", None),
        ({}, "", None),
        ({"TERM": "xterm-kitty"}, "", kitty_picture),
        ({"TERM": "screen", "KITTY_WINDOW_ID": "1"}, "", kitty_picture),
        ({"TERM_PROGRAM": "WezTerm"}, "62;4", kitty_picture),
        ({"TERM": "foot"}, "62;4;22", sixel_picture),
        ({"TERM": "xterm"}, "64;44", None),
    ],
)
def test_terminals_that_say_so_get_pictures(
    environment: dict[str, str], attributes: str, draws: object
) -> None:
    assert picture_format(environment, lambda: frozenset(attributes.split(";"))) is draws


@pytest.mark.parametrize(
    ("answer", "attributes"),
    [(b"\033[?62;4;22c", {"62", "4", "22"}), (b"typed\033[?6c", {"6"}), (b"", set())],
)
def test_a_terminal_is_asked_for_its_attributes(answer: bytes, attributes: set[str]) -> None:
    ours, theirs = os.openpty()

    def terminal() -> None:
        asked = b""
        while not asked.endswith(b"\033[c"):
            asked += os.read(ours, 16)
        os.write(ours, answer)

    thread = threading.Thread(target=terminal)
    thread.start()
    timeout_s = HANG_S if answer else 0.0
    assert terminal_attributes(theirs, timeout_s) == attributes
    thread.join(HANG_S)
    os.close(ours)
    os.close(theirs)


def test_what_is_no_terminal_has_no_attributes() -> None:
    ours, theirs = os.pipe()
    assert terminal_attributes(ours) == frozenset()
    os.close(ours)
    os.close(theirs)


def test_the_pieces_are_the_picture_made_small() -> None:
    noise = random.Random(0).randbytes(1280 * 640 * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (1280, 640), noise).save(file, "BMP")
    shown = kitty_picture(file.getvalue())
    pieces = re.findall("\033_G([^;]*);([^\033]*)\033\\\\", shown)
    assert "".join(f"\033_G{keys};{data}\033\\" for keys, data in pieces) == shown
    assert pieces[0][0].startswith("a=T,f=100,")
    assert [keys[-1] for keys, _ in pieces] == ["1"] * (len(pieces) - 1) + ["0"]
    assert max(len(data) for _, data in pieces) <= 4096
    decoded = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in pieces))))
    assert (decoded.format, decoded.size) == ("PNG", (640, 320))
    assert kitty_picture(b"no picture") == sixel_picture(b"no picture") == ""


def decoded(sixels: str) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the pixels that a terminal draws, by column and row; colours in percent."""
    body = re.fullmatch('\033P0;1;0q"1;1;\\d+;\\d+(.*)\033\\\\', sixels, re.DOTALL)
    assert body is not None
    palette: dict[str, tuple[int, ...]] = {}
    pixels = {}
    column = band = 0
    colour = ""
    for token in re.findall(r"#\d+(?:;\d+)*|!\d+.|[-$]|[?-~]", body[1]):
        if token[0] == "#":
            colour, *shares = token[1:].split(";")
            if shares:
                palette[colour] = tuple(map(int, shares[1:]))
        elif token in "-$":
            column, band = 0, band + (token == "-")
        else:
            count = int(token[1:-1]) if token[0] == "!" else 1
            bits = [bit for bit in range(6) if (ord(token[-1]) - 63) >> bit & 1]
            for place in range(column, column + count):
                pixels |= {(place, 6 * band + bit): palette[colour] for bit in bits}
            column += count
    return pixels


def test_sixels_are_the_picture() -> None:
    picture = Image.new("RGBA", (20, 9), (255, 0, 0, 255))
    for column in range(20):
        picture.putpixel((column, 4), (0, 0, 255, 255))
        picture.putpixel((column, 8), (0, 0, 0, 0))
    picture.putpixel((3, 7), (0, 255, 0, 255))
    file = io.BytesIO()
    picture.save(file, "PNG")
    pixels = decoded(sixel_picture(file.getvalue()))
    expected = {
        (column, row): (0, 0, 100) if row == 4 else (100, 0, 0)
        for column in range(20)
        for row in range(8)
    }
    assert pixels == {**expected, (3, 7): (0, 100, 0)}
