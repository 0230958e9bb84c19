"""The MCP servers of a request, resolved to tools for the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard, TypeVar

from quire.api.shared.mcp_calls import function_name
from quire.api.shared.schema import Wire, parse
from quire.core.errors import NotFound, RequestError
from quire.serving.mcp import McpServers, McpTool, ToolFailed

JsonBody = dict[str, Any]
"""The body of a request or an answer as its client sends or reads it. The protocol's schema checks
it when a round's request is parsed."""

Parsed = TypeVar("Parsed", bound=Wire)


@dataclass(frozen=True, slots=True)
class Target:
    """A tool of a server. `approved`: whether the client allowed its calls beforehand."""

    server: str
    tool: McpTool
    approved: bool

    @property
    def function(self) -> str:
        """The name of the function that represents the tool."""
        return function_name(self.server, self.tool.name)


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call that this server made. `output` is an error's text if it `failed`."""

    server: str
    tool: str
    arguments: str
    output: str
    failed: bool

    def body(self) -> JsonBody:
        """Return the call in the form that clients of chat completions get."""
        return asdict(self)

    def told(self) -> str:
        """Return the result that the model reads."""
        return f"The call failed: {self.output}" if self.failed else self.output


@dataclass(frozen=True, slots=True)
class AskedServer:
    """One MCP server of a request.

    Attributes:
        params: paths of the fields that name it, its URL, and its tools, for errors.
        url: URL that the client gives for it, which must be the operator's; "" for none.
        allowed: returns whether the model sees a tool.
        approved: returns whether a tool's calls are allowed beforehand.
        names: tools that the client names, all of which must exist.
    """

    name: str
    params: tuple[str, str, str]
    url: str = ""
    allowed: Callable[[McpTool], bool] = lambda tool: True
    approved: Callable[[McpTool], bool] = lambda tool: True
    names: Sequence[str] = ()


async def resolved(asked: Iterable[AskedServer], servers: McpServers) -> dict[str, Target]:
    """Return the tools of a request's MCP servers, by the names of their functions.

    Raises:
        RequestError: a server is named twice.
        NotFound: a server is unknown, has another URL, or lacks a named tool.
        ToolFailed: a server cannot be reached.
    """
    listings = {each.server: each for each in await servers.tools()}
    targets: dict[str, Target] = {}
    seen: set[str] = set()
    for each in asked:
        name_field, url_field, tools_field = each.params
        listing = listings.get(each.name)
        if listing is None:
            known = ", ".join(listings)
            what = f"There is no MCP server '{each.name[:80]}'; those of this server: {known}."
            raise NotFound(what, param=name_field)
        if each.name in seen:
            what = f"The MCP server '{each.name}' is named twice."
            raise RequestError(what, param=name_field, code="invalid_value")
        seen.add(each.name)
        if each.url and each.url.rstrip("/") != servers.url(each.name).rstrip("/"):
            what = (
                f"'{each.url[:200]}' is not the URL that this server's operator set for the MCP "
                f"server '{each.name}': leave the URL out."
            )
            raise NotFound(what, param=url_field)
        if listing.problem:
            raise ToolFailed(listing.problem, param=name_field)
        offered = {tool.name: tool for tool in listing.tools}
        for name in each.names:
            if name not in offered:
                what = f"The MCP server '{each.name}' has no tool '{name[:80]}'."
                raise NotFound(what, param=tools_field)
        found = [
            Target(each.name, tool, approved=each.approved(tool))
            for tool in listing.tools
            if each.allowed(tool)
        ]
        targets |= {target.function: target for target in found}
    return targets


async def made(servers: McpServers, target: Target, arguments: str) -> MadeCall:
    """Make one call. An error becomes the call's output."""
    tool = target.tool.name
    try:
        given = json.loads(arguments or "{}")
        if not isinstance(given, dict):
            raise ValueError("the arguments are not a JSON object")
        result = await servers.call(target.server, tool, given)
        output, failed = result.text, result.failed
    except (RequestError, ValueError) as error:
        output, failed = str(error), True
    return MadeCall(target.server, tool, arguments, output=output, failed=failed)


def parsed(schema: type[Parsed], value: object, where: str) -> Parsed:
    """Return a part of a request, validated by `schema`.

    Raises:
        RequestError: a field is wrong or unknown; `param` is its path.
    """
    try:
        fields, _ = parse(schema, value, strict_fields=True)
    except RequestError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise RequestError(f"{where}: {error.message}", param=param, code=error.code) from error
    return fields


def is_of_type(value: object, kind: str) -> TypeGuard[JsonBody]:
    """Return whether a JSON value is an object of a `type`."""
    return isinstance(value, Mapping) and value.get("type") == kind
