"""Answers that grow in a terminal: what has left its screen is not written again."""

from __future__ import annotations

import io
import os
import re
import sys
import termios
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from quire.cli.growing import Answer, Growing, silent_keys, view


class EagerLive(Live):
    """Draws at each update, as a slow answer has it."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, auto_refresh=False)

    def update(self, renderable: Any, *, refresh: bool = True) -> None:
        super().update(renderable, refresh=refresh)


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr("quire.cli.growing.Live", EagerLive)
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=10)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_screen(text: str) -> str:
    """Return the text after the last erased line, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.rsplit("\x1b[2K", 1)[-1])


def test_a_block_is_written_once_it_is_complete_and_no_more(console: Console) -> None:
    with Growing(console) as growing:
        for number in range(60):
            growing.say(f"Paragraph {number}.\n\n")
    for number in range(60):
        assert written(console).count(f"Paragraph {number}.") <= 4  # drawn a few times, and printed


def test_of_a_block_higher_than_the_screen_the_end_is_drawn_and_all_is_kept(
    console: Console,
) -> None:
    with Growing(console) as growing:
        growing.say("```\n")
        for number in range(30):
            growing.say(f"line {number}\n")
        drawn = written(console)
    assert drawn.count("line 0 ") < 12
    assert all(f"line {number} " in last_screen(written(console)) for number in range(30))


def test_reasoning_stays_above_the_answer(console: Console) -> None:
    with Growing(console) as growing:
        growing.wait("loading")
        for piece in ("First this,\n", "then ", "that."):
            growing.think(piece)
        growing.say("So **it** is.")
    text = written(console)
    assert text.count("First this,") <= 2
    assert "\x1b[2mthen that.\x1b[0m\n" in text
    assert last_screen(text).split() == ["So", "it", "is."]


def test_a_pipe_gets_the_pieces_alone() -> None:
    console = Console(file=io.StringIO())
    with view(console) as plain:
        plain.wait("loading")
        plain.think("So.")
        plain.say("**a** [b]\n")
        plain.say("c")
    assert written(console) == "So.\n\n**a** [b]\nc\n"


def test_keys_are_not_written_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = os.openpty()
    with os.fdopen(theirs), os.fdopen(ours) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)

        def echoes() -> bool:
            return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)

        assert echoes()
        with silent_keys():
            assert not echoes()
        assert echoes()


def test_formulas_keep_their_backslashes() -> None:
    matrix = r"\[\begin{pmatrix} a & b \\ c & d \end{pmatrix}\]"
    text = rf"So \(a_1 * b_2 * c\) and {matrix} are **bold**."
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(Answer(text))
    assert out.getvalue().strip() == text.replace("**", "")
