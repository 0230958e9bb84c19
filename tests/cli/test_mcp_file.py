"""The file of MCP servers: what it may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.mcp_file import mcp_servers
from quire.core.errors import QuireError
from quire.core.mcp import McpServer


def written(folder: Path, servers: Any) -> Path:
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return file


def test_servers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t0")
    child = {"command": "uvx", "args": ["mcp-server-time"], "env": {"KEY": "${TOKEN}"}}
    web = {
        "type": "http",
        "url": "http://127.0.0.1:9000/mcp",
        "headers": {"authorization": "Bearer ${TOKEN}"},
        "timeout": 5,
    }
    off = {"command": "x", "disabled": True}
    assert mcp_servers(written(tmp_path, {"time": child, "web": web, "off": off})) == (
        McpServer("time", ("uvx", "mcp-server-time"), env={"KEY": "t0"}),
        McpServer(
            "web",
            url="http://127.0.0.1:9000/mcp",
            headers={"authorization": "Bearer t0"},
            timeout_s=5,
        ),
    )
    assert mcp_servers(None) == ()


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"a": {}}, "either 'command' .* or 'url'"),
        ({"a": {"command": "x", "url": "http://h/mcp"}}, "either 'command' .* or 'url'"),
        ({"a": {"url": "http://h/mcp", "args": ["x"]}}, "args has no meaning"),
        ({"a": {"url": "http://h/sse", "type": "sse"}}, "'stdio', 'http' or 'streamable-http'"),
        ({"a": {"url": "http://h/mcp", "type": "stdio"}}, "'type' is stdio"),
        ({"a": {"command": "x", "commands": 1}}, r"mcpServers\.a\.commands"),
        ({"a b": {"command": "x"}}, "a b"),
        ({"a": {"command": "x", "env": {"K": "${NOT_SET_ANYWHERE}"}}}, "NOT_SET_ANYWHERE"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, servers: Any, message: str) -> None:
    with pytest.raises(QuireError, match=message):
        mcp_servers(written(tmp_path, servers))
