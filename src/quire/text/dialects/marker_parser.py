"""The parser that most dialects share: reasoning between markers, and sections of calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from weakref import WeakKeyDictionary

from quire.core.request import FinishReason
from quire.text.dialects.base import Call, Start, Tool, Vocabulary
from quire.text.dialects.flow import CallInProgress, StartCall
from quire.text.dialects.scanner import MarkerScanner, Marks
from quire.text.dialects.writer import Writer, new_call_id
from quire.text.events import Delta, Reasoning, Text

Tools = Mapping[str, Tool]
MAX_HEAD = 512
"""Characters after which an undecided section is treated as text."""

NO_SECTION = ""
"""The opener of sections that start without a marker, at the start of an answer."""


@dataclass(frozen=True, slots=True)
class Body:
    """The text of a section so far, without its opening marker.

    Attributes:
        marks: (offset in `text`, marker) of each marker, in order. A marker's spelling elsewhere is
            ordinary text.
        closed: whether a closing marker follows the text.
    """

    text: str
    marks: tuple[tuple[int, str], ...] = ()
    closed: bool = False

    def find(self, marker: str, start: int = 0) -> int:
        """Return the offset of the first `marker` at or after `start`, or -1."""
        for index in range(bisect_left(self.marks, (start, "")), len(self.marks)):
            if self.marks[index][1] == marker:
                return self.marks[index][0]
        return -1


@dataclass(frozen=True, slots=True)
class Reading:
    """The complete calls of a section, and where they end.

    Attributes:
        calls: the complete calls at its start.
        end: offset after the last complete call and its separator.
        until: if the text ends inside a string, the text that ends the string; a marker before it
            is part of the string. Else "".
    """

    calls: tuple[Call, ...] = ()
    end: int = 0
    until: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the answer that may hold calls.

    Attributes:
        read: reads the calls of a whole section; anything it cannot read is not a call. Never
            raises.
        head: whether the first characters can start a call; None if more are needed. After False
            the section is emitted as text at once.
        ends: markers that close the section. Any other marker that is not `inner` closes it too,
            and is then processed itself. So does the end of the answer.
        inner: markers that are part of the section.
        start: returns the flow of the first call from the first characters; None if it is not known
            yet.
    """

    read: Callable[[Body, Tools], Reading]
    head: Callable[[str, Tools], bool | None]
    ends: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    start: StartCall | None = None


Enclosing = tuple[frozenset[str], frozenset[str]]
"""Markers that open a part of an answer, and markers that close it."""


def enclosing(*pairs: tuple[str, str]) -> Enclosing:
    """Return the opening markers and the closing markers of some pairs. Any closes what any
    opened.
    """
    return frozenset(opens for opens, _ in pairs), frozenset(closes for _, closes in pairs)


@dataclass(frozen=True, slots=True)
class Layout:
    """The markers of a dialect and their meaning.

    Attributes:
        reasoning: markers that open reasoning, and that close it.
        sections: sections by opening marker; that of `NO_SECTION` opens at the start of the answer.
        answer: markers before and after an answer; a line end beside them belongs to them.
        parts: tokens that occur within the spelling of markers; these markers are then found in
            text.
        quiet: markers around sections, which are dropped. A marker that closes sections is dropped
            too if it directly follows a call.
        new_id: returns a new call id.
    """

    reasoning: Enclosing = (frozenset(), frozenset())
    answer: Enclosing = (frozenset(), frozenset())
    sections: Mapping[str, Section] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    quiet: frozenset[str] = frozenset()
    new_id: Callable[[], str] = new_call_id
    _marks: WeakKeyDictionary[Vocabulary, Marks] = field(
        init=False, repr=False, compare=False, default_factory=WeakKeyDictionary
    )

    def closes(self, marker: str) -> bool:
        """Return whether a marker closes sections."""
        return any(marker in section.ends for section in self.sections.values())

    def markers(self) -> frozenset[str]:
        """Return every marker of the dialect."""
        found = set[str]().union(*self.reasoning, *self.answer, self.quiet)
        for opener, section in self.sections.items():
            found.update({opener} - {NO_SECTION}, section.ends, section.inner)
        return frozenset(found)

    def marks(self, vocabulary: Vocabulary) -> Marks:
        """Return how a vocabulary spells the markers; computed once for each vocabulary."""
        kept = self._marks.get(vocabulary)
        if kept is None:
            kept = self._marks[vocabulary] = Marks.of(self.markers(), self.parts, vocabulary.added)
        return kept


class Mode(Enum):
    """How the parser interprets ordinary text."""

    START = auto()  # no text yet: a section may start without a marker
    TEXT = auto()
    REASONING = auto()
    UNDECIDED = auto()  # after a call within reasoning: reasoning, if a closing marker follows
    SECTION = auto()
    HEADER = auto()  # text of a header, which a subclass interprets
    ASIDE = auto()  # a message to another recipient, which is left out


