"""Ollama's answers: one JSON object, or a stream of objects, one per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from quire.api.shared.content import read_arguments
from quire.api.shared.pieces import compact
from quire.api.shared.render import chat_logprobs
from quire.api.shared.sse import EventStream
from quire.serving.streams import ChoiceEvent, GenerationStream, Times
from quire.text.events import (
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from quire.text.output import Answer
from quire.text.tokenizer import Tokenizer

Said = dict[str, object]
Shape = Callable[[Said], Said]
"""A function that returns an endpoint's object for a part of an answer, from its fields `content`,
`thinking` and `tool_calls`.
"""


def message_shape(said: Said) -> Said:
    """Return a part of an answer as an object of `/api/chat`."""
    return {"message": {"role": "assistant", "content": "", **said}}


def response_shape(said: Said) -> Said:
    """Return a part of an answer as an object of `/api/generate`."""
    return {
        "response": said.get("content", ""),
        **{k: v for k, v in said.items() if k != "content"},
    }


def now() -> str:
    """Return the current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Lines(EventStream):
    """A streamed answer, one line for each event."""

    media_type = "application/x-ndjson"


class LineRenderer:
    """Renders a stream's lines."""

    def __init__(
        self, model: str, run: GenerationStream, tokenizer: Tokenizer, shape: Shape
    ) -> None:
        self._model = model
        self._run = run
        self._tokenizer = tokenizer
        self._shape = shape
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def render(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        """Yield the lines of a batch of events."""
        for _, event in batch:
            if (line := self._line(event)) is not None:
                yield compact(line) + b"\n"

    def end(self) -> bytes:
        """Return nothing: nothing follows the last line."""
        return b""

    def silence(self) -> bytes:
        """Return an empty line of an answer, which keeps a silent stream open."""
        return compact(self._said({"content": ""})) + b"\n"

    def _line(self, event: Event) -> Said | None:
        match event:
            case Text(text, entries):
                line = self._said({"content": text}) if text or entries else None
                if line is not None and entries:
                    line["logprobs"] = chat_logprobs(self._tokenizer, entries)
                return line
            case Reasoning(text) if text:
                return self._said({"thinking": text})
            case ToolCallStarted(index, call_id, name):
                self._calls[index] = (call_id, name, [])
            case ToolCallArguments(index, piece):
                self._calls[index][2].append(piece)
            case ToolCallEnded(index):
                call_id, name, pieces = self._calls.pop(index)
                return self._said({"tool_calls": [_call(call_id, name, "".join(pieces))]})
            case Finished():
                said = self._said({"content": ""})
                return {**said, "done": True, **ending(event, self._run)}
            case Failed(error):
                return {"error": error.message}
        return None

    def _said(self, said: Said) -> Said:
        head = {"model": self._model, "created_at": now()}
        return {**head, **self._shape(said), "done": False}


def whole_answer(model: str, run: GenerationStream, answer: Answer, shape: Shape) -> Said:
    """Return an answer that is not streamed."""
    assert isinstance(answer.finish, Finished), "failures are raised"
    said: Said = {"content": answer.text}
    if answer.reasoning:
        said["thinking"] = answer.reasoning
    if answer.tool_calls:
        said["tool_calls"] = [_call(c.id, c.name, c.arguments) for c in answer.tool_calls]
    head = {"model": model, "created_at": now()}
    return {**head, **shape(said), "done": True, **ending(answer.finish, run)}


def ending(end: Finished, run: GenerationStream) -> Said:
    """Return the finish reason, counts and durations in nanoseconds of an answer."""
    usage, times = run.usage, run.times
    read = _nanoseconds(times.scheduled, times.first_token)
    return {
        "done_reason": "length" if end.reason.is_cut_off else "stop",
        "total_duration": _nanoseconds(times.submitted, _end_of(times)),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": read,
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(times.first_token, _end_of(times)),
    }


def _end_of(times: Times) -> float | None:
    return times.ended or times.first_token


def _nanoseconds(since: float | None, until: float | None) -> int:
    return 0 if since is None or until is None else max(0, round((until - since) * 1e9))


def _call(call_id: str, name: str, arguments: str) -> Said:
    return {"id": call_id, "function": {"name": name, "arguments": read_arguments(arguments)}}
