"""Tools of MCP servers: the routes, and the page, which has each call confirmed."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from quire.api.shared.mcp_calls import function_name
from tests.api.conftest import HTTP, NAME, Served, openai_client
from tests.api.mcp.conftest import calls, refuses_the_second_round
from tests.api.page_helpers import ask, opened, prompt_of


def call(served: Served, **body: object) -> Any:
    return HTTP.post(f"{served.url}/mcp/call", json=body)


def test_tools_are_listed_and_called(served: Served) -> None:
    (listed,) = HTTP.get(f"{served.url}/mcp/tools").json()["data"]
    assert (listed["server"], listed["problem"]) == ("small", "")
    assert ("add", "small__add") in [(each["name"], each["function"]) for each in listed["tools"]]
    answer = call(served, server="small", tool="add", arguments={"a": 2, "b": 3})
    assert answer.json() == {"object": "mcp.result", "text": "5", "failed": False}
    assert call(served, server="small", tool="fail").json()["failed"]
    assert call(served, server="large", tool="add").status_code == 404
    unknown = call(served, server="small", tool="add", argument={})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "argument")


def test_a_server_without_mcp_has_no_tools(shared: Served) -> None:
    assert HTTP.get(f"{shared.url}/mcp/tools").json() == {"object": "list", "data": []}
    assert call(shared, server="small", tool="add").status_code == 404


def test_each_call_is_confirmed_unless_it_was_allowed(page: Any, served: Served) -> None:
    calls(served, 1, 2, 3)
    opened(page, served.url)
    page.click("[aria-label=Parameters]")
    page.locator("fieldset label", has_text="small").locator("input").check()
    page.get_by_role("button", name="Use").click()
    ask(page, "Add")
    page.get_by_role("button", name="Allow once").click()
    page.wait_for_selector(".message.tool .text:text-is('2')")
    assert "small__add" in prompt_of(served, served.engine.requests[0])
    other = page.context.new_page()
    opened(other, served.url)
    other.get_by_role("button", name="Allow once").wait_for()
    page.get_by_role("button", name="Allow in this conversation").click()
    page.wait_for_selector(".assistant .text:has-text('Done.')")  # the third was not asked about
    other.wait_for_selector(".assistant .text:has-text('Done.')")
    for tab in (page, other):
        assert tab.locator(".message.tool .text").all_inner_texts() == ["2", "3", "4"]
    assert len(served.engine.requests) == 4
    page.reload()
    page.wait_for_selector(".assistant .text:has-text('Done.')")
    assert page.locator(".results").count() == 0


SMALL = {"type": "mcp", "server_label": "small", "require_approval": "never"}
ASKED = {"messages": [{"role": "user", "content": "Add"}]}


def test_the_server_makes_calls_that_were_allowed_beforehand(served: Served) -> None:
    calls(served, 1, 2)
    client = openai_client(served.url).chat.completions
    answer = client.create(model=NAME, **ASKED, tools=[SMALL])  # type: ignore[call-overload]
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == ("Done.", None)
    assert [each["output"] for each in message.mcp_calls] == ["2", "3"]
    assert message.mcp_calls[0]["arguments"] == '{"a": 1, "b": 1}'
    lengths = [len(each.prompt) for each in served.engine.requests]
    assert len(lengths) == 3
    assert answer.usage.prompt_tokens == sum(lengths)


def test_a_stream_goes_on_behind_calls(served: Served) -> None:
    calls(served, 1)
    client = openai_client(served.url).chat.completions
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(client.create(model=NAME, **ASKED, tools=[SMALL], **options))
    assert len({each.id for each in events}) == 1
    deltas = [each.choices[0].delta for each in events if each.choices]
    assert "".join(each.content or "" for each in deltas) == "Done."
    assert not any(each.tool_calls for each in deltas)
    (made,) = [each.mcp_calls for each in deltas if hasattr(each, "mcp_calls")]
    assert (made[0]["tool"], made[0]["output"]) == ("add", "2")
    ends = [each.choices[0].finish_reason for each in events if each.choices]
    assert [each for each in ends if each] == ["stop"]
    assert events[-1].usage.prompt_tokens == sum(len(r.prompt) for r in served.engine.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_were_not_allowed_go_to_the_client(served: Served, stream: bool) -> None:
    calls(served, 1)
    asked: Any = {**SMALL, "require_approval": "always"}
    client = openai_client(served.url).chat.completions
    answer: Any = client.create(model=NAME, **ASKED, tools=[asked], stream=stream)
    if stream:
        choices = [each.choices[0] for each in answer]
        (name,) = [
            each.delta.tool_calls[0].function.name for each in choices if each.delta.tool_calls
        ][:1]
        assert choices[-1].finish_reason == "tool_calls"
    else:
        name = answer.choices[0].message.tool_calls[0].function.name
    assert name == "small__add"
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**SMALL, "server_label": "large"}, "tools[0].server_label"),
        ({**SMALL, "allowed_tools": ["none"]}, "tools[0].allowed_tools"),
        ({**SMALL, "server_url": "http://evil.test"}, "tools[0].server_url"),
    ],
)
def test_what_is_not_there_is_named(served: Served, tool: Any, param: str) -> None:
    body = {**ASKED, "tools": [tool]}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_later_round_that_is_refused_is_an_error(served: Served, stream: bool) -> None:
    refuses_the_second_round(served)
    client: Any = openai_client(served.url).chat.completions
    with pytest.raises(openai.APIError, match="too long"):
        list(client.create(model=NAME, **ASKED, tools=[SMALL], stream=stream))


def test_completions_with_servers_are_not_stored(served: Served) -> None:
    body = {**ASKED, "tools": [SMALL], "store": True}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "store"


def test_without_the_option_no_call_is_made(shared: Served) -> None:
    answer = HTTP.post(f"{shared.url}/v1/chat/completions", json={**ASKED, "tools": [SMALL]})
    assert answer.status_code == 400


def test_functions_have_names_that_clients_take_and_that_differ() -> None:
    assert function_name("small", "add") == "small__add"
    names = [function_name("small", "x" * 80 + end) for end in ("1", "2")]
    names += [function_name("small", "a.b"), function_name("small", "a_b")]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", each) for each in names)
