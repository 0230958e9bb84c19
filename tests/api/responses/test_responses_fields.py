"""Every field of OpenAI's responses is honoured, refused by name, or known to change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx

from quire.api.responses.schema import MessageItem
from quire.api.responses.store import ResponseStore
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.entries import Entries
from tests.api.conftest import HTTP, Serve, Served

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def post(served: Served, **body: Any) -> httpx.Response:
    body = {"model": "quire-demo", "input": "Hi.", **body}
    return HTTP.post(f"{served.url}/v1/responses", json=body)


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def test_variables_of_the_template_are_set(serve: Serve) -> None:
    served = serve("42")
    post(served)
    post(served, chat_template_kwargs={"enable_thinking": True})
    answer = post(served, chat_template_kwargs={"mood": 1})
    assert answer.headers["x-quire-ignored-fields"] == "chat_template_kwargs.mood"
    prompts = [served.tokenizer.decode(request.prompt) for request in served.engine.requests]
    assert ["<|think|>" in prompt for prompt in prompts] == [False, True, False]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"input": [{"type": "telepathy_call"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": user({"type": "smell"})}, "input[0].content[0].type"),
    ({"input": user({"type": "input_image", "image_url": "x"})}, "input[0].content[0].image_url"),
    ({"input": user({"type": "input_image", "image_url": ""})}, "input[0].content[0].image_url"),
    ({"input": user({"type": "input_image"})}, "input[0].content[0].image_url"),
    (
        {"input": user({"type": "input_image", "image_url": None, "file_id": "x"})},
        "input[0].content[0].file_id",
    ),
    (
        {"input": user({"type": "input_image", "image_url": "x", "detail": "fine"})},
        "input[0].content[0].detail",
    ),
    (
        {
            "input": [
                {
                    "role": "assistant",
                    "content": [{"type": "input_image", "image_url": "x"}],
                }
            ]
        },
        "input[0].content[0]",
    ),
    ({"input": user({"type": "input_file", "file_id": "x"})}, "input[0].content[0]"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
    ),
    ({"input": [CALL]}, "input"),
    ({"input": [{**CALL, "arguments": 5}]}, "input[0].arguments"),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1]"),
    ({"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}, "tools": [FUNCTION]}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}},
        "text.format",
    ),
    ({"text": {"verbosity": "shouted"}}, "text.verbosity"),
    ({"tools": [{"type": "tool_search", "execution": "else"}]}, "tools[0].execution"),
    ({"input": [{"type": "additional_tools", "role": "user", "tools": []}]}, "input[0].role"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"background": True, "store": False}, "background"),
    ({"background_options": {"completion_window": "2h"}}, "background_options"),
    ({"conversation": 5}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"kv_bits": 3}, "kv_bits"),
    ({"beam_width": 4}, "beam_width"),
]


def test_what_is_wrong_is_named(serve: Serve) -> None:
    served = serve()
    for body, param in WRONG:
        answer = post(served, **body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param, (body, error)
        assert param in error["message"]
    assert served.engine.requests == []


def test_what_does_not_exist_is_a_404(serve: Serve) -> None:
    served = serve()
    for body, param in (
        ({"model": "gpt"}, "model"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0].id"),
        ({"input": [{"id": "rs_1"}]}, "input[0].id"),
    ):
        answer = post(served, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)


def test_a_stored_response_is_not_streamed_again(serve: Serve) -> None:
    served = serve("x")
    response_id = post(served).json()["id"]
    answer = HTTP.get(f"{served.url}/v1/responses/{response_id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


def test_nothing_but_instructions_is_an_input(serve: Serve) -> None:
    served = serve("x")
    assert post(served, input=[], instructions="Say something.").status_code == 200
    assert post(served, input=[]).status_code == 400


def test_the_store_keeps_to_its_bytes() -> None:
    item = StoredItem.of(MessageItem(role="user", content="x" * 900, id="msg_1"))
    entries = Entries(max_count=100, max_bytes=6500)
    store = ResponseStore(entries)
    for number in range(10):
        store.add(f"resp_{number}", (b"{}",), (item,), ())
        assert entries.size <= 6500
    assert len(entries) == 4
    assert store.get("resp_5") is None
    assert store.get("resp_6") is not None  # used now, so that another goes first
    store.add("resp_10", (b"{}",), (), (item,))
    assert store.get("resp_6") is not None
    assert store.get("resp_7") is None
    assert store.item("msg_1") == item
    others = [replace(item, id=f"msg_{number}") for number in range(10)]
    store.add("resp_11", (b"{}",), others, ())
    assert len(entries) == 0
    assert store.item("msg_1") is None
    assert entries.size == 0
