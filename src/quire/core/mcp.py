"""MCP servers that the operator names: what each is and how it is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class McpServer:
    """One server of the Model Context Protocol, whose tools may be called.

    Values of `env` and `headers` may be secrets, so they are not shown.

    Attributes:
        name: by which requests and the page name it.
        command: a program and its arguments, run as a child that is spoken to over its standard
            input and output; empty if the server is reached by HTTP.
        env: variables of that child, beside the few that it needs (PATH, HOME, ...).
        folder: in which the child runs; "" is the one of this process.
        url: of a server that speaks streamable HTTP; "" if it is a child.
        headers: of every request to that URL.
        timeout_s: for one call.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0
