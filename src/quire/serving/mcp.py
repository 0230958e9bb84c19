"""Tools of MCP servers: connections that the HTTP side keeps, and calls over them.

The official SDK (the extra `mcp`) implements the protocol. A server is connected when its tools are
first needed, and again after its connection was lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.core.errors import NotFound, QuireError, RequestError
from quire.core.mcp import McpServer
from quire.serving.messages import JsonObject
from quire.serving.tasks import cancel_and_wait, close_all, first_error

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("quire.mcp")

_MOST_TEXT = 1 << 18
"""Most characters of a result. A longer one is cut, and says so."""
_MOST_TOOLS = 1024
"""Most tools of one server, since a broken one might list them without end."""
_CONNECT_S = 60.0
Result = TypeVar("Result")


class ToolFailed(RequestError):
    """Raised if a tool's server cannot be reached or does not answer."""

    status = 502
    type = "api_error"


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool as its server describes it; `parameters` is a JSON schema. `read_only` says whether
    the server claims that the tool changes nothing.
    """

    name: str
    description: str
    parameters: JsonObject
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class McpListing:
    """The tools of one server. `problem` says why there are none if it cannot be reached."""

    server: str
    tools: tuple[McpTool, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class McpResult:
    """The result of a call, as text for a model. `failed` says whether the tool reported an
    error.
    """

    text: str
    failed: bool


class McpServers:
    """The MCP servers that the operator named. Lives as long as the HTTP server."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._connections = {each.name: _Connection(each) for each in servers}

    def __bool__(self) -> bool:
        return bool(self._connections)

    def url(self, server: str) -> str:
        """Return the URL of a server; "" if it is a program."""
        return self._connections[server].url

    async def tools(self) -> list[McpListing]:
        """Return the tools of each server, or why it cannot be reached."""
        return list(await asyncio.gather(*(each.listing() for each in self._connections.values())))

    async def call(self, server: str, tool: str, arguments: dict[str, object]) -> McpResult:
        """Call a tool.

        Raises:
            NotFound: there is no such server.
            RequestError: the server refuses the tool's name or its arguments.
            ToolFailed: the server cannot be reached, or does not answer in time.
        """
        connection = self._connections.get(server)
        if connection is None:
            known = ", ".join(self._connections) or "none"
            what = f"There is no MCP server '{server[:80]}'; those of this server: {known}."
            raise NotFound(what, param="server")
        return await connection.call(tool, arguments)

    async def close(self) -> None:
        """End all connections, and the processes behind them."""
        await close_all(*(each.close() for each in self._connections.values()))


class _Connection:
    """The connection to one server. A task of its own opens, holds and closes it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    async def listing(self) -> McpListing:
        name = self._server.name
        try:
            found = await self._ask(_all_tools, again=True)
        except (ToolFailed, RequestError) as error:
            return McpListing(name, problem=str(error))
        return McpListing(
            name,
            tuple(
                McpTool(
                    each.name,
                    each.description or "",
                    dict(each.input_schema),
                    read_only=bool(each.annotations and each.annotations.read_only_hint),
                )
                for each in found
            ),
        )

    async def call(self, tool: str, arguments: dict[str, object]) -> McpResult:
        """Call a tool; see `McpServers.call`. A call is never repeated: the tool may have acted
        before the connection was lost.
        """
        found = await self._ask(lambda client: client.call_tool(tool, arguments))
        return McpResult(_text(found), found.is_error)

    async def _ask(
        self, ask: Callable[[Client], Awaitable[Result]], *, again: bool = False
    ) -> Result:
        """Send a request and return the answer.

        A lost connection is opened again, now if `again`, else at the next request.

        Raises:
            ToolFailed: the server cannot be reached, or does not answer in time.
            RequestError: the server refuses the request.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        name = self._server.name
        had_one = self._client is not None
        try:
            client = await self._connected()
            async with asyncio.timeout(self._server.timeout_s):
                return await ask(client)
        except TimeoutError as error:
            limit = f"{self._server.timeout_s:g} s"
            raise ToolFailed(f"The MCP server '{name}' did not answer within {limit}.") from error
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise RequestError(f"The MCP server '{name}' refused: {error}") from error
            await self.close()
            if again and had_one:
                return await self._ask(ask)
            raise ToolFailed(f"The MCP server '{name}' ended its connection.") from error

    async def _connected(self) -> Client:
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client))
        return await asyncio.shield(self._client)

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        """Keep the connection open until the task is cancelled."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_CONNECT_S):
                    client = await stack.enter_async_context(await self._opened(stack))
                log.info("MCP server %s is connected", self._server.name)
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # the SDK raises groups of whatever a transport raised
            self._client = None
            first = first_error(error)
            late = isinstance(first, TimeoutError)
            reason = "no answer" if late else str(first) or type(first).__name__
            what = f"The MCP server '{self._server.name}' cannot be reached: {reason}."
            log.warning("%s", what)
            if not ready.done():
                ready.set_exception(ToolFailed(what))
                ready.exception()  # whoever asked may have left

    async def _opened(self, stack: AsyncExitStack) -> Client:
        import httpx2  # the SDK's own client
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command:
            program, *arguments = server.command
            child = StdioServerParameters(
                command=program,
                args=arguments,
                env=dict(server.env),
                cwd=server.folder or None,
            )
            return Client(child)
        limits = httpx2.Timeout(_CONNECT_S, read=None)  # calls have a limit of their own
        client = httpx2.AsyncClient(headers=dict(server.headers), timeout=limits)
        http = await stack.enter_async_context(client)
        return Client(streamable_http_client(server.url, http_client=http))

    async def close(self) -> None:
        task, self._task, self._client = self._task, None, None
        if task is not None:
            await cancel_and_wait(task)


async def _all_tools(client: Client) -> list[Any]:
    """Return a server's tools, from all pages of its list."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor and len(tools) < _MOST_TOOLS:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools[:_MOST_TOOLS]


def _text(result: Any) -> str:
    """Return a result's content as text. Content that is no text is replaced by its kind."""
    parts = [_part(each) for each in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if len(text) <= _MOST_TEXT:
        return text
    return (
        f"{text[:_MOST_TEXT]}\n[cut off: {len(text)} characters, of which {_MOST_TEXT} are given]"
    )


def _part(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource_link":
            return f"[{block.name}: {block.uri}]"
        case kind:
            return f"[{kind} that is not given to the model]"


def check_usable(servers: Sequence[McpServer], *, asked: bool) -> None:
    """Raise `QuireError` if servers are named without the SDK, or MCP is asked for without
    servers.
    """
    if not servers and asked:
        raise QuireError("--mcp needs --mcp-servers FILE, which names the servers")
    if not servers:
        return
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        what = "--mcp-servers needs the extra [mcp]: pip install 'quire-serve[mcp]'"
        raise QuireError(what) from error
