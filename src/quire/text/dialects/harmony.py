"""gpt-oss: the harmony format, in which each message has a header with a channel.

Source: OpenAI's harmony response format. A message is
`<|start|>assistant<|channel|>CHANNEL<|message|>...<|end|>`. The channel `analysis` is reasoning,
`final` the answer, `commentary` a call if it has a recipient (`to=functions.NAME`) and a preamble
for the user if it has none. `<|return|>` ends the answer, `<|call|>` ends a call. A message to
another recipient, such as `python` or `browser.search`, OpenAI's own tools, is reasoning if its
channel is `analysis`; else it is left out. So is a message that the model writes in a tool's name.
If a header names several channels, as models sometimes write, the last one counts; if it has none
but for a word, that word is the channel.
"""

from __future__ import annotations

import re

from quire.text.dialects.base import Dialect, Forced, Frame, Start, Tool, Vocabulary
from quire.text.dialects.flow import JsonFlow, StartedCall
from quire.text.dialects.grammar import call_rules, literal, marker
from quire.text.dialects.headers import MESSAGE, START, HeaderParser
from quire.text.dialects.marker_parser import Body, Layout, Mode, Reading, Section, Tools
from quire.text.dialects.readers import head_of, read_named_json

CHANNEL = "<|channel|>"
_ENDS = frozenset({"<|end|>", "<|call|>", "<|return|>"})
_LAYOUT = Layout(quiet=frozenset({START, CHANNEL, MESSAGE, "<|constrain|>"}) | _ENDS)
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")
_AUTHOR = re.compile(r"<\|start\|>\s*([\w.:/-]+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_READERS = frozenset({"assistant", "user", "all"})
"""Recipients that stand for the reader of the answer."""
_FUNCTIONS = "functions."


class _HarmonyParser(HeaderParser):
    """Interprets the headers of harmony's messages."""

    openers, ends = (START, CHANNEL), _ENDS

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)

    def begin(self, given: str, written: str) -> None:
        role, *channels = (given + written).split(CHANNEL)
        last = channels[-1] if channels else role
        channel = _CHANNEL.match(last)
        author, name = _named(_AUTHOR, role), _named(_RECIPIENT, f"{role} {last}")
        if author is None and name is not None and self._is_tool(name):
            self.mode = Mode.TEXT
            self.open(written + MESSAGE, _call_section(name.removeprefix(_FUNCTIONS)))
        elif channel is not None and channel.group(1) == "analysis":
            self.reason()
        elif author is not None or name is not None:
            self.mode = Mode.ASIDE
        else:
            self.answer()

    def _is_tool(self, name: str) -> bool:
        """Return whether a recipient names one of the client's tools, or has the form of one."""
        return bool(self.tools) and (name.startswith(_FUNCTIONS) or name in self.tools)


def _named(pattern: re.Pattern[str], header: str) -> str | None:
    """Return the tool that a header names as its recipient or author; None if it names none.

    No tool starts like the assistant's own name, which models sometimes write twice.
    """
    found = pattern.search(header)
    name = "" if found is None else found.group(1)
    return None if not name or name in _READERS or name.startswith("assistant") else name


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
