"""Collects the deltas of one answer, and drops white space around reasoning and calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from quire.text.dialects.base import Call
from quire.text.events import (
    Delta,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnded,
    ToolCallStarted,
)

MAX_HELD_SPACE = 256
"""The most characters of white space that are held back, so that a loop of newlines takes linear
time.
"""


def new_call_id() -> str:
    """Return a call id in the form of OpenAI's API."""
    return f"call_{secrets.token_hex(12)}"


class Writer:
    """Owns the deltas not yet taken, and numbers the calls.

    White space at the end is held until more text of the same kind follows. So newlines around
    reasoning or a call are dropped, while those inside are kept. Only white space is ever dropped.

    Attributes:
        calls: number of calls so far.
        after_call: whether no text of the answer followed the last call.
    """

    __slots__ = (
        "_bordered",
        "_deltas",
        "_joint",
        "_new_id",
        "_reasoning_space",
        "_space",
        "_wrote",
        "_wrote_reasoning",
        "after_call",
        "calls",
    )

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._space = ""
        self._reasoning_space = ""
        self._wrote = False
        self._wrote_reasoning = False
        self._joint = ""  # white space between ended reasoning and further reasoning
        self._bordered = False
        self.calls = 0
        self.after_call = False

    @property
    def wrote(self) -> bool:
        """Whether the answer has text other than white space."""
        return self._wrote

    @property
    def text_flows(self) -> bool:
        """Whether text that does not end in white space can bypass this writer."""
        return self._wrote and not self._space and not self.after_call

    @property
    def reasoning_flows(self) -> bool:
        """Whether reasoning that does not end in white space can bypass this writer."""
        held = self._reasoning_space or self._joint
        return self._wrote_reasoning and not held and not self.after_call

    def text(self, piece: str) -> None:
        """Add text of the answer."""
        piece = self._space + piece
        if self._bordered and not self._wrote:
            piece = piece.lstrip("\n")
        body, self._space = _without_space(piece)
        if body:
            self._wrote = True
            self.after_call = False
            self._deltas.append(Text(body))

    def reason(self, piece: str) -> None:
        """Add text of reasoning."""
        if self._joint and piece:
            piece = piece if piece[0].isspace() else self._joint + piece
            self._joint = ""
        piece = self._reasoning_space + piece
        if not self._wrote_reasoning:
            piece = piece.lstrip("\n")
        body, self._reasoning_space = _without_space(piece)
        if body:
            self._wrote_reasoning = True
            self.after_call = False
            self._deltas.append(Reasoning(body))

    def border(self) -> None:
        """Note that a marker of reasoning or of a call was here."""
        self._bordered = True
        if self._wrote_reasoning and not self._joint:
            self._joint, self._reasoning_space = self._reasoning_space or "\n", ""

    def drop_space(self) -> None:
        """Drop held white space, which was not part of the finished answer."""
        self._space = ""

    def start_call(self, name: str, call_id: str | None) -> int:
        """Start a call and return its index."""
        self.border()
        index = self.calls
        self.calls += 1
        self._deltas.append(ToolCallStarted(index, call_id or self._new_id(), name))
        return index

    def arguments(self, index: int, piece: str) -> None:
        """Add to the arguments of a started call."""
        if piece:
            self._deltas.append(ToolCallArguments(index, piece))

    def end_call(self, index: int) -> None:
        """End a complete call."""
        self.after_call = True
        self._deltas.append(ToolCallEnded(index))

    def break_call(self, index: int) -> None:
        """End the answer, as the started call turned out not to be one."""
        self._deltas.append(ToolCallBroken(index))

    def call(self, call: Call) -> None:
        """Add a complete call."""
        index = self.start_call(call.name, call.id)
        self.arguments(index, call.arguments)
        self.end_call(index)

    def end(self, *, thinking: bool) -> None:
        """Emit held white space if it belongs to truncated text or reasoning."""
        if thinking and self._reasoning_space:
            self._deltas.append(Reasoning(self._reasoning_space))
        elif self._space and not self.calls and (self._wrote or not self._bordered):
            self._deltas.append(Text(self._space))
        self._space = self._reasoning_space = ""

    def take(self) -> list[Delta]:
        """Return the deltas collected since the last call."""
        deltas = self._deltas
        self._deltas = []
        return deltas


def _without_space(piece: str) -> tuple[str, str]:
    """Split a text into the text to write and the white space to hold."""
    size = len(piece.rstrip())
    size = max(size, len(piece) - MAX_HELD_SPACE)
    return piece[:size], piece[size:]
