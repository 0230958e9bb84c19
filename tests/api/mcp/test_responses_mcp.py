"""MCP tools in responses: items, events, approvals, and what is kept of them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.request import Failure, Request
from tests.api.conftest import HTTP, NAME, Served, openai_client
from tests.api.mcp.conftest import calls, refuses_the_second_round
from tests.api.page_helpers import prompt_of
from tests.support.scripted_engine import Script

SMALL: Any = {"type": "mcp", "server_label": "small", "require_approval": "never"}
ASKS: Any = {**SMALL, "require_approval": "always"}
KINDS = ["mcp_list_tools", "mcp_call", "mcp_call", "message"]


def create(served: Served, **fields: Any) -> Any:
    client = openai_client(served.url).responses
    return client.create(**{"model": NAME, "input": "Add", "tools": [SMALL], **fields})


def post(served: Served, **fields: Any) -> Any:
    body = {"model": NAME, "input": "Add", "tools": [SMALL], **fields}
    return HTTP.post(f"{served.url}/v1/responses", json=body)


def kinds(response: Any) -> list[str]:
    return [each.type for each in response.output]


def test_calls_are_items_of_one_response_that_can_be_continued(served: Served) -> None:
    calls(served, 1, 2)
    answer = create(served)
    assert kinds(answer) == KINDS
    listed, first, second, said = answer.output
    assert "add" in [each.name for each in listed.tools]
    assert (first.name, first.server_label, first.arguments) == ("add", "small", '{"a": 1, "b": 1}')
    assert (first.status, first.output, second.output) == ("completed", "2", "3")
    assert said.content[0].text == "Done."
    assert [each.type for each in answer.tools] == ["mcp"]
    requests = served.engine.requests
    assert answer.usage.input_tokens == sum(len(each.prompt) for each in requests)
    kept = openai_client(served.url).responses.retrieve(answer.id)
    assert kept.to_dict() == answer.to_dict()
    calls(served, 1, 2)
    more = create(served, input="And?", previous_response_id=answer.id)
    assert kinds(more) == ["message"]  # the conversation lists the tools already
    prompt = prompt_of(served, served.engine.requests[0])
    assert prompt.count("response:small__add") == 2
    assert prompt.index("Done.") < prompt.index("And?")
    items = openai_client(served.url).responses.input_items.list(more.id, order="asc").data
    assert [each.type for each in items] == ["message", *KINDS, "message"]


def test_a_conversation_is_sent_back_item_by_item(served: Served) -> None:
    calls(served, 1)
    answer = create(served, store=False)
    said = [each.to_dict() for each in answer.output]
    calls(served, 1)
    more = create(served, input=[{"role": "user", "content": "Add"}, *said], store=False)
    assert kinds(more) == ["message"]
    prompt = prompt_of(served, served.engine.requests[0])
    assert "call:small__add{a:1,b:1}" in prompt
    assert prompt.count("response:small__add") == 1


def test_a_stream_has_numbered_events_of_calls(served: Served) -> None:
    calls(served, 1)
    events = list(create(served, stream=True))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    names = [each.type.removeprefix("response.") for each in events]
    assert [each for each in names if each.startswith("mcp")] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
    ]
    assert names.count("created") == names.count("completed") == 1
    assert not any("function_call" in each for each in names)
    added = [each for each in events if each.type == "response.output_item.added"]
    done = [each for each in events if each.type == "response.output_item.done"]
    assert [each.output_index for each in added] == [each.output_index for each in done]
    assert [each.output_index for each in done] == [0, 1, 2]
    whole = events[-1].response
    assert [each.item.to_dict() for each in done] == [each.to_dict() for each in whole.output]
    assert [each.item.id for each in added] == [each.id for each in whole.output]
    assert {each.response.id for each in events if hasattr(each, "response")} == {whole.id}
    assert kinds(whole) == ["mcp_list_tools", "mcp_call", "message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_waits_for_its_approval(served: Served, stream: bool) -> None:
    calls(served, 1)
    asked = create(served, tools=[ASKS], stream=stream)
    asked = list(asked)[-1].response if stream else asked
    assert kinds(asked) == ["mcp_list_tools", "mcp_approval_request"]
    request = asked.output[1]
    assert (request.name, request.arguments) == ("add", '{"a": 1, "b": 1}')
    assert len(served.engine.requests) == 1
    granted = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": True,
    }
    answer = create(
        served, tools=[ASKS], input=[granted], previous_response_id=asked.id, stream=stream
    )
    answer = list(answer)[-1].response if stream else answer
    assert kinds(answer) == ["mcp_call", "message"]
    assert (answer.output[0].output, answer.output[0].approval_request_id) == ("2", request.id)
    more = create(served, tools=[ASKS], input="And?", previous_response_id=answer.id)
    assert kinds(more) == ["message"]
    prompt = prompt_of(served, served.engine.requests[-1])
    assert prompt.count("call:small__add") == prompt.count("response:small__add") == 1


def test_a_declined_call_is_not_made(served: Served) -> None:
    calls(served, 1)
    asked = create(served, tools=[ASKS])
    declined = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.output[1].id,
        "approve": False,
        "reason": "too early",
    }
    answer = create(served, tools=[ASKS], input=[declined], previous_response_id=asked.id)
    assert kinds(answer) == ["message"]
    assert "declined this call: too early" in prompt_of(served, served.engine.requests[1])


def test_an_approved_call_is_refused_where_its_server_is_not_asked_for(served: Served) -> None:
    calls(served, 1)
    asked = create(served, tools=[ASKS])
    granted = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.output[1].id,
        "approve": True,
    }
    answer = post(served, tools=[], input=[granted], previous_response_id=asked.id)
    assert answer.status_code == 400
    assert "--mcp" in answer.json()["error"]["message"]
    unknown = post(served, input=[{**granted, "approval_request_id": "mcpr_0"}])
    assert unknown.json()["error"]["param"] == "input[0].approval_request_id"
    wrong = {"previous_response_id": asked.id, "temperature": "hot"}
    refused = post(served, tools=[ASKS], input=[granted], **wrong)
    assert refused.json()["error"]["param"] == "temperature"


def test_a_call_that_fails_is_told_to_the_model(served: Served) -> None:
    calls(served, 1, function="fail")
    answer = create(served)
    call = answer.output[1]
    assert (call.status, call.output) == ("failed", None)
    assert "it broke" in call.error.content[0]["text"]
    assert "The call failed" in prompt_of(served, served.engine.requests[1])


def test_calls_are_counted_against_their_limit(served: Served) -> None:
    calls(served, 1, 2, 3)
    answer = create(served, max_tool_calls=1)
    assert len(served.engine.requests) == 2
    assert kinds(answer)[:2] == ["mcp_list_tools", "mcp_call"]
    assert "mcp_call" not in kinds(answer)[2:]


def test_a_function_of_the_client_ends_the_response(served: Served) -> None:
    calls(served, 1, function="mine")
    mine = {"type": "function", "name": "small__mine", "parameters": {"type": "object"}}
    answer = create(served, tools=[SMALL, mine])
    assert kinds(answer) == ["mcp_list_tools", "function_call"]
    assert [each.type for each in answer.tools] == ["mcp", "function"]


@pytest.mark.parametrize(
    ("filters", "kind"),
    [
        ({"require_approval": {"never": {"tool_names": ["add"]}}}, "mcp_call"),
        ({"require_approval": {"never": {"tool_names": ["fail"]}}}, "mcp_approval_request"),
        ({"require_approval": {"never": {"read_only": True}}}, "mcp_approval_request"),
        ({"allowed_tools": {"tool_names": ["add"]}}, "mcp_call"),
    ],
)
def test_filters_choose_tools(served: Served, filters: Any, kind: str) -> None:
    calls(served, 1)
    assert kinds(create(served, tools=[{**SMALL, **filters}]))[1] == kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**SMALL, "server_label": "large"}]}, "tools[0].server_label"),
        ({"tools": [{**SMALL, "server_url": "http://evil.test"}]}, "tools[0].server_url"),
        ({"tools": [{**SMALL, "authorization": "secret"}]}, "tools[0].authorization"),
        ({"tools": [{**SMALL, "allowed_tools": {"tool_names": ["no"]}}]}, "tools[0].allowed_tools"),
        ({"tools": [SMALL, SMALL]}, "tools[1].server_label"),
        ({"background": True}, "background"),
        ({"tool_choice": {"type": "mcp", "server_label": "small", "name": "no"}}, "tool_choice"),
    ],
)
def test_what_is_not_offered_is_named(served: Served, fields: Any, param: str) -> None:
    assert post(served, **fields).json()["error"]["param"] == param


def test_a_choice_names_a_tool_of_a_server(served: Served) -> None:
    calls(served, 1)
    choice = {"type": "mcp", "server_label": "small", "name": "add"}
    answer = create(served, tool_choice=choice)
    assert kinds(answer) == ["mcp_list_tools", "mcp_call", "message"]
    assert answer.tool_choice.to_dict() == choice


def test_tokens_are_counted_with_the_tools(served: Served) -> None:
    calls(served)
    create(served)
    counted = openai_client(served.url).responses.input_tokens.count(
        model=NAME, input="Add", tools=[SMALL]
    )
    assert counted.input_tokens == len(served.engine.requests[0].prompt)


def test_an_error_of_a_later_round_ends_the_response(served: Served) -> None:
    calls(served, 1)
    made = served.engine.script

    def fails(request: Request) -> Script:
        if len(served.engine.requests) == 2:
            return Script(error=Failure("broken", 500))
        return made(request)

    served.engine.script = fails
    last = list(create(served, stream=True))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "broken")
    assert kinds(last.response)[:2] == ["mcp_list_tools", "mcp_call"]
    assert HTTP.get(f"{served.url}/v1/responses/{last.response.id}").status_code == 404


def test_a_later_round_that_is_refused_ends_the_stream(served: Served) -> None:
    refuses_the_second_round(served)
    last = list(create(served, stream=True))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "too long")


def test_a_response_joins_its_conversation_once(served: Served) -> None:
    client = openai_client(served.url)
    greeting: Any = {"role": "user", "content": "Hello"}
    talk = client.conversations.create(items=[greeting])
    calls(served, 1)
    answer = create(served, conversation=talk.id, store=False)
    assert kinds(answer) == ["mcp_list_tools", "mcp_call", "message"]
    assert (answer.conversation.id, answer.to_dict()["store"]) == (talk.id, False)
    assert HTTP.get(f"{served.url}/v1/responses/{answer.id}").status_code == 404
    items = client.conversations.items.list(talk.id, order="asc").data
    said = ["message", "message", "mcp_list_tools", "mcp_call", "message"]
    assert [each.type for each in items] == said
    calls(served, 1)
    asked = create(served, conversation=talk.id, input="And?", tools=[ASKS])
    assert kinds(asked) == ["message"]
    items = client.conversations.items.list(talk.id, order="asc").data
    assert [each.type for each in items] == [*said, "message", "message"]
    unknown = post(served, conversation="conv_0")
    assert unknown.json()["error"]["param"] == "conversation"
