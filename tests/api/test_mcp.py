"""Tools of MCP servers: the routes, and the page, which has each call confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quire.core.config import ServerConfig
from quire.core.mcp import McpServer
from quire.core.request import Request
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start
from tests.api.page_helpers import ask, opened, prompt_of
from tests.serving.test_mcp import PROGRAM
from tests.support.scripted_engine import Script
from tests.support.waiting import HANG_S


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        child = McpServer("small", PROGRAM, timeout_s=HANG_S)
        served = start(stack, tokenizer, ServerConfig(mcp_servers=(child,)))
        HTTP.get(f"{served.url}/mcp/tools")  # which starts the child
        yield served


def call(served: Served, **body: object) -> Any:
    return HTTP.post(f"{served.url}/mcp/call", json=body)


def test_tools_are_listed_and_called(served: Served) -> None:
    (listed,) = HTTP.get(f"{served.url}/mcp/tools").json()["data"]
    assert (listed["server"], listed["problem"]) == ("small", "")
    assert "add" in [each["name"] for each in listed["tools"]]
    answer = call(served, server="small", tool="add", arguments={"a": 2, "b": 3})
    assert answer.json() == {"object": "mcp.result", "text": "5", "failed": False}
    assert call(served, server="small", tool="fail").json()["failed"]
    assert call(served, server="large", tool="add").status_code == 404
    unknown = call(served, server="small", tool="add", argument={})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "argument")


def test_a_server_without_mcp_has_no_tools(shared: Served) -> None:
    assert HTTP.get(f"{shared.url}/mcp/tools").json() == {"object": "list", "data": []}
    assert call(shared, server="small", tool="add").status_code == 404


def calls(served: Served, *numbers: int) -> None:
    """Lets a model add 1 to each of the numbers, call by call, and then end."""

    def script(request: Request) -> Script:
        given = prompt_of(served, request).count("response:")
        if given == len(numbers):
            return Script(served.ids("Done."))
        called = f"<|tool_call>call:small__add{{a:{numbers[given]},b:1}}<tool_call|>"
        return Script(served.ids(called))

    served.engine.reset(script)


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
    page.get_by_role("button", name="Allow in this conversation").click()
    page.wait_for_selector(".assistant .text:has-text('Done.')")  # the third was not asked about
    assert page.locator(".message.tool .text").all_inner_texts() == ["2", "3", "4"]
    page.reload()
    page.wait_for_selector(".assistant .text:has-text('Done.')")
    assert page.locator(".results").count() == 0
