"""`/mcp/tools` and `/mcp/call`: the tools of MCP servers, and single calls by the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.shared.access import note_ignored
from quire.api.shared.context import ServerContext, until_gone
from quire.api.shared.json_text import parse_json
from quire.api.shared.limits import check_headers, read_body
from quire.api.shared.mcp_calls import function_name
from quire.api.shared.schema import Wire, parse
from quire.serving.mcp import McpListing, McpServers


class McpCall(Wire):
    """The body of `/mcp/call`: a call of one tool."""

    server: str = Field(description="the server's name in /mcp/tools")
    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Mcp:
    """The endpoints `/mcp/tools` and `/mcp/call`."""

    def __init__(self, server: ServerContext, servers: McpServers) -> None:
        self._server = server
        self._servers = servers

    async def tools(self, request: Request) -> Response:
        """Answer `GET /mcp/tools`. Connects to servers that are not connected."""
        listings = await until_gone(request.receive, self._servers.tools())
        return JSONResponse({"object": "list", "data": [_listed(each) for each in listings]})

    async def call(self, request: Request) -> Response:
        """Answer `POST /mcp/call`. The call is cancelled when the client leaves."""
        server = self._server
        check_headers(request)
        with server.slots.bodies.reading() as counted:
            body = await read_body(request, server.config.max_body_bytes, counted)
        server.slots.enter(request.scope)
        strict = server.config.strict_fields
        fields, unknown = parse(McpCall, parse_json(body), strict_fields=strict)
        note_ignored(request.scope, unknown)
        call = self._servers.call(fields.server, fields.tool, fields.arguments)
        result = await until_gone(request.receive, call)
        return JSONResponse({"object": "mcp.result", "text": result.text, "failed": result.failed})


def _listed(listing: McpListing) -> dict[str, Any]:
    """Return a listing, each tool with the name of its function in requests."""
    tools = [
        {**asdict(each), "function": function_name(listing.server, each.name)}
        for each in listing.tools
    ]
    return {"server": listing.server, "tools": tools, "problem": listing.problem}
