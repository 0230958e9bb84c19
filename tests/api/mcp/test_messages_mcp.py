"""MCP tools in messages: blocks of calls and results, as Anthropic's connector has them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.api.conftest import HTTP, NAME, Served
from tests.api.mcp.conftest import calls, refuses_the_second_round
from tests.api.page_helpers import prompt_of

TOOLSET: Any = {"type": "mcp_toolset", "mcp_server_name": "small"}
SERVER: Any = {"type": "url", "name": "small", "url": ""}
ASK: Any = {"role": "user", "content": "Add"}


def fields(**changed: Any) -> Any:
    given = {"model": NAME, "max_tokens": 64, "messages": [ASK], "tools": [TOOLSET]}
    return {**given, **changed}


def messages(served: Served) -> Any:
    client = anthropic.Anthropic(api_key="none", base_url=served.url, max_retries=0)
    return client.beta.messages


def kinds(message: Any) -> list[str]:
    return [each.type for each in message.content]


CALLED = ["mcp_tool_use", "mcp_tool_result", "mcp_tool_use", "mcp_tool_result", "text"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_blocks_of_one_message(served: Served, stream: bool) -> None:
    calls(served, 1, 2)
    if stream:
        with messages(served).stream(**fields(mcp_servers=[SERVER])) as events:
            answer = events.get_final_message()
    else:
        answer = messages(served).create(**fields(mcp_servers=[SERVER]))
    assert kinds(answer) == CALLED
    use, result = answer.content[:2]
    assert (use.server_name, use.name, use.input) == ("small", "add", {"a": 1, "b": 1})
    assert (result.tool_use_id, result.is_error) == (use.id, False)
    assert result.content[0].text == "2"
    assert (answer.stop_reason, answer.content[4].text) == ("end_turn", "Done.")
    total = sum(len(each.prompt) for each in served.engine.requests)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == total


def test_a_message_is_sent_back_as_it_came(served: Served) -> None:
    calls(served, 1)
    answer = messages(served).create(**fields())
    said = {"role": "assistant", "content": [each.to_dict() for each in answer.content]}
    calls(served, 1)
    more = messages(served).create(**fields(messages=[ASK, said, ASK]))
    assert kinds(more) == ["text"]
    prompt = prompt_of(served, served.engine.requests[0])
    assert prompt.count("call:small__add") == prompt.count("response:small__add") == 1
    assert prompt.index("response:small__add") < prompt.index("Done.")


def test_blocks_of_a_stream_are_numbered(served: Served) -> None:
    calls(served, 1)
    events = [
        each for each in messages(served).create(**fields(stream=True)) if each.type != "ping"
    ]
    starts = [each for each in events if each.type == "content_block_start"]
    assert [each.index for each in starts] == [0, 1, 2]
    names = [each.type for each in events]
    assert names.count("message_start") == names.count("message_delta") == 1
    assert names[-1] == "message_stop"


def test_a_failed_call_is_an_error_for_the_model(served: Served) -> None:
    calls(served, 1, function="fail")
    answer = messages(served).create(**fields())
    assert answer.content[1].is_error
    assert "The call failed" in prompt_of(served, served.engine.requests[1])


def test_a_tool_of_the_client_ends_the_message(served: Served) -> None:
    calls(served, 1, function="mine")
    mine = {"name": "small__mine", "input_schema": {"type": "object"}}
    answer = messages(served).create(**fields(tools=[TOOLSET, mine]))
    assert (kinds(answer), answer.stop_reason) == (["tool_use"], "tool_use")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tools": [{**TOOLSET, "default_config": {"enabled": False}}]}, False),
        ({"tools": [{**TOOLSET, "configs": {"add": {"enabled": False}}}]}, False),
        (
            {
                "tools": [
                    {
                        **TOOLSET,
                        "default_config": {"enabled": False},
                        "configs": {"add": {"enabled": True, "defer_loading": True}},
                    }
                ]
            },
            True,
        ),
        ({"tools": [], "mcp_servers": [SERVER]}, True),
        (
            {
                "tools": [],
                "mcp_servers": [{**SERVER, "tool_configuration": {"allowed_tools": ["fail"]}}],
            },
            False,
        ),
    ],
)
def test_configurations_choose_tools(served: Served, changed: Any, told: bool) -> None:
    calls(served)
    messages(served).create(**fields(**changed))
    assert ("declaration:small__add" in prompt_of(served, served.engine.requests[0])) == told


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tools": [{**TOOLSET, "mcp_server_name": "large"}]}, "'large'"),
        ({"mcp_servers": [{**SERVER, "name": "large"}]}, "mcp_server_name"),
        ({"mcp_servers": [{**SERVER, "url": "https://evil.test/mcp"}]}, "leave the URL out"),
        ({"mcp_servers": [{**SERVER, "authorization_token": "x"}]}, "authorization_token"),
        ({"tools": [{**TOOLSET, "configs": {"none": {"enabled": True}}}]}, "no tool 'none'"),
    ],
)
def test_what_is_not_offered_is_named(served: Served, changed: Any, named: str) -> None:
    answer = HTTP.post(f"{served.url}/v1/messages", json=fields(**changed))
    assert answer.status_code in (400, 404)
    assert named in answer.json()["error"]["message"]


def test_tokens_are_counted_with_the_tools(served: Served) -> None:
    calls(served)
    messages(served).create(**fields())
    counted = messages(served).count_tokens(model=NAME, messages=[ASK], tools=[TOOLSET])
    assert counted.input_tokens == len(served.engine.requests[0].prompt)


def test_calls_without_end_pause_the_turn(served: Served) -> None:
    calls(served, *range(64))
    answer = messages(served).create(**fields())
    assert answer.stop_reason == "pause_turn"
    assert kinds(answer)[-1] == "mcp_tool_result"
    said = {"role": "assistant", "content": [each.to_dict() for each in answer.content]}
    made = len(answer.content) // 2
    calls(served, *range(made))
    more = messages(served).create(**fields(messages=[ASK, said]))
    assert kinds(more) == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_later_round_that_is_refused_is_an_error(served: Served, stream: bool) -> None:
    refuses_the_second_round(served)
    with pytest.raises(anthropic.APIStatusError, match="too long"):
        list(messages(served).create(**fields(stream=stream)))