def last_added(start: Start, parts: Collection[str] = ()) -> tuple[int, str]:
    """Return position and text of the prompt's last added token; (-1, "") if it has none.

    Earlier tokens belong to earlier turns, so this token alone tells how the answer starts.

    Args:
        parts: tokens that are parts of markers, which do not count.
    """
    names = start.vocabulary.names
    for position in range(len(start.prompt_ids) - 1, -1, -1):
        text = names.get(start.prompt_ids[position])
        if text is not None and text not in parts:
            return position, text
    return -1, ""


def started_reasoning(start: Start, marks: Enclosing, parts: Collection[str] = ()) -> str | None:
    """Return the text of reasoning that the prompt leaves open; None if it opens none.

    A marker that is an added token counts by its id. A marker of ordinary tokens counts by its
    spelling after the last added token, which starts the assistant's turn. If no token starts
    turns, the prompt must end with the marker, since other text may be a user's.

    Args:
        parts: see `Layout`.
    """
    opens, closes = marks
    if not opens:
        return None
    position, last = last_added(start, parts)
    added = start.vocabulary.added
    if opens <= added.keys():
        if last not in opens:
            return None
        return start.vocabulary.decode(start.prompt_ids[position + 1 :])
    tail = start.vocabulary.decode(start.prompt_ids[position + 1 :])
    spelled = [mark for mark in opens | closes if mark not in added]
    found = max(((tail.rfind(mark), mark) for mark in spelled), default=(-1, ""))
    if found[0] < 0:
        return tail if last in opens else None
    started = tail[found[0] + len(found[1]) :]
    opened = found[1] in opens and (position > 0 or not started.strip())
    return started if opened else None


