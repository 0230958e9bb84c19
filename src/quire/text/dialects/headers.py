"""The parser of dialects whose answers are messages with headers, such as harmony."""

from __future__ import annotations

from abc import abstractmethod

from quire.core.request import FinishReason
from quire.text.dialects.base import Start
from quire.text.dialects.marker_parser import Layout, MarkerParser, Mode, last_added

START, MESSAGE = "<|start|>", "<|message|>"
_MAX_HEADER = 256


class HeaderParser(MarkerParser):
    """Handles message headers: text between one of `openers` and `<|message|>`.

    Models sometimes leave out the opener after a message: text between an end and one of the other
    markers is a header too.

    Attributes:
        openers: markers that start a header.
        ends: markers that end a message.
    """

    openers: tuple[str, ...] = (START,)
    ends: frozenset[str]

    def __init__(self, layout: Layout, start: Start) -> None:
        super().__init__(layout, start)
        self._header: list[str] | None = None
        self._given = ""  # the part of the header that is in the prompt
        self._gap: list[str] | None = None  # text after a message, until its role is known
        position, text = last_added(start)
        if text not in (*self.openers, MESSAGE):
            return
        opener = start.vocabulary.added.get(START)
        while position > 0 and start.prompt_ids[position] != opener:
            position -= 1
        self._given = start.vocabulary.decode(start.prompt_ids[position:])
        self._header, self.mode = [], Mode.HEADER
        if MESSAGE in self._given:
            self._given, _, started = self._given.partition(MESSAGE)
            self.start_body()
            if self.mode is Mode.SECTION:
                self._hold(started)

    @abstractmethod
    def begin(self, given: str, written: str) -> None:
        """Start the body of a message.

        Args:
            given: the part of the header that is in the prompt.
            written: the rest of the header.
        """

    @property
    def in_header(self) -> bool:
        """Whether the next text belongs to a header."""
        return self._header is not None

    def end_gap(self, marker: str = START) -> None:
        """Decide by the next marker whether text after a message was the start of a header."""
        if self._gap is None:
            return
        gap, self._gap, self.mode = "".join(self._gap), None, Mode.TEXT
        if gap.strip() and marker != START and marker not in self.ends:
            self._header, self._given, self.mode = [gap], "", Mode.HEADER
        elif gap:
            super().on_text(gap)

    def on_marker(self, marker: str) -> None:
        self.end_gap(marker)
        if self._header is not None and marker == MESSAGE:
            self.start_body()
        elif self._header is not None and marker not in self.ends and marker != START:
            self._header.append(marker)
        elif self._header is not None:
            self.start_body()
            self.on_marker(marker)
        elif self.mode is Mode.SECTION:
            super().on_marker(marker)
        elif marker in self.openers:
            self._header, self._given, self.mode = [marker], "", Mode.HEADER
        elif marker in self.ends:
            self.mode, self._gap = Mode.HEADER, []

    def on_text(self, text: str) -> None:
        if self._gap is not None:
            self._gap.append(text)
            if "\n" in text or sum(map(len, self._gap)) > _MAX_HEADER:
                self.end_gap()
        elif self._header is None:
            if self.mode is not Mode.ASIDE:
                super().on_text(text)
        else:
            self._header.append(text)
            if "\n" in text or sum(map(len, self._header)) > _MAX_HEADER:
                self._abandon_header()

    def on_end(self, reason: FinishReason) -> None:
        self.end_gap()
        if self._header is not None and reason is FinishReason.STOP:
            self._abandon_header()
        super().on_end(reason)

    def reason(self) -> None:
        """Start a message of reasoning."""
        self.writer.border()
        self.mode = Mode.REASONING

    def answer(self) -> None:
        """Start a message of the answer."""
        self.mode = Mode.TEXT
        if self.writer.wrote:
            self.writer.text("\n\n")  # a message of its own

    def start_body(self) -> None:
        """End the header and start its message's body."""
        written, given = "".join(self._header or ()), self._given
        self._header, self._given = None, ""
        self.begin(given, written)

    def _abandon_header(self) -> None:
        """Treat what looked like a header as text of the answer."""
        written, self._header, self._given = "".join(self._header or ()), None, ""
        self.mode = Mode.TEXT
        if written:
            super().on_text(written)
