"""A small MCP server, which runs as a program of its own over standard input and output."""

from __future__ import annotations

import asyncio
import os

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def variable(name: str) -> str:
    """Say what an environment variable holds."""
    return os.environ.get(name, "(not set)")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("it broke")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
async def sleep(seconds: float) -> str:
    """Answer late."""
    await asyncio.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    server.run("stdio")
