"""OpenAI's responses: the events of a stream, and the response that they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.responses.items import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OpenItem,
    OwnCallItem,
    ReasoningItem,
    SearchCallItem,
    WireEvent,
)
from quire.api.responses.own_tools import OWN_TOOLS
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.pieces import Merged, pieces
from quire.api.shared.render import TokenNames
from quire.api.shared.signing import Signer
from quire.api.shared.toolbox import Toolbox
from quire.core.request import Failure
from quire.serving.streams import ChoiceEvent
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

_CALLS: dict[str, type[CallItem]] = {
    "function": FunctionCallItem,
    "custom": CustomCallItem,
    "search": SearchCallItem,
    **dict.fromkeys(OWN_TOOLS, OwnCallItem),
}


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """Fields of a response besides its output.

    Attributes:
        constant: the constant part of the response, as JSON.
        signer: packs reasoning, if the request asks for `reasoning.encrypted_content`.
        keep: stores the response, in pieces, and its items when it has ended well.
        prewarms: whether the prompt is only read into the cache.
    """

    constant: bytes
    tools: Toolbox
    tokenizer: TokenNames
    summary: bool
    signer: Signer | None
    keep: Callable[[Sequence[bytes], Sequence[StoredItem]], None]
    prewarms: bool = False

    def body(self, status: str, **changed: Any) -> Merged:
        """Return the whole response."""
        started = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return Merged(self.constant, {"status": status, "output": [], **started, **changed})


def usage_body(usage: Usage) -> WireEvent:
    """Return OpenAI's `usage` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEvents:
    """Converts events to OpenAI's, which number and nest output items."""

    def __init__(self, responding: ResponseSettings) -> None:
        self._responding = responding
        self._sent = 0
        self._item: OpenItem | None = None
        self._output: list[WireEvent] = []
        self._stored: list[StoredItem] = []
        self._spoken = False
        self._whole = True

    def start(self) -> Iterator[WireEvent]:
        """Yield the opening of the response, once."""
        if not self._sent:
            for kind in ("created", "in_progress"):
                yield self._number(self._lifecycle(kind, self._responding.body("in_progress")))

    def feed(self, event: Event) -> Iterator[WireEvent]:
        """Yield OpenAI's events for one event."""
        for each in self._events(event):
            yield self._number(each)

    def waiting(self) -> Iterator[WireEvent]:
        """Return an event which says that the response is still in progress."""
        yield self._number(self._lifecycle("in_progress", self._responding.body("in_progress")))

    def _number(self, event: WireEvent) -> WireEvent:
        numbered = {**event, "sequence_number": self._sent}
        self._sent += 1
        return numbered

    def _lifecycle(self, kind: str, body: Merged) -> WireEvent:
        return {"type": f"response.{kind}", "response": body}

    def _events(self, event: Event) -> Iterator[WireEvent]:
        match event:
            case Text("") if not isinstance(self._item, MessageItem):
                pass  # log-probabilities of calls and the end, which no item can carry
            case Text(text, logprobs):
                if not isinstance(self._item, MessageItem):
                    yield from self._open(self._message)
                assert isinstance(self._item, MessageItem)
                yield from self._item.add(text, logprobs)
            case Reasoning(""):
                pass  # log-probabilities of marks, which no item can carry
            case Reasoning(text):
                if not isinstance(self._item, ReasoningItem):
                    yield from self._open(self._reasoning)
                assert isinstance(self._item, ReasoningItem)
                yield from self._item.add(text)
            case ToolCallStarted():
                self._whole = False
                yield from self._open(lambda index: self._call(index, event))
            case ToolCallArguments(_, piece):
                assert isinstance(self._item, CallItem)
                yield from self._item.add(piece)
            case ToolCallEnded():
                self._whole = True
                yield from self._close("completed")
            case Finished():
                yield from self._end(event)
            case Failed(error):
                yield self._lifecycle("failed", self._failed(error))

    def _reasoning(self, index: int) -> ReasoningItem:
        responding = self._responding
        return ReasoningItem(index, summary=responding.summary, signer=responding.signer)

    def _call(self, index: int, started: ToolCallStarted) -> OpenItem:
        named = self._responding.tools.client_name(started.name)
        return _CALLS[named.kind](index, started.id, named)

    def _message(self, index: int) -> MessageItem:
        return MessageItem(index, self._responding.tokenizer)

    def _open(self, make: Callable[[int], OpenItem]) -> Iterator[WireEvent]:
        """Open an item after closing the one that is open."""
        yield from self._close("completed")
        self._item = make(len(self._output))
        self._spoken = self._spoken or not isinstance(self._item, ReasoningItem)
        yield from self._item.open()

    def _close(self, status: str) -> Iterator[WireEvent]:
        """Close the open item. A call without its own end was cut off."""
        item, self._item = self._item, None
        if item is not None:
            status = status if self._whole or not isinstance(item, CallItem) else "incomplete"
            yield from item.close(status)
            self._output.append(item.body(status))
            self._stored.append(StoredItem.of_answer(item.stored(status)))

    def _end(self, end: Finished) -> Iterator[WireEvent]:
        """Yield the end. An empty answer gets an empty message."""
        silent = self._responding.prewarms
        cut_off = end.reason.is_cut_off and not silent
        status = "incomplete" if cut_off else "completed"
        if not self._spoken and not cut_off and not silent:
            yield from self._open(self._message)
        yield from self._close(status)
        body = self._responding.body(
            status,
            completed_at=None if cut_off else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut_off else None,
            output=self._output,
            usage=usage_body(end.usage),
        )
        self._responding.keep(tuple(body.pieces()), self._stored)
        yield self._lifecycle(status, body)

    def _failed(self, error: Failure) -> Merged:
        told = {"code": error.code or "server_error", "message": error.message}
        return self._responding.body("failed", error=told, output=self._output)


class ResponseChunks:
    """Renders a stream."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the events of a batch, the opening of the response before the first of them."""
        for opening in self._events.start():
            yield from _written(opening)
        for _, event in batch:
            for each in self._events.feed(event):
                yield from _written(each)

    def waiting(self) -> bytes:
        """Return an in-progress event: Codex counts events, not comments, as signs of life."""
        events = [*self._events.start()] or [*self._events.waiting()]
        return b"".join(piece for each in events for piece in _written(each))

    def end(self) -> bytes:
        """Return nothing, because the response's last event is the end."""
        return b""


def _written(event: WireEvent) -> Iterator[bytes]:
    yield b"event: " + str(event["type"]).encode() + b"\ndata: "
    yield from pieces(event)
    yield b"\n\n"
