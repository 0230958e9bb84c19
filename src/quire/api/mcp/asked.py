"""MCP tools in a chat request, translated to functions that the model sees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from quire.api.shared.schema import Wire, parse
from quire.core.errors import NotFound, RequestError
from quire.serving.mcp import McpListing, McpServers

TYPE = "mcp"
_LONGEST_NAME = 64


class AskedServer(Wire):
    """A tool of type `mcp` in a request: an MCP server that the operator has named."""

    type: Literal["mcp"]
    server_label: str
    allowed_tools: list[str] | None = None
    require_approval: Literal["always", "never"] = Field(
        "always", description="never: the server makes the calls, and the answer goes on"
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A tool of a server. `approved` says whether the client allowed its calls beforehand."""

    server: str
    tool: str
    approved: bool


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call that this server made, in the form that clients get."""

    server: str
    tool: str
    arguments: str
    output: str
    failed: bool

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools of one request: the functions that the model sees, and the MCP tool behind each."""

    tools: list[Any]
    targets: Mapping[str, Target]

    def approved(self, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether there are calls, and the client allowed all of them beforehand."""
        found = [self.targets.get(each["function"]["name"]) for each in calls]
        return bool(found) and all(each is not None and each.approved for each in found)

    async def call(self, servers: McpServers, call: Mapping[str, Any]) -> MadeCall:
        """Make one approved call. An error becomes the call's output."""
        target, given = self.targets[call["function"]["name"]], call["function"]["arguments"]
        try:
            result = await servers.call(target.server, target.tool, json.loads(given or "{}"))
            output, failed = result.text, result.failed
        except (RequestError, ValueError) as error:
            output, failed = f"The call failed: {error}", True
        return MadeCall(target.server, target.tool, given, output=output, failed=failed)


async def asked_tools(tools: Sequence[Any], servers: McpServers) -> AskedTools | None:
    """Return a request's tools, with MCP servers replaced by functions; None if it names no server.

    Raises:
        RequestError: a server is unknown, cannot be reached, or lacks a tool.
    """
    if not any(_is_server(each) for each in tools):
        return None
    listings = {each.server: each for each in await servers.tools()}
    shown: list[Any] = []
    targets: dict[str, Target] = {}
    for index, tool in enumerate(tools):
        if not _is_server(tool):
            shown.append(tool)
            continue
        asked = _parsed(tool, f"tools[{index}]")
        for function, target in _functions(asked, listings, f"tools[{index}]"):
            shown.append({"type": "function", "function": function})
            targets[function["name"]] = target
    return AskedTools(shown, targets)


def _is_server(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == TYPE


def _parsed(tool: dict[str, Any], where: str) -> AskedServer:
    try:
        asked, _ = parse(AskedServer, tool, strict_fields=True)
    except RequestError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise RequestError(f"{where}: {error.message}", param=param, code=error.code) from error
    return asked


def _functions(
    asked: AskedServer, listings: Mapping[str, McpListing], where: str
) -> list[tuple[dict[str, Any], Target]]:
    """Return the functions of a server's tools, each with its `Target`.

    Raises:
        NotFound: the server is unknown, cannot be reached, or lacks a named tool.
    """
    label = asked.server_label
    listing = listings.get(label)
    if listing is None or listing.problem:
        known = ", ".join(listings)
        missing = f"There is no MCP server '{label[:80]}'; those of this server: {known}."
        what = missing if listing is None else listing.problem
        raise NotFound(what, param=f"{where}.server_label")
    offered = {each.name: each for each in listing.tools}
    wanted = list(offered) if asked.allowed_tools is None else asked.allowed_tools
    for name in wanted:
        if name not in offered:
            what = f"The MCP server '{label}' has no tool '{name[:80]}'."
            raise NotFound(what, param=f"{where}.allowed_tools")
    found = []
    for name in wanted:
        function = {
            "name": f"{label}__{name}"[:_LONGEST_NAME],
            "description": offered[name].description,
            "parameters": offered[name].parameters,
        }
        target = Target(label, name, approved=asked.require_approval == "never")
        found.append((function, target))
    return found
