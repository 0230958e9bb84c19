"""Gemma 4: channels for reasoning, and a special notation for calls.

Source: the chat template of google/gemma-4-*-it. Reasoning is `<|channel>thought\\n...<channel|>`;
a call is `<|tool_call>call:NAME{key:value,...}<tool_call|>`, where keys are bare, strings stand
between two `<|"|>` tokens without escapes, and everything else looks like JSON. Deviations that
models are reported to write are accepted: parentheses for the outer braces, `=` for `:`, `call`
left out, commas left out between arguments, a string that lacks its first `<|"|>`, or that has none
(vllm-project/vllm issues 53642 and 53431, sgl-project/sglang pull request 39240, ollama/ollama
issue 17882, hybridgroup/yzma pull request 243).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quire.core.request import FinishReason
from quire.text.dialects.base import Call, Dialect, Schema, Start, Tool
from quire.text.dialects.flow import StartedCall
from quire.text.dialects.gemma4_flow import GemmaFlow
from quire.text.dialects.gemma4_grammar import QUOTE, forced_calls
from quire.text.dialects.marker_parser import (
    Body,
    Layout,
    MarkerParser,
    Mode,
    Reading,
    Section,
    Tools,
    enclosing,
    started_reasoning,
)
from quire.text.dialects.values import (
    Unterminated,
    kinds,
    property_names,
    property_schema,
    read_json,
    resolve,
    skip_space,
    typed,
    write_json,
)

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
_LABELS = ("thought", "response", "content", "final")
_MAX_DEPTH = 64

_NAME = re.compile(r"\s*(?:call)?\s*:\s*([\w.:/-]+)\s*(?=[{(])")
_NAME_BEGUN = re.compile(r":[\w.:/-]*")
_KEY = re.compile(r"\s*([^\s:=,{}()\[\]\"'<]+)\s*[:=]")
_APOSTROPHES = re.compile(r"'([^']*)'(?=\s*[,})\]])")
# A label may be followed by the text at once, but "thoughtful" is a word.
_LABEL = re.compile(rf" *({'|'.join(_LABELS)})(?![a-z]) *")
_SEPARATOR = re.compile(r"\s*,\s*")
_BARE_IN_ARRAY = re.compile(r"[^,{}\[\]]+")


class _Keys:
    """The keys of one object. Keys of its schema may contain any characters."""

    def __init__(self, names: Iterable[str], *, braces: bool) -> None:
        self._names = {form: name for name in names for form in (name.strip(), name)}
        longest_first = sorted(self._names, key=len, reverse=True)
        known = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._known = re.compile(rf"({known})\s*[:=]")
        # A bare value continues past a comma, unless a key follows the comma.
        inner, sign = (r"{}\[\]", ":") if braces else (r"()\[\]{}", "[:=]")
        key = rf'(?:{known}|[\w.$@/-]+|"[^"]*")\s*{sign}'
        following = rf",(?!\s*(?:{key}|{re.escape(QUOTE)}))"
        self.bare = re.compile(rf"[^,{inner}]+(?:{following}[^,{inner}]*)*")

    def match(self, text: str, at: int) -> tuple[str, int] | None:
        """Return the key at `at` and the offset after its colon."""
        found = self._known.match(text, at) or self._known.match(text, skip_space(text, at))
        if found is not None:
            return self._names[found.group(1)], found.end()
        found = _KEY.match(text, at)
        return None if found is None else (found.group(1), found.end())


class _Reader:
    """Reads the arguments of one call by recursive descent over the section's text."""

    def __init__(self, body: Body, root: Schema) -> None:
        self.body, self.text, self.root = body, body.text, root
        self._known_keys: dict[tuple[int, bool], _Keys] = {}

    def object(self, at: int, schema: Schema, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        braces = self.text.startswith("{", at)
        closer = "}" if braces else ")"
        keys = self._keys(schema, braces)
        at = self._enter(at, depth)
        while not self.text.startswith(closer, at):
            key, at = self._key(at, keys)
            wanted = property_schema(schema, key, self.root)
            found[key], at = self.value(skip_space(self.text, at), wanted, depth, bare=keys.bare)
            at = self._separator(at, closer, keys)
        return found, at + 1

    def _keys(self, schema: Schema, braces: bool) -> _Keys:
        found = self._known_keys.get((id(schema), braces))
        if found is None:
            names = property_names(schema, self.root)
            found = self._known_keys[id(schema), braces] = _Keys(names, braces=braces)
        return found

    def array(self, at: int, schema: Schema, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = self._enter(at, depth)
        items = resolve(schema.get("items"), self.root)
        while not self.text.startswith("]", at):
            value, at = self.value(at, items, depth, bare=_BARE_IN_ARRAY)
            found.append(value)
            at = self._separator(at, "]", following=None)
        return found, at + 1

    def value(self, at: int, schema: Schema, depth: int, bare: re.Pattern[str]) -> tuple[Any, int]:
        quoted = self._quoted(at)
        if quoted is not None:
            allowed = kinds(schema, self.root)
            text, at = quoted
            return (text if not allowed or "string" in allowed else self._typed(text, schema)), at
        match self.text[at : at + 1]:
            case "{":
                return self.object(at, schema, depth + 1)
            case "[":
                return self.array(at, schema, depth + 1)
            case '"':
                return read_json(self.text, at)
        quoted = self._half_quoted(at, bare)
        if quoted is not None:
            return quoted
        found = bare.match(self.text, at)
        if found is None or not found.group().strip():
            raise ValueError("no value")
        return self._typed(found.group().strip(), schema), found.end()

    def _typed(self, text: str, schema: Schema) -> Any:
        return typed(text, schema, self.root)

    def _enter(self, at: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        return skip_space(self.text, at + 1)

    def _quoted(self, at: int) -> tuple[str, int] | None:
        if self.body.find(QUOTE, at) != at:
            return None
        start = at + len(QUOTE)
        end = self.body.find(QUOTE, start)
        if end < 0:
            raise Unterminated(QUOTE)
        return self.text[start:end], end + len(QUOTE)

    def _half_quoted(self, at: int, bare: re.Pattern[str]) -> tuple[str, int] | None:
        apostrophes = _APOSTROPHES.match(self.text, at)
        if apostrophes is not None:
            return apostrophes.group(1), apostrophes.end()
        end = self.body.find(QUOTE, at)
        found = bare.match(self.text, at, end) if end >= 0 else None
        if found is None or found.end() != end or found.group().rstrip().endswith(","):
            return None
        return self.text[at:end], end + len(QUOTE)

    def _key(self, at: int, keys: _Keys) -> tuple[str, int]:
        quoted = self._quoted(at)
        if quoted is None:
            found = keys.match(self.text, at)
            if found is not None:
                return found
            if not self.text.startswith('"', at):
                raise ValueError("no key")
            quoted = read_json(self.text, at)
        key, at = quoted
        at = skip_space(self.text, at)
        if not self.text.startswith(":", at):
            raise ValueError("no colon")
        return key, at + 1

    def _separator(self, at: int, closer: str, following: _Keys | None) -> int:
        at = skip_space(self.text, at)
        if self.text.startswith(closer, at):
            return at
        found = _SEPARATOR.match(self.text, at)
        if found is not None:
            return found.end()
        if following is None or not following.match(self.text, at):
            raise ValueError("neither a comma nor an end")
        return at


def _read(body: Body, tools: Tools) -> Reading:
    calls: list[Call] = []
    at = 0
    while opening := _NAME.match(body.text, at):
        name = opening.group(1)
        schema = tools.get(name, Tool(name)).parameters
        try:
            arguments, end = _Reader(body, schema).object(opening.end(), schema, 0)
            calls.append(Call(name, write_json(arguments)))
        except Unterminated as error:
            return Reading(tuple(calls), at, error.until)
        except ValueError:
            break
        at = end
    return Reading(tuple(calls), at)


def _head(text: str, tools: Tools) -> bool | None:
    if _NAME.match(text):
        return True
    compact = "".join(text.split()).removeprefix("call")
    return None if "call".startswith(compact) or _NAME_BEGUN.fullmatch(compact) else False


def _start(text: str, tools: Tools) -> StartedCall | None:
    opening = _NAME.match(text)
    if opening is None or opening.group(1) not in tools or not text.startswith("{", opening.end()):
        return None
    return opening.group(1), None, GemmaFlow(tools[opening.group(1)]), opening.end()


_LAYOUT = Layout(
    sections={
        "<|tool_call>": Section(
            _read,
            _head,
            ends=frozenset({"<tool_call|>"}),
            inner=frozenset({QUOTE}),
            start=_start,
        )
    },
    reasoning=enclosing((CHANNEL, CHANNEL_END)),
    quiet=frozenset({"<|tool_response>"}),
)


class _GemmaParser(MarkerParser):
    """Adds the label after `<|channel>`, which says what the channel holds."""

    def __init__(self, start: Start) -> None:
        super().__init__(_LAYOUT, start)
        self._label: str | None = None
        started = started_reasoning(start, _LAYOUT.reasoning)
        if started is not None:
            self._label, self.mode = "", Mode.HEADER
            self.on_text(started)
            self.writer.end(thinking=True)
            self.writer.take()  # reasoning in the prompt is not part of the answer

    def on_marker(self, marker: str) -> None:
        self._settle_label(ended=True)
        super().on_marker(marker)
        if marker == CHANNEL and self.mode is Mode.REASONING:
            self._label, self.mode = "", Mode.HEADER

    def on_text(self, text: str) -> None:
        if self._label is None:
            super().on_text(text)
            return
        self._label += text
        self._settle_label(ended=False)

    def on_end(self, reason: FinishReason) -> None:
        self._settle_label(ended=True)
        super().on_end(reason)

    def _settle_label(self, *, ended: bool) -> None:
        """Decide what the open channel holds, once enough of its first line has arrived."""
        if self._label is None:
            return
        held = self._label
        found = _LABEL.match(held)
        if found is None or found.end() == len(held):
            bare = held.strip(" ")
            undecided = any(label.startswith(bare) for label in _LABELS)
            if undecided and not ended:
                return
            if undecided and found is None:
                held = ""  # cut off inside the label
        self._label, self.mode = None, Mode.REASONING
        if found is not None and found.group(1) != "thought":
            self.mode = self.resting()
        rest = held[found.end() :].removeprefix("\n") if found else held
        if rest:
            super().on_text(rest)


GEMMA4 = Dialect(
    name="gemma4",
    recognises=lambda template, model_type: (
        "<|tool_call>" in template or "<|channel>" in template or model_type.startswith("gemma4")
    ),
    build=_GemmaParser,
    reasoning=(CHANNEL, CHANNEL_END),
    forced=forced_calls,
    openers=("<|tool_call>",),
)