class MarkerParser:
    """A `Parser` configured by a `Layout`. Dialects with further states override the `on_`
    methods.
    """

    def __init__(self, layout: Layout, start: Start) -> None:
        self.layout = layout
        self.tools = start.tools
        self.writer = Writer(layout.new_id)
        marks = layout.marks(start.vocabulary)
        self._ids, self._parts, self.owned = marks.ids, marks.parts, marks.owned
        self._scanner = MarkerScanner(marks.spelled)
        self.mode = Mode.START if self.tools and NO_SECTION in layout.sections else Mode.TEXT
        if started_reasoning(start, layout.reasoning, layout.parts) is not None:
            self.mode = Mode.REASONING
        self._opener = self._marker = ""
        self._section = Section(lambda body, tools: Reading(), lambda text, tools: False)
        self._pieces: list[str] = []
        self._length = 0
        self._marks: list[tuple[int, str]] = []
        self._sure = False
        self._until = ""  # what the section's open string needs, as of `_read_pieces` pieces
        self._read_pieces = 0
        self._back = Mode.TEXT
        self._undecided = ""
        self._flowing: CallInProgress | None = None
        self._may_start = False

    @property
    def thinking(self) -> bool | None:
        return None if self.mode is Mode.HEADER else self.mode is Mode.REASONING

    def feed(self, token_id: int, piece: str) -> list[Delta]:
        marker = self._ids.get(token_id)
        if marker is None:
            piece += self._parts.get(token_id, "")
            if not piece:
                return []
            if (delta := self.flowing(piece)) is not None:
                return [delta]
            self._scan(piece)
            return self.writer.take()
        if piece:
            self._scan(piece)
        self._flush_scanner()
        self.on_marker(marker)
        return self.writer.take()

    def flowing(self, text: str) -> Text | Reasoning | None:
        if not text[-1].isspace() and self._scanner.ignores(text):
            if self.mode is Mode.TEXT and self.writer.text_flows:
                return Text(text)
            if self.mode is Mode.REASONING and self.writer.reasoning_flows:
                return Reasoning(text)
        return None

    def finish(self, reason: FinishReason) -> list[Delta]:
        self._flush_scanner()
        self.on_end(reason)
        self.writer.end(thinking=self.mode is Mode.REASONING)
        return self.writer.take()

    def _scan(self, piece: str) -> None:
        for part, is_marker in self._scanner.feed(piece):
            if is_marker:
                self.on_marker(part)
            else:
                self.on_text(part)

    def _flush_scanner(self) -> None:
        held = self._scanner.flush()
        if held:
            self.on_text(held)

    def on_text(self, text: str) -> None:
        """Process ordinary text."""
        if self.mode is Mode.TEXT:
            self.writer.text(text)
        elif self.mode is Mode.REASONING:
            self.writer.reason(text)
        elif self.mode is Mode.SECTION:
            self._hold(text)
        elif self.mode is Mode.UNDECIDED:
            self._undecided += text
            if len(self._undecided) > MAX_HEAD:
                self._decide(Mode.TEXT)
        elif not text.strip():
            self.writer.text(text)
        else:
            bare = text.lstrip()
            self.writer.text(text[: len(text) - len(bare)])
            self.open(NO_SECTION, self.layout.sections[NO_SECTION])
            self._hold(bare)

    def on_marker(self, marker: str) -> None:
        """Process a marker."""
        opens, closes = self.layout.reasoning
        calls = marker in self.layout.sections and bool(self.tools)
        if self.mode is Mode.UNDECIDED and (calls or marker in opens or marker in closes):
            self._decide(Mode.TEXT if marker in opens else Mode.REASONING)
        if self.mode is Mode.SECTION:
            self._mark(marker)
        elif marker in opens:
            self.writer.border()
            self.mode = Mode.REASONING
        elif marker in closes:
            self.writer.border()
            self.mode = self.resting()
        elif marker in self.layout.answer[0]:
            self.writer.border()
        elif marker in self.layout.answer[1]:
            self.writer.drop_space()
        elif calls:
            self.open(marker, self.layout.sections[marker])
        elif not (
            marker in self.layout.quiet or (self.writer.after_call and self.layout.closes(marker))
        ):
            self.on_text(marker)

    def on_end(self, reason: FinishReason) -> None:
        """Process the end of the answer."""
        if self.mode is Mode.UNDECIDED:
            self._decide(Mode.TEXT)
        if self.mode is Mode.SECTION:
            body = self.body(closed=False)
            reading = self._section.read(body, self.tools)
            cut_off = reason is not FinishReason.STOP
            if reading.calls or not (cut_off and (self._sure or self._opener)):
                self._settle(body, reading, "", keep_rest=not cut_off)
            elif self._flowing is not None:
                self._flowing.cut_off()

    def _decide(self, mode: Mode) -> None:
        """Decide whether text after a call within reasoning is reasoning or answer."""
        held, self._undecided, self.mode = self._undecided, "", mode
        if held:
            self.on_text(held)

    def resting(self) -> Mode:
        """Return the mode outside of reasoning and sections."""
        fresh = not self.writer.wrote and not self.writer.calls
        return (
            Mode.START if self.tools and fresh and NO_SECTION in self.layout.sections else Mode.TEXT
        )

    def open(self, opener: str, section: Section) -> None:
        """Start a section. `opener` is emitted before its text if it turns out not to be a call."""
        self._back = Mode.REASONING if self.mode is Mode.REASONING else Mode.TEXT
        self.mode = Mode.SECTION
        self._opener = self._marker = opener
        self._section = section
        self._pieces, self._length, self._marks, self._sure = [], 0, [], False
        self._until, self._read_pieces = "", 0
        self._flowing, self._may_start = None, section.start is not None

    def body(self, *, closed: bool) -> Body:
        """Return the text of the open section."""
        return Body("".join(self._pieces), tuple(self._marks), closed)

    def _hold(self, text: str, *, marker: bool = False) -> None:
        self._pieces.append(text)
        self._length += len(text)
        if self._sure:
            self._flow(text, marker=marker)
            return
        head = self._section.head("".join(self._pieces)[:MAX_HEAD], self.tools)
        if head is False or (head is None and self._length > MAX_HEAD):
            self._give_back("")
        elif head:
            self._sure = True
            self._flow("", marker=False)

    def _flow(self, text: str, *, marker: bool) -> None:
        """Send the part of the first call that can no longer change."""
        if self._flowing is not None:
            self._flowing.feed(text, marker=marker)
        elif self._may_start and self._section.start is not None:
            held = "".join(self._pieces)
            started = self._section.start(held[:MAX_HEAD], self.tools)
            if started is not None:
                name, call_id, flow, start = started
                self._flowing = CallInProgress(self.writer, name, call_id, flow=flow)
                self._flowing.feed(held[start:])
            self._may_start = len(held) <= MAX_HEAD

    def _mark(self, marker: str) -> None:
        if marker == self._marker and not "".join(self._pieces).strip():
            self._opener += "".join(self._pieces) + marker  # written twice
            self._pieces, self._length = [], 0
            return
        if marker not in self._section.inner and not self._still_in_string():
            body = self.body(closed=True)
            reading = self._section.read(body, self.tools)
            if not reading.until:
                ends = marker in self._section.ends
                self._settle(body, reading, marker if ends else "", keep_rest=True)
                if not ends:
                    self.on_marker(marker)
                return
            self._until = reading.until
        self._marks.append((self._length, marker))
        self._hold(marker, marker=True)

    def _still_in_string(self) -> bool:
        """Return whether the string in which the last reading ended continues. This avoids reading
        all again.
        """
        overlap = max(0, self._read_pieces - len(self._until))
        fresh = "".join(self._pieces[overlap:])
        self._read_pieces = len(self._pieces)
        return bool(self._until) and self._until not in fresh

    def _settle(self, body: Body, reading: Reading, marker: str, *, keep_rest: bool) -> None:
        flowing, self._flowing = self._flowing, None
        started = flowing is not None and flowing.started
        if flowing is not None and started:
            if not (reading.calls and flowing.complete(reading.calls[0])):
                flowing.break_off()
                return
        elif not reading.calls:
            self._give_back(marker)
            return
        for call in reading.calls[started:]:
            self.writer.call(call)
        self.mode = Mode.UNDECIDED if self._back is Mode.REASONING else Mode.TEXT
        rest = body.text[reading.end :]
        if keep_rest and rest.strip():
            self.on_text(rest + marker)

    def _give_back(self, marker: str) -> None:
        """Emit the section as text or reasoning, as it was not a call."""
        self.mode = self._back
        self.on_text(self._opener + "".join(self._pieces) + marker)
