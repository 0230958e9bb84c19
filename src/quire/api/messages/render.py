"""Anthropic's answers: the events of a stream, and the message that they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from quire.api.shared.errors import anthropic_body
from quire.api.shared.pieces import Array, compact
from quire.api.shared.signing import Signer
from quire.core.request import FinishReason
from quire.serving.streams import ChoiceEvent, GenerationStream
from quire.text.events import (
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

WireEvent = dict[str, Any]
ReasoningShown = Literal["shown", "omitted", "redacted"]

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """Fields of an answer besides its content.

    Attributes:
        max_tokens: the requested limit. An answer cut off earlier has filled the context.
        reasoning: `omitted` makes blocks without text; `redacted` ones say nothing at all.
            Either can be sent back.
        dropped: paths of reasoning that were left out of the prompt.
        applied_edits: edits made to the prompt; None if none was requested.
    """

    id: str
    model: str
    max_tokens: int
    reasoning: ReasoningShown = "shown"
    dropped: tuple[str, ...] = ()
    applied_edits: tuple[WireEvent, ...] | None = None

    def message(self, usage: WireEvent) -> WireEvent:
        """Return the message at the start of a stream."""
        body: WireEvent = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage,
        }
        if self.applied_edits is not None:
            body["context_management"] = {"applied_edits": list(self.applied_edits)}
        if self.dropped:
            body["input_transformations"] = [
                {"type": "thinking_dropped", "path": path, "reason": "model_binding_mismatch"}
                for path in self.dropped
            ]
        return body


def usage_body(usage: Usage) -> WireEvent:
    """Return Anthropic's `usage`. Its `input_tokens` exclude cached tokens.

    Writing to the cache costs nothing extra here, so `cache_creation` is zero.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }


def stop_reason(end: Finished, max_tokens: int) -> str:
    """Return Anthropic's stop reason.

    An answer cut short for a loop or a malformed call counts as cut off by `max_tokens`, so that no
    client runs its last call.
    """
    if end.stop is not None:
        return "stop_sequence"
    if end.reason is FinishReason.LENGTH and end.usage.completion_tokens < max_tokens:
        return "model_context_window_exceeded"
    if end.reason.is_cut_off:
        return "max_tokens"
    return "tool_use" if end.tool_calls else "end_turn"


@dataclass(slots=True)
class _OpenBlock:
    """The content block that is still growing."""

    kind: str
    text: list[str] = field(default_factory=list)


