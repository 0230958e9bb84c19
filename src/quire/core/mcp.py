"""Settings of the MCP servers that the operator names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class McpServer:
    """One MCP server, whose tools may be called.

    Values of `env` and `headers` may be secrets, so they are not shown.

    Attributes:
        name: its name in requests and on the page.
        command: a program and its arguments, run as a child that is spoken to over its standard
            input and output; empty if the server is reached by HTTP.
        env: variables of that child, beside the few that it needs (PATH, HOME, ...).
        folder: working folder of the child; "" means this process's.
        url: URL of a server that speaks streamable HTTP; "" for a child.
        headers: headers of every request to that URL.
        timeout_s: seconds for one call.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0
