"""Collects the deltas of one answer, and decides what happens to white space at its borders."""

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
"""Characters of white space held back at most, so that a loop of newlines stays linear."""


def new_call_id() -> str:
    """Return an id of the form that OpenAI's API gives."""
    return f"call_{secrets.token_hex(12)}"


class Writer:
    """Owns the deltas that wait to be taken, and the numbering of calls.

    White space at the end of what was written is held until more of the same kind follows. So the
    newlines that a template puts around reasoning or a call are in neither the reasoning nor the
    answer, while those inside stay as they came. Only white space is ever dropped.

    Attributes:
        calls: how many calls there are.
        after_call: no text of the answer has come since the last of them.
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
        self._joint = ""  # between reasoning that ended and more of it
        self._bordered = False
        self.calls = 0
        self.after_call = False

    @property
    def wrote(self) -> bool:
        """Whether the answer has text other than white space."""
        return self._wrote

    @property
    def text_flows(self) -> bool:
        """Whether text that does not end in white space may go past this writer."""
        return self._wrote and not self._space and not self.after_call

    @property
    def reasoning_flows(self) -> bool:
        """Whether reasoning text that does not end in white space may go past this writer."""
        held = self._reasoning_space or self._joint
        return self._wrote_reasoning and not held and not self.after_call

    def text(self, piece: str) -> None:
        """Adds text of the answer."""
        piece = self._space + piece
        if self._bordered and not self._wrote:
            piece = piece.lstrip("\n")
        body, self._space = _without_space(piece)
        if body:
            self._wrote = True
            self.after_call = False
            self._deltas.append(Text(body))

    def reason(self, piece: str) -> None:
        """Adds text of reasoning."""
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
        """A marker of reasoning or a call stood here."""
        self._bordered = True
        if self._wrote_reasoning and not self._joint:
            self._joint, self._reasoning_space = self._reasoning_space or "\n", ""

    def drop_space(self) -> None:
        """The answer is over: the white space that is held was not its own."""
        self._space = ""

    def start_call(self, name: str, call_id: str | None) -> int:
        """Starts a call, and gives its number."""
        self.border()
        index = self.calls
        self.calls += 1
        self._deltas.append(ToolCallStarted(index, call_id or self._new_id(), name))
        return index

    def arguments(self, index: int, piece: str) -> None:
        """Adds to the arguments of a call that has started."""
        if piece:
            self._deltas.append(ToolCallArguments(index, piece))

    def end_call(self, index: int) -> None:
        """The call is complete."""
        self.after_call = True
        self._deltas.append(ToolCallEnded(index))

    def break_call(self, index: int) -> None:
        """The call that has started is none: the answer ends with it."""
        self._deltas.append(ToolCallBroken(index))

    def call(self, call: Call) -> None:
        """Adds a complete call."""
        index = self.start_call(call.name, call.id)
        self.arguments(index, call.arguments)
        self.end_call(index)

    def end(self, *, thinking: bool) -> None:
        """Lets go of held white space, where it belongs to something that was cut off or ended."""
        if thinking and self._reasoning_space:
            self._deltas.append(Reasoning(self._reasoning_space))
        elif self._space and not self.calls and (self._wrote or not self._bordered):
            self._deltas.append(Text(self._space))
        self._space = self._reasoning_space = ""

    def take(self) -> list[Delta]:
        """Hands over what was collected since the last call."""
        deltas = self._deltas
        self._deltas = []
        return deltas


def _without_space(piece: str) -> tuple[str, str]:
    """Return a text up to the white space at its end, and as much of that as is held."""
    size = len(piece.rstrip())
    size = max(size, len(piece) - MAX_HELD_SPACE)
    return piece[:size], piece[size:]
