"""The order and shape of a stream that Claude Code reads, as Anthropic's servers send it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from quire.api.shared import sse
from quire.core.request import Failure
from tests.api.conftest import Serve, Served, blocks, sets
from tests.support.scripted_engine import Script

ANSWER = (
    "<|channel>thought\nHm.<channel|>Yes."
    '<|tool_call>call:read{path:<|"|>a.txt<|"|>}<tool_call|>'
    '<|tool_call>call:read{path:<|"|>b.txt<|"|>}<tool_call|>'
)
BODY: dict[str, Any] = {
    "model": "quire-demo",
    "max_tokens": 512,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Read the files."}]}],
    "tools": [
        {
            "name": "read",
            "description": "Reads a file.",
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
    ],
    "thinking": {"type": "enabled", "budget_tokens": 128},
    "metadata": {"user_id": "user_1_account__session_2"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


def events_of(
    served: Served, read: Callable[[str], None] = lambda text: None, **changes: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of each event as written on the wire.

    Args:
        read: sees what has come, again and again.
    """
    events = []
    for block in blocks(f"{served.url}/v1/messages?beta=true", {**BODY, **changes}, read):
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def outline(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return names of events, deltas by their kind, repeats once."""
    names: list[str] = []
    for name, data in events:
        kind = f" {data['delta']['type']}" if name == "content_block_delta" else ""
        if not names or names[-1] != name + kind or not kind:
            names.append(name + kind)
    return names


def test_the_order_of_a_stream(serve: Serve) -> None:
    events = events_of(serve(ANSWER))
    assert outline(events) == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta thinking_delta",
        "content_block_delta signature_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta text_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta input_json_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_shape_of_each_event(serve: Serve) -> None:
    events = events_of(serve(ANSWER))
    message = events[0][1]["message"]
    assert (message["role"], message["content"], message["stop_reason"]) == ("assistant", [], None)
    assert {"input_tokens", "output_tokens", "cache_read_input_tokens"} <= set(message["usage"])
    starts = [data for name, data in events if name == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1]["content_block"] == {"type": "text", "text": ""}
    call = starts[2]["content_block"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "read", {})
    open_block = -1
    for name, data in events:
        if name.startswith("content_block"):
            assert data["index"] == open_block + (name == "content_block_start")
            open_block = data["index"]
    delta = events[-2][1]
    assert delta["delta"] == {
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
    }
    assert delta["usage"]["output_tokens"] > 0


def test_a_stream_without_content(serve: Serve) -> None:
    names = outline(events_of(serve("")))
    assert names == ["message_start", "message_delta", "message_stop"]


def test_a_failure_in_the_midst_is_an_error_event(serve: Serve) -> None:
    events = events_of(serve(lambda _: Script((5, 6), error=Failure("It broke."))))
    assert [name for name, _ in events][-1] == "error"
    error = {"type": "api_error", "message": "It broke."}
    assert events[-1][1] == {"type": "error", "error": error}


def test_pings_keep_a_silent_stream_open(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.02)
    served, go_on = serve(), threading.Event()
    call = served.ids(ANSWER[ANSWER.index("<|tool_call>") :])
    served.engine.reset(lambda _: Script(call, group=8, held=go_on, held_at=1))
    # One follows the first block's start, and would without a silence.
    names = outline(events_of(served, sets(go_on, "event: ping", 3)))
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"


def test_a_stream_that_waits_for_its_first_token_starts_with_the_message(
    serve: Serve, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.02)
    served, go_on = serve(), threading.Event()
    script = Script(served.ids("Hello."), held=go_on, cached_tokens=3)
    served.engine.reset(lambda _: script)
    events = events_of(served, sets(go_on, "event: ping", 1))
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert [name for name, _ in events].count("message_start") == 1
    assert events[0][1]["message"]["usage"]["cache_read_input_tokens"] == 0
    assert events[-2][1]["usage"]["cache_read_input_tokens"] == 3
