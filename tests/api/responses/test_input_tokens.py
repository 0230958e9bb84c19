"""`/v1/responses/input_tokens`, through the official SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.api.conftest import HTTP, Serve, Served, openai_client

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLED: Any = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "4°"},
]


def counted(served: Served, **fields: Any) -> int:
    count = openai_client(served.url).responses.input_tokens.count(model="quire-demo", **fields)
    assert count.object == "response.input_tokens"
    return count.input_tokens


def answered(served: Served, **fields: Any) -> Any:
    return openai_client(served.url).responses.create(model="quire-demo", **fields)


def test_the_count_is_exact(serve: Serve) -> None:
    served = serve("Hello.")
    first = answered(served, input="Hi.")
    for fields in (
        {"input": "Hi."},
        {"input": "Go on.", "previous_response_id": first.id},
        {"input": [{"type": "item_reference", "id": first.output[0].id}, *CALLED]},
        {"input": CALLED, "tools": [TOOL], "instructions": "Be brief."},
        {"input": CALLED, "tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
        {"input": "Hi.", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
    ):
        count, tasks = counted(served, **fields), len(served.engine.requests)
        assert answered(served, **fields).usage.input_tokens == count
        assert len(served.engine.requests) == tasks + 1
        assert len(served.engine.requests[-1].prompt) == count


def test_what_no_context_holds_is_counted(serve: Serve) -> None:
    served = serve()
    assert counted(served, input="word " * 20_000) > served.engine.info.context_length


def test_what_truncation_leaves_is_counted(serve: Serve) -> None:
    served = serve(context_length=120)
    turns = [{"role": role, "content": "word " * 15} for role in ("user", "assistant") * 5]
    turns.append({"role": "user", "content": "Hi."})
    whole, cut = (counted(served, input=turns, truncation=each) for each in ("disabled", "auto"))
    assert cut < 120 < whole
    assert answered(served, input=turns, truncation="auto").usage.input_tokens == cut


def test_what_is_wrong_is_told(serve: Serve) -> None:
    served = serve()
    with pytest.raises(BadRequestError, match="is not kept here"):
        counted(served, input="Hi.", previous_response_id="resp_x")
    with pytest.raises(NotFoundError, match="not served here"):
        openai_client(served.url).responses.input_tokens.count(model="x", input="Hi.")
    url = f"{served.url}/v1/responses/input_tokens"
    error = HTTP.post(url, json={"input": "x", "max_output_tokens": 5}).json()["error"]
    assert error["param"] == "max_output_tokens"
    assert "/v1/responses" in error["message"]
    styled = HTTP.post(url, json={"input": "x", "personality": "friendly"})
    assert styled.headers["x-quire-ignored-fields"] == "personality"
    assert json.loads(styled.content)["input_tokens"] > 0
    assert not served.engine.requests
