"""The order and shape of streams that agents read: Codex's responses, Open WebUI's chat."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.api.shared import sse
from tests.api.conftest import HTTP, Serve, Served, blocks, sets
from tests.support.scripted_engine import Script

THOUGHT = "<|channel>thought\nHm.<channel|>"
SHELL = '<|tool_call>call:shell{command:[<|"|>ls<|"|>]}<tool_call|>'
PATCH = '<|tool_call>call:apply_patch{input:<|"|>*** Begin\n+x<|"|>}<tool_call|>'
SEARCH = '<|tool_call>call:mcp__docs__search{query:<|"|>mlx<|"|>}<tool_call|>'


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "input_text", "text": text}]


# The fields, items and tools that Codex sends.
CODEX: dict[str, Any] = {
    "model": "quire-demo",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": _text("<permissions>all</permissions>"),
        },
        {"type": "message", "role": "user", "content": _text("<environment_context/>")},
        {"type": "message", "role": "user", "content": _text("List the files.")},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {
                "type": "grammar",
                "syntax": "lark",
                "definition": "start: /a/+",
            },
        },
        {
            "type": "namespace",
            "name": "mcp__docs__",
            "description": "Documentation.",
            "tools": [
                {
                    "type": "function",
                    "name": "search",
                    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
                }
            ],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def codex(
    served: Served, read: Callable[[str], None] = lambda text: None, **changes: Any
) -> list[dict[str, Any]]:
    events = []
    for block in blocks(f"{served.url}/v1/responses", {**CODEX, **changes}, read):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def outline(events: list[dict[str, Any]]) -> list[str]:
    names: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not names or names[-1] != name:
            names.append(name)
    return names


def test_the_order_of_codexs_stream(serve: Serve) -> None:
    events = codex(serve(f"{THOUGHT}Yes.{SHELL}"))
    assert outline(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert json.loads(done[2]["arguments"]) == {"command": ["ls"]}
    usage = events[-1]["response"]["usage"]
    assert set(usage) == {
        "input_tokens",
        "input_tokens_details",
        "output_tokens",
        "output_tokens_details",
        "total_tokens",
    }


def test_open_thoughts_have_parts_of_their_own(serve: Serve) -> None:
    events = codex(serve(f"{THOUGHT}Yes."), reasoning=None)
    assert outline(events)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_every_event_names_its_item(serve: Serve) -> None:
    events = codex(serve(f"{THOUGHT}Yes.{SHELL}"))
    item: dict[str, Any] = {}
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == item.get("index", -1) + 1
            item = {"index": event["output_index"], "id": event["item"]["id"]}
            assert event["item"]["status"] == "in_progress"
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == item["id"]
            assert event["item"]["status"] == "completed"
        else:
            assert event["item_id"] == item["id"]
        assert event["output_index"] == item["index"]


def test_custom_tools_are_called_with_a_text(serve: Serve) -> None:
    served = serve(PATCH)
    events = codex(served, store=True)
    assert outline(events)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"] == "*** Begin\n+x"
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    codex(served, input=[*CODEX["input"], call, output])
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert 'call:apply_patch{input:<|"|>*** Begin\n+x<|"|>}' in prompt
    assert 'response:apply_patch{value:<|"|>Done.<|"|>}' in prompt
    assert "Follows this lark grammar: start: /a/+" in prompt


def test_tools_in_a_namespace_keep_it(serve: Serve) -> None:
    served = serve(SEARCH)
    (call,) = codex(served)[-1]["response"]["output"]
    assert (call["namespace"], call["name"]) == ("mcp__docs__", "search")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Found."}
    codex(served, input=[*CODEX["input"], call, output])
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert 'response:mcp__docs__search{value:<|"|>Found.<|"|>}' in prompt


def test_tools_that_nobody_runs_are_not_claimed(serve: Serve) -> None:
    served = serve("Yes.")
    body = {**CODEX, "stream": False}
    answer = HTTP.post(f"{served.url}/v1/responses", json=body)
    tools = answer.json()["tools"]
    assert [tool["type"] for tool in tools] == ["function", "custom", "namespace"]
    assert answer.headers["x-quire-ignored-fields"] == f"tools[{len(CODEX['tools']) - 1}]"
    assert "web_search" not in served.tokenizer.decode(served.engine.requests[-1].prompt)


def test_a_conversation_that_searched_the_web_elsewhere_goes_on(serve: Serve) -> None:
    served = serve("Yes.")
    user = {"role": "user", "content": "And now?"}
    items: Any = [
        user,
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"role": "assistant", "content": "Found it."},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
        user,
    ]
    url = f"{served.url}/v1/responses"
    answer = HTTP.post(url, json={"input": items})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-quire-ignored-fields"] == "input[1], input[3]"
    plain = HTTP.post(url, json={"input": [items[0], items[2], items[4]]})
    assert "x-quire-ignored-fields" not in plain.headers
    # They are kept, and told of once.
    more = {"input": [user], "previous_response_id": answer.json()["id"]}
    assert "x-quire-ignored-fields" not in HTTP.post(url, json=more).headers
    listed = HTTP.get(f"{url}/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert [each["type"] for each in listed][1::2] == ["web_search_call", "image_generation_call"]
    first, second, _ = (request.prompt for request in served.engine.requests)
    assert first == second


JS = "<|tool_call>call:functions__exec{input:<|\"|>text('hi')<|\"|>}<tool_call|>"
FIND = '<|tool_call>call:tool_search{query:<|"|>add<|"|>}<tool_call|>'
FOUND = "<|tool_call>call:mcp__sums__add{a:2}<tool_call|>"


def test_codex_hands_its_tools_over_as_an_item(serve: Serve) -> None:
    """Codex does so for the models that it knows by name, with wishes that no model here meets."""
    served = serve(JS)
    tools = {
        "type": "additional_tools",
        "id": "at_1",
        "role": "developer",
        "tools": [
            {
                "type": "namespace",
                "name": "functions",
                "description": "",
                "tools": [{"type": "custom", "name": "exec", "description": "Runs JavaScript."}],
            }
        ],
    }
    asked = {**CODEX, "input": [tools, *CODEX["input"]]}
    del asked["tools"]
    asked |= {"text": {"verbosity": "low"}, "reasoning": {"effort": "low", "context": "all_turns"}}
    asked |= {"stream": False}
    answer = HTTP.post(f"{served.url}/v1/responses", json=asked).json()
    (call,) = answer["output"]
    assert (call["type"], call["namespace"], call["name"]) == (
        "custom_tool_call",
        "functions",
        "exec",
    )
    assert call["input"] == "text('hi')"
    assert (answer["text"]["verbosity"], answer["reasoning"]["context"]) == ("medium", "auto")
    assert "Runs JavaScript." in served.tokenizer.decode(served.engine.requests[-1].prompt)


def test_codex_searches_for_tools(serve: Serve) -> None:
    served = serve(FIND)
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
    tools = [{**search, "parameters": parameters}]
    events = codex(served, tools=tools)
    assert outline(events)[2:] == ["output_item.added", "output_item.done", "completed"]
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["execution"]) == ("tool_search_call", "client")
    assert call["arguments"] == {"query": "add"}

    add = {"type": "function", "name": "add", "description": "Adds.", "defer_loading": True}
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "status": "completed",
        "execution": "client",
        "tools": [{"type": "namespace", "name": "mcp__sums", "description": "", "tools": [add]}],
    }
    served = serve(FOUND)
    (second,) = codex(served, tools=tools, input=[*CODEX["input"], call, found])[-1]["response"][
        "output"
    ]
    assert (second["namespace"], second["name"]) == ("mcp__sums", "add")
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert "declaration:mcp__sums__add{description:" in prompt
    assert 'response:tool_search{value:<|"|>{"tools": ["mcp__sums__add"]}<|"|>}' in prompt


def test_a_deferred_tool_is_told_of_when_it_is_found(serve: Serve) -> None:
    served = serve("Yes.")
    hidden = {"type": "function", "name": "hidden", "defer_loading": True}
    codex(served, tools=[hidden, {"type": "tool_search", "execution": "client"}])
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert "declaration:tool_search" in prompt
    assert "hidden" not in prompt


def test_a_silent_stream_shows_signs_of_life(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.02)
    served, go_on = serve(), threading.Event()
    served.engine.reset(lambda _: Script(served.ids(SHELL), group=8, held=go_on))

    events = codex(served, sets(go_on, "event: response.in_progress", 2))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:3] == ["created", "in_progress", "in_progress"]
    assert list(dict.fromkeys(outline(events)))[1:] == [
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


# What Open WebUI sends for a chat.
WEBUI: dict[str, Any] = {
    "model": "quire-demo",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "List the files."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "shell",
                "description": "Runs a command.",
                "parameters": CODEX["tools"][0]["parameters"],
            },
        }
    ],
}


@pytest.mark.parametrize("answer", [f"{THOUGHT}Yes.{SHELL}", "Yes.", ""])
def test_the_chunks_of_a_chat(serve: Serve, answer: str) -> None:
    *chunked, done = blocks(f"{serve(answer).url}/v1/chat/completions", WEBUI)
    assert done == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in chunked]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *chunks, usage = chunks
    assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    kinds = [next(iter(delta)) for delta in deltas[1:-1]]
    order = ["reasoning_content", "content", "tool_calls"]
    assert kinds == sorted(kinds, key=order.index)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] == ("tool_calls" if SHELL in answer else "stop")
    if SHELL in answer:
        started, *rest = (delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
        assert (started["index"], started["function"]["name"]) == (0, "shell")
        assert "".join(piece["function"]["arguments"] for piece in (started, *rest)) == (
            '{"command": ["ls"]}'
        )
        assert all(set(piece) == {"index", "function"} for piece in rest)