class MessageEvents:
    """Converts events to Anthropic's, which number and nest content blocks."""

    def __init__(self, answering: MessageSettings, run: GenerationStream, signer: Signer) -> None:
        self._settings = answering
        self._run = run
        self._signer = signer
        self._started = False
        self._index = -1
        self._block: _OpenBlock | None = None

    def start(self) -> Iterator[WireEvent]:
        """Yield the opening of the message with the cache counts known so far. The end has the
        final ones.
        """
        if not self._started:
            self._started = True
            run = self._run
            usage = Usage(run.prompt_tokens, 0, 0, cached_tokens=run.cached_tokens)
            message = self._settings.message(usage_body(usage))
            yield {"type": "message_start", "message": message}

    def feed(self, event: Event) -> Iterator[WireEvent]:
        """Yield Anthropic's events for one event."""
        match event:
            case Text(text) if text:
                yield from self._grow("text", {"type": "text", "text": ""}, text)
            case Reasoning(reasoning):
                yield from self._think(reasoning)
            case ToolCallStarted(_, call_id, name):
                tool = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._open("tool_use", tool)
            case ToolCallArguments(_, piece):
                yield self._delta({"type": "input_json_delta", "partial_json": piece})
            case ToolCallEnded():
                yield from self._close()
            case Finished():
                yield from self._close()
                yield from self._end(event)
            case Failed(error):
                yield anthropic_body(error)

    def _think(self, reasoning: str) -> Iterator[WireEvent]:
        if self._settings.reasoning == "shown":
            opening = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._grow("thinking", opening, reasoning)
        elif self._block is not None and self._block.kind == "hidden":
            self._block.text.append(reasoning)
        else:
            yield from self._close()
            self._block = _OpenBlock("hidden", [reasoning])

    def _grow(self, kind: str, opening: WireEvent, text: str) -> Iterator[WireEvent]:
        """Append text to the block of a kind, which is opened if needed."""
        if self._block is None or self._block.kind != kind:
            yield from self._open(kind, opening)
        assert self._block is not None
        if kind == "thinking":
            self._block.text.append(text)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, kind: str, opening: WireEvent) -> Iterator[WireEvent]:
        yield from self._close()
        self._block = _OpenBlock(kind)
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": opening}

    def _close(self) -> Iterator[WireEvent]:
        block, self._block = self._block, None
        if block is None:
            return
        if block.kind == "hidden":
            yield from self._hidden("".join(block.text))
        if block.kind == "thinking":
            signature = self._signer.sign("".join(block.text))
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self._index}

    def _hidden(self, reasoning: str) -> Iterator[WireEvent]:
        """Collect reasoning that is not shown, and write it as a whole at its end."""
        signed = self._signer.pack(reasoning)
        omitted = self._settings.reasoning == "omitted"
        block = (
            {"type": "thinking", "thinking": "", "signature": ""}
            if omitted
            else {"type": "redacted_thinking", "data": signed}
        )
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if omitted:
            yield self._delta({"type": "signature_delta", "signature": signed})

    def _delta(self, delta: WireEvent) -> WireEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self, end: Finished) -> Iterator[WireEvent]:
        reason = stop_reason(end, self._settings.max_tokens)
        delta = {"stop_reason": reason, "stop_sequence": end.stop, "stop_details": None}
        yield {"type": "message_delta", "delta": delta, "usage": usage_body(end.usage)}
        yield {"type": "message_stop"}


class MessageChunks:
    """Renders a stream. Anthropic sends a ping after the opening of the first block."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events
        self._pinged = False

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the events of a batch, the opening of the message before the first of them."""
        yield from map(self._written, self._events.start())
        for _, event in batch:
            yield from map(self._written, self._events.feed(event))

    def waiting(self) -> bytes:
        """Return a ping, after the opening of the message, which clients need first."""
        return b"".join(map(self._written, self._events.start())) + PING

    def end(self) -> bytes:
        """Return nothing, because `message_stop` is the end."""
        return b""

    def _written(self, event: WireEvent) -> bytes:
        kind: str = event["type"]
        written = b"event: " + kind.encode() + b"\ndata: " + compact(event) + b"\n\n"
        if kind == "content_block_start" and not self._pinged:
            self._pinged = True
            written += PING
        return written


class MessageFold:
    """The message that a stream's events add up to.

    Attributes:
        content: its blocks so far.
    """

    def __init__(self) -> None:
        self._message: WireEvent = {}
        self.content: list[WireEvent] = []
        self._pieces: list[str] = []

    def add(self, event: WireEvent) -> None:
        """Add the next event."""
        match event["type"]:
            case "message_start":
                self._message = dict(event["message"])
            case "content_block_start":
                self.content.append(dict(event["content_block"]))
                self._pieces = []
            case "content_block_delta":
                _add(event["delta"], self.content[-1], self._pieces)
            case "content_block_stop":
                _complete(self.content[-1], "".join(self._pieces))
            case "message_delta":
                self._message |= {**event["delta"], "usage": event["usage"]}

    def message(self) -> WireEvent:
        """Return the message so far, for `pieces`."""
        return {**self._message, "content": Array(self.content)}


def _add(delta: WireEvent, block: WireEvent, pieces: list[str]) -> None:
    match delta:
        case {"type": "signature_delta", "signature": signature}:
            block["signature"] = signature
        case {"text": piece} | {"thinking": piece} | {"partial_json": piece}:
            pieces.append(piece)


def _complete(block: WireEvent, text: str) -> None:
    """Complete a block. A call that was cut off keeps its complete members, as clients of streams
    do.
    """
    match block["type"]:
        case "tool_use" if text:
            block["input"] = _input(text)
        case "text":
            block["text"] = text
        case "thinking":
            block["thinking"] = text


def _input(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        pass
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return {}  # cut off behind half of a pair of escapes
