"""A server with the MCP server of the tests, for all files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from quire.core.config import ServerConfig
from quire.core.errors import RequestError
from quire.core.mcp import McpServer
from quire.core.request import Request
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start
from tests.api.page_helpers import prompt_of
from tests.serving.test_mcp import PROGRAM
from tests.support.scripted_engine import Script
from tests.support.waiting import HANG_S


@pytest.fixture(scope="package")
def served(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        child = McpServer("small", PROGRAM, timeout_s=HANG_S)
        served = start(stack, tokenizer, ServerConfig(mcp_servers=(child,), mcp=True))
        HTTP.get(f"{served.url}/mcp/tools")  # which starts the child
        yield served


def calls(served: Served, *numbers: int, function: str = "add") -> None:
    """Let a model add 1 to each of the numbers, call by call, and then end."""

    def script(request: Request) -> Script:
        given = prompt_of(served, request).count("response:")
        if given == len(numbers):
            return Script(served.ids("Done."))
        called = f"<|tool_call>call:small__{function}{{a:{numbers[given]},b:1}}<tool_call|>"
        return Script(served.ids(called))

    served.engine.reset(script)


def refuses_the_second_round(served: Served) -> None:
    """Let a model call a tool, and refuse the prompt with its result."""
    calls(served, 1)
    made = served.engine.script

    def script(request: Request) -> Script:
        if len(served.engine.requests) == 2:
            raise RequestError("too long", code="context_length_exceeded")
        return made(request)

    served.engine.script = script
