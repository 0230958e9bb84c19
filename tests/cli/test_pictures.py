"""Pictures in terminals: who gets them, and that what is written is the picture."""

from __future__ import annotations

import base64
import io
import random
import re

import pytest
from PIL import Image

from quire.cli.pictures import picture, shows_pictures


@pytest.mark.parametrize(
    ("environment", "shows"),
    [
        ({"TERM": "xterm-256color"}, False),
        ({}, False),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "screen", "KITTY_WINDOW_ID": "1"}, True),
        ({"TERM_PROGRAM": "WezTerm"}, True),
    ],
)
def test_terminals_that_say_so_get_pictures(environment: dict[str, str], shows: bool) -> None:
    assert shows_pictures(environment) is shows


def test_the_pieces_are_the_picture_made_small() -> None:
    noise = random.Random(0).randbytes(1280 * 640 * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (1280, 640), noise).save(file, "BMP")
    shown = picture(file.getvalue())
    pieces = re.findall("\033_G([^;]*);([^\033]*)\033\\\\", shown)
    assert "".join(f"\033_G{keys};{data}\033\\" for keys, data in pieces) == shown
    assert pieces[0][0].startswith("a=T,f=100,")
    assert [keys[-1] for keys, _ in pieces] == ["1"] * (len(pieces) - 1) + ["0"]
    assert max(len(data) for _, data in pieces) <= 4096
    decoded = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in pieces))))
    assert (decoded.format, decoded.size) == ("PNG", (640, 320))
    assert picture(b"no picture") == ""
