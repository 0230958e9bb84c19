"""The tool of type `mcp` in OpenAI's chat completions and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.shared.mcp_asked import AskedServer, is_of_type, parsed
from quire.api.shared.schema import Wire
from quire.serving.mcp import McpTool

TYPE = "mcp"


class ToolFilter(Wire):
    """Some tools of a server: by name, or those that claim to change nothing."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: McpTool) -> bool:
        """Return whether a tool meets all conditions."""
        named = self.tool_names is None or tool.name in self.tool_names
        return named and self.read_only in (None, tool.read_only)


class Approval(Wire):
    """Tools whose calls need approval. Those that neither names need it, too."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


def _tag(value: object) -> str:
    return "@filter" if isinstance(value, dict | Wire) else "@plain"


class McpServerTool(Wire):
    """A tool of type `mcp`: an MCP server that the operator has named."""

    type: Literal["mcp"]
    server_label: str
    server_description: str | None = Field(None, description="no effect")
    server_url: str | None = Field(
        None, description="leave it out, or send the URL that the operator set"
    )
    allowed_tools: (
        Annotated[
            Annotated[list[str], Tag("@plain")] | Annotated[ToolFilter, Tag("@filter")],
            Discriminator(_tag),
        ]
        | None
    ) = None
    require_approval: (
        Annotated[
            Annotated[Literal["always", "never"], Tag("@plain")]
            | Annotated[Approval, Tag("@filter")],
            Discriminator(_tag),
        ]
        | None
    ) = Field(None, description="always by default; never: the server makes the calls")

    def offers(self, tool: McpTool) -> bool:
        """Return whether the model sees a tool."""
        match self.allowed_tools:
            case None:
                return True
            case ToolFilter() as wanted:
                return wanted.matches(tool)
            case names:
                return tool.name in names

    def approves(self, tool: McpTool) -> bool:
        """Return whether calls of a tool are allowed beforehand."""
        match self.require_approval:
            case Approval(always=always, never=never):
                asks = always is not None and always.matches(tool)
                return never is not None and never.matches(tool) and not asks
            case asked:
                return asked == "never"

    def names(self) -> list[str]:
        """Return the names of the tools that the request allows."""
        filters: list[Any] = [self.allowed_tools]
        if isinstance(self.require_approval, Approval):
            filters += [self.require_approval.always, self.require_approval.never]
        return [
            name
            for each in filters
            for name in ((each.tool_names or []) if isinstance(each, ToolFilter) else each or [])
        ]


def asked_servers(tools: Sequence[Any]) -> list[AskedServer]:
    """Return the MCP servers among a request's tools.

    Raises:
        RequestError: a field of one is wrong or unknown.
    """
    asked = []
    for index, tool in enumerate(tools):
        if not is_of_type(tool, TYPE):
            continue
        where = f"tools[{index}]"
        fields = parsed(McpServerTool, tool, where)
        asked.append(
            AskedServer(
                fields.server_label,
                (f"{where}.server_label", f"{where}.server_url", f"{where}.allowed_tools"),
                url=fields.server_url or "",
                allowed=fields.offers,
                approved=fields.approves,
                names=fields.names(),
            )
        )
    return asked
