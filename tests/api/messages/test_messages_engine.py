"""Messages and responses from the embedded model, as `quire serve` answers them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.support.child import Child

ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
GREEDY: Any = {"temperature": 0}


@pytest.fixture
def url(child: Child) -> str:
    return child.url


def test_messages(url: str) -> None:
    sdk = Anthropic(base_url=url, api_key="none", max_retries=0)
    fields: Any = {
        "model": "quire-demo",
        "max_tokens": 40,
        "messages": ASK,
        "extra_body": GREEDY,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    whole = sdk.messages.create(**fields)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert isinstance(call.input["city"], str)
    assert whole.stop_reason == "tool_use"
    with sdk.messages.stream(**fields) as stream:
        (again,) = stream.get_final_message().content
    assert again.type == "tool_use"
    assert again.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    conversation: Any = [
        *ASK,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    counted = sdk.messages.count_tokens(
        model="quire-demo", messages=conversation, tools=[TOOL]
    ).input_tokens
    answer = sdk.messages.create(
        model="quire-demo",
        max_tokens=40,
        messages=conversation,
        tools=[TOOL],
        extra_body=GREEDY,
    )
    usage = answer.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (usage.cache_read_input_tokens or 0) > 16
    assert answer.stop_reason in ("end_turn", "max_tokens")


def test_a_thinking_budget_is_kept(url: str) -> None:
    sdk = Anthropic(base_url=url, api_key="none", max_retries=0)
    message = sdk.messages.create(
        model="quire-demo",
        max_tokens=40,
        messages=ASK,
        thinking={"type": "enabled", "budget_tokens": 8},
        extra_body=GREEDY,
    )
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens <= 16
    assert message.content[-1].type == "text"


def test_responses(url: str) -> None:
    sdk = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    fields: Any = {
        "model": "quire-demo",
        "temperature": 0,
        "max_output_tokens": 40,
        "tools": [tool],
    }
    first = sdk.responses.create(
        input="What is the weather in Oslo?", tool_choice="required", **fields
    )
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    fields |= {"previous_response_id": first.id, "input": [output]}
    with sdk.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
    second = sdk.responses.create(**fields)
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 16
