"""Connections to MCP servers: real ones, over standard input and output and over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import tests.support.mcp_server
from quire.core.errors import NotFound, RequestError
from quire.core.mcp import McpServer
from quire.serving.mcp import McpServers, ToolFailed
from tests.support.server import serving
from tests.support.waiting import HANG_S

PROGRAM = (sys.executable, str(Path(tests.support.mcp_server.__file__)))


def run(server: McpServer, scenario: Callable[[McpServers], Awaitable[None]]) -> None:
    async def whole() -> None:
        servers = McpServers([server])
        try:
            await scenario(servers)
        finally:
            await servers.close()

    asyncio.run(whole())


@pytest.mark.slow
def test_tools_of_a_child_are_listed_and_called_and_a_dead_one_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    child = McpServer("small", PROGRAM, env={"OWN": "yes"}, timeout_s=HANG_S)

    async def scenario(servers: McpServers) -> None:
        (listing,) = await servers.tools()
        assert (listing.server, listing.problem) == ("small", "")
        tools = {each.name: each for each in listing.tools}
        assert tools["add"].description == "Add two whole numbers."
        assert tools["add"].parameters["required"] == ["a", "b"]
        found = await servers.call("small", "add", {"a": 2, "b": 3})
        assert (found.text, found.failed) == ("5", False)
        assert (await servers.call("small", "variable", {"name": "OWN"})).text == "yes"
        hidden = await servers.call("small", "variable", {"name": "QUIRE_API_KEY"})
        assert hidden.text == "(not set)"
        broken = await servers.call("small", "fail", {})
        assert broken.failed
        assert "it broke" in broken.text
        with pytest.raises(NotFound, match="no MCP server 'other'"):
            await servers.call("other", "add", {})
        with pytest.raises(ToolFailed, match="ended its connection"):
            await servers.call("small", "die", {})
        assert (await servers.call("small", "add", {"a": 1, "b": 1})).text == "2"

    run(child, scenario)


def test_a_server_that_is_not_there_says_so() -> None:
    async def scenario(servers: McpServers) -> None:
        for _ in range(2):
            (listing,) = await servers.tools()
            assert listing.tools == ()
            assert "cannot be reached" in listing.problem
        with pytest.raises(RequestError, match="cannot be reached"):
            await servers.call("none", "add", {})

    run(McpServer("none", ("/no/such/program",)), scenario)


def test_tools_over_http_are_called_and_a_call_that_takes_too_long_fails_alone() -> None:
    async def scenario(servers: McpServers) -> None:
        assert (await servers.call("web", "add", {"a": 2, "b": 3})).text == "5"
        with pytest.raises(ToolFailed, match=r"did not answer within 2 s"):
            await servers.call("web", "sleep", {"seconds": 60})
        assert (await servers.call("web", "add", {"a": 2, "b": 4})).text == "6"

    with serving(tests.support.mcp_server.server.streamable_http_app()) as url:
        run(McpServer("web", url=f"{url}/mcp", timeout_s=2), scenario)
