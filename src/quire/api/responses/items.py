"""Items of an answer while they are written: the events that open, extend and close each kind.

Every event has `type` and `output_index`; the sender numbers events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from quire.api.responses.own_tools import OWN_TOOLS
from quire.api.shared.content import custom_input, read_arguments
from quire.api.shared.pieces import Array, compact
from quire.api.shared.render import TokenNames, chat_logprobs
from quire.api.shared.signing import Signer
from quire.api.shared.toolbox import ClientTool
from quire.core.ids import new_id
from quire.core.request import TokenLogprobs

WireEvent = dict[str, object]


class OpenItem(Protocol):
    """An item that still grows. Its `id` and its index never change."""

    id: str

    def open(self) -> Iterator[WireEvent]:
        """Yield the events that start it."""
        ...

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the events that end it, with status `completed` or `incomplete`."""
        ...

    def body(self, status: str) -> WireEvent:
        """Return the item in its present state."""
        ...

    def stored(self, status: str) -> WireEvent:
        """Return the item in the form that later requests read."""
        ...


class _Item:
    """Fields that all items share."""

    prefix = "item"

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{new_id()}"
        self._index = index

    def body(self, status: str) -> WireEvent:
        raise NotImplementedError

    def stored(self, status: str) -> WireEvent:
        return self.body(status)

    def _added(self) -> WireEvent:
        item = self.body("in_progress")
        return {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def _done(self, status: str) -> WireEvent:
        item = self.body(status)
        return {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _event(self, kind: str, **more: Any) -> WireEvent:
        """Return an event inside the item."""
        return {
            "type": f"response.{kind}",
            "item_id": self.id,
            "output_index": self._index,
            **more,
        }


class MessageItem(_Item):
    """The text of the answer."""

    prefix = "msg"

    def __init__(self, index: int, tokenizer: TokenNames) -> None:
        super().__init__(index)
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._logprobs: list[bytes] = []
        self._started = False

    def open(self) -> Iterator[WireEvent]:
        """Yield the opening of the message, and of its only part."""
        yield self._added()
        self._started = True
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("content_part.added", content_index=0, part=part)

    def add(self, text: str, entries: Sequence[TokenLogprobs]) -> Iterator[WireEvent]:
        """Yield text, with the log-probabilities of its tokens."""
        written = [compact(chat_logprobs(self._tokenizer, entries))[1:-1]] if entries else []
        self._text.append(text)
        self._logprobs += written
        logprobs = Array(written)
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the whole text, the part, and the message."""
        part = self._part()
        yield self._event(
            "output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
        )
        yield self._event("content_part.done", content_index=0, part=part)
        yield self._done(status)

    def body(self, status: str) -> WireEvent:
        """Return the message."""
        return self._body(status, [self._part()] if self._started else [])

    def stored(self, status: str) -> WireEvent:
        """Return the message without log-probabilities, which no model reads."""
        return self._body(status, [{**self._part(), "logprobs": []}])

    def _body(self, status: str, content: list[WireEvent]) -> WireEvent:
        item = {"id": self.id, "type": "message", "status": status, "role": "assistant"}
        return {**item, "content": content}

    def _part(self) -> WireEvent:
        return {
            "type": "output_text",
            "text": "".join(self._text),
            "annotations": [],
            "logprobs": Array(self._logprobs),
        }


class ReasoningItem(_Item):
    """An item of reasoning, as content or, in full, as its summary.

    Args:
        signer: packs the reasoning for clients that send it back; None if not requested.
    """

    prefix = "rs"

    def __init__(self, index: int, *, summary: bool, signer: Signer | None) -> None:
        super().__init__(index)
        self._summary = summary
        self._signer = signer
        self._signed: str | None = None
        self._text: list[str] = []
        self._part_type = "summary_text" if summary else "reasoning_text"
        self._place = {"summary_index": 0} if summary else {"content_index": 0}
        self._part_events = "reasoning_summary_part" if summary else "content_part"
        self._text_events = "reasoning_summary_text" if summary else "reasoning_text"

    def open(self) -> Iterator[WireEvent]:
        """Yield the opening of the reasoning, and of its only part."""
        yield self._added()
        part = {"type": self._part_type, "text": ""}
        yield self._event(f"{self._part_events}.added", **self._place, part=part)

    def add(self, text: str) -> Iterator[WireEvent]:
        """Yield text of the reasoning."""
        self._text.append(text)
        yield self._event(f"{self._text_events}.delta", **self._place, delta=text)

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the whole text, the part, and the item."""
        (part,) = self._parts()
        yield self._event(f"{self._text_events}.done", **self._place, text=part["text"])
        yield self._event(f"{self._part_events}.done", **self._place, part=part)
        yield self._done(status)

    def body(self, status: str) -> WireEvent:
        """Return the reasoning; its parts are empty until it has text."""
        parts = self._parts() if self._text else []
        item: WireEvent = {"id": self.id, "type": "reasoning", "status": status}
        item["summary"] = parts if self._summary else []
        if not self._summary:
            item["content"] = parts
        if self._signer is not None and self._text:
            if self._signed is None:  # an item is shown with text once it is whole
                self._signed = self._signer.pack("".join(self._text))
            item["encrypted_content"] = self._signed
        return item

    def _parts(self) -> list[WireEvent]:
        return [{"type": self._part_type, "text": "".join(self._text)}]


class CallItem(_Item):
    """A tool call: pieces of its arguments' JSON, and its id and name for the client."""

    kind = "call"

    def __init__(self, index: int, call_id: str, named: ClientTool) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._named = named
        self._arguments: list[str] = []

    def open(self) -> Iterator[WireEvent]:
        """Yield the opening of the call, without arguments."""
        yield self._added()

    def add(self, json_text: str) -> Iterator[WireEvent]:
        """Yield a piece of the arguments' JSON. Kinds that send arguments as a whole yield
        nothing.
        """
        self._arguments.append(json_text)
        yield from ()

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the arguments, and the call."""
        yield self._done(status)

    def _body(self, status: str, **said: str) -> WireEvent:
        body = {"id": self.id, "type": self.kind, "status": status}
        body |= {"call_id": self._call_id, "name": self._named.name}
        if self._named.namespace is not None:
            body["namespace"] = self._named.namespace
        return {**body, **said}

    def _joined(self) -> str:
        return "".join(self._arguments)


class FunctionCallItem(CallItem):
    """A call of a function."""

    prefix, kind = "fc", "function_call"

    def add(self, json_text: str) -> Iterator[WireEvent]:
        """Yield a piece of the arguments' JSON."""
        self._arguments.append(json_text)
        yield self._event("function_call_arguments.delta", delta=json_text)

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the whole arguments and the call. A call that was cut off gets no `done` event."""
        if status == "completed":
            yield self._event(
                "function_call_arguments.done", name=self._named.name, arguments=self._joined()
            )
        yield self._done(status)

    def body(self, status: str) -> WireEvent:
        """Return the call."""
        return self._body(status, arguments=self._joined())


class SearchCallItem(CallItem):
    """A search for tools, which the client runs. Its arguments are an object, not text."""

    prefix, kind = "tsc", "tool_search_call"

    def body(self, status: str) -> WireEvent:
        """Return the call."""
        joined = self._joined()
        body = {"id": self.id, "type": self.kind, "status": status, "call_id": self._call_id}
        try:
            arguments = json.loads(joined) if joined else {}
        except ValueError:
            arguments = {}  # the call was cut off
        return {**body, "execution": "client", "arguments": arguments}


class OwnCallItem(CallItem):
    """A call of one of OpenAI's tools that the client runs: an action instead of arguments."""

    prefix = "call"

    def body(self, status: str) -> WireEvent:
        """Return the call, with its action so far."""
        own, written = OWN_TOOLS[self._named.kind], read_arguments(self._joined())
        return {"id": self.id, "call_id": self._call_id, **own.item(written, status)}


class CustomCallItem(CallItem):
    """A call of a custom tool. The model wrote a function call; one argument is the tool's text."""

    prefix, kind = "ctc", "custom_tool_call"

    def close(self, status: str) -> Iterator[WireEvent]:
        """Yield the text, and the call."""
        text = custom_input(self._joined())
        yield self._event("custom_tool_call_input.delta", delta=text)
        if status == "completed":
            yield self._event("custom_tool_call_input.done", input=text)
        yield self._done(status)

    def body(self, status: str) -> WireEvent:
        """Return the call."""
        return self._body(status, input=custom_input(self._joined()))
