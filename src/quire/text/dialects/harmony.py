"""gpt-oss: the harmony format, in which each message has a header with a channel.

Source: OpenAI's harmony response format. A message is
`<|start|>assistant<|channel|>CHANNEL<|message|>...<|end|>`. The channel `analysis` is reasoning,
`final` the answer, `commentary` a call if it has a recipient (`to=functions.NAME`) and a preamble
for the user if it has none. `<|return|>` ends the answer, `<|call|>` ends a call. A message to
another recipient, such as `python` or `browser.search`, OpenAI's own tools, is reasoning if its
channel is `analysis`; else it is left out. So is a message that the model writes in a tool's name.
If a header names several channels, as models sometimes write, the last one counts.
"""

from __future__ import annotations

import re

from quire.core.request import FinishReason
from quire.text.dialects.base import Dialect, Forced, Frame, Start, Tool, Vocabulary
from quire.text.dialects.flow import JsonFlow, StartedCall
from quire.text.dialects.grammar import call_rules, literal, marker
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Mode,
    Reading,
    Section,
    Tools,
    last_added,
)
from quire.text.dialects.readers import head_of, read_named_json

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = frozenset({"<|end|>", "<|call|>", "<|return|>"})
_LAYOUT = Layout(quiet=frozenset({START, CHANNEL, MESSAGE, "<|constrain|>"}) | _ENDS)
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
_AUTHOR = re.compile(r"<\|start\|>\s*([\w.:/-]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_READERS = frozenset({"assistant", "user", "all"})
"""Recipients that stand for the reader of the answer."""
_FUNCTIONS = "functions."
_MAX_HEADER = 256


class _HarmonyParser(MarkerParser):
    """Handles message headers: text between `<|start|>` or `<|channel|>` and `<|message|>`."""

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)
        self._header: list[str] | None = None
        self._given = ""  # the part of the header that is in the prompt
        position, text = last_added(start)
        if text not in (START, CHANNEL, MESSAGE):
            return
        opener = start.vocabulary.added.get(START)
        while position > 0 and start.prompt_ids[position] != opener:
            position -= 1
        self._given = start.vocabulary.decode(start.prompt_ids[position:])
        self._header, self.mode = [], Mode.HEADER
        if MESSAGE in self._given:
            self._given, _, started = self._given.partition(MESSAGE)
            self._start_body()
            if self.mode is Mode.SECTION:
                self._hold(started)

    def on_marker(self, marker: str) -> None:
        if self._header is not None and marker == MESSAGE:
            self._start_body()
        elif self._header is not None and marker not in _ENDS and marker != START:
            self._header.append(marker)
        elif self._header is not None:
            self._start_body()
            self.on_marker(marker)
        elif self.mode is Mode.SECTION:
            super().on_marker(marker)
        elif marker in (START, CHANNEL):
            self._header, self._given, self.mode = [marker], "", Mode.HEADER
        elif marker in _ENDS:
            self.mode = Mode.TEXT

    def on_text(self, text: str) -> None:
        if self._header is None:
            if self.mode is not Mode.ASIDE:
                super().on_text(text)
            return
        self._header.append(text)
        if "\n" in text or sum(map(len, self._header)) > _MAX_HEADER:
            self._abandon_header()

    def on_end(self, reason: FinishReason) -> None:
        if self._header is not None and reason is FinishReason.STOP:
            self._abandon_header()
        super().on_end(reason)

    def _abandon_header(self) -> None:
        """Treat what looked like a header as text of the answer."""
        written, self._header, self._given = "".join(self._header or ()), None, ""
        self.mode = Mode.TEXT
        if written:
            super().on_text(written)

    def _start_body(self) -> None:
        written = "".join(self._header or ())
        role, *channels = (self._given + written).split(CHANNEL)
        self._header, self._given = None, ""
        last = channels[-1] if channels else ""
        channel = _CHANNEL.match(last)
        author, name = _named(_AUTHOR, role), _named(_RECIPIENT, f"{role} {last}")
        if author is None and name is not None and self._is_tool(name):
            self.mode = Mode.TEXT
            self.open(written + MESSAGE, _call_section(name.removeprefix(_FUNCTIONS)))
        elif channel is not None and channel.group(1) == "analysis":
            self.writer.border()
            self.mode = Mode.REASONING
        elif author is not None or name is not None:
            self.mode = Mode.ASIDE
        else:
            self.mode = Mode.TEXT
            if self.writer.wrote:
                self.writer.text("\n\n")  # a message of its own

    def _is_tool(self, name: str) -> bool:
        """Return whether a recipient names one of the client's tools, or has the form of one."""
        return bool(self.tools) and (name.startswith(_FUNCTIONS) or name in self.tools)


def _named(pattern: re.Pattern[str], header: str) -> str | None:
    """Return the tool that a header names as its recipient or author; None if it names none."""
    found = pattern.search(header)
    return None if found is None or found.group(1) in _READERS else found.group(1)


def _call_section(name: str) -> Section:
    def read(body: Body, tools: Tools) -> Reading:
        return read_named_json(name, body.text, 0)

    def start(text: str, tools: Tools) -> StartedCall | None:
        return (name, None, JsonFlow(), 0) if name in tools else None

    return Section(read, head_of("{"), ends=_ENDS, start=start)


def _before(vocabulary: Vocabulary) -> str:
    """Return a grammar of the optional reasoning message before a call or a constrained answer."""
    channel, message, end, start = (
        marker(text, vocabulary) for text in (CHANNEL, MESSAGE, "<|end|>", START)
    )
    return f'({channel} "analysis" {message} /(?s:.*)/ {end} {start} "assistant")?'


def _before_answer(vocabulary: Vocabulary) -> str:
    channel, message = marker(CHANNEL, vocabulary), marker(MESSAGE, vocabulary)
    return f'{_before(vocabulary)} {channel} "final" {message}'


def _calls(forced: Forced) -> list[str]:
    channel, constrain, message, call = (
        marker(text, forced.vocabulary) for text in (CHANNEL, "<|constrain|>", MESSAGE, "<|call|>")
    )

    def one(tool: Tool, arguments: str) -> str:
        to = literal(f"commentary to=functions.{tool.name} ")
        return f'{channel} {to} {constrain} "json" {message} {arguments} {call}?'

    return call_rules(forced.tools, one)


def _forced(forced: Forced) -> str:
    """Return a grammar of a single call, since `<|call|>` ends the turn."""
    return "\n".join([f"start: {_before(forced.vocabulary)} call", *_calls(forced)]) + "\n"


def _strict(forced: Forced) -> str:
    """Return a grammar of a whole turn. All headers are constrained, as a header alone can make a
    call.
    """
    channel, message, end, start, constrain, last = (
        marker(text, forced.vocabulary)
        for text in (CHANNEL, MESSAGE, "<|end|>", START, "<|constrain|>", "<|return|>")
    )
    rules = [
        f'start: (message {end} {start} "assistant")* (message {last}? | call)',
        f'message: {channel} ("analysis" | "commentary" | "final") (" "? {constrain} "json")? '
        f"{message} /(?s:.*)/",
    ]
    return "\n".join(rules + _calls(forced)) + "\n"


HARMONY = Dialect(
    name="harmony",
    recognises=lambda template, model_type: (
        (START in template and CHANNEL in template) or model_type.startswith("gpt_oss")
    ),
    build=_HarmonyParser,
    reasoning=(
        f"{CHANNEL}analysis{MESSAGE}",
        f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}",
    ),
    forced=_forced,
    strict=_strict,
    frame=Frame(_before_answer, "<|end|>"),
)
