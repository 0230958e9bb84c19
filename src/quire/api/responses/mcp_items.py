"""Items of MCP tools in a response's conversation, and their translation to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from quire.api.shared.content import read_arguments
from quire.api.shared.mcp_calls import NOT_MADE, call_and_result, function_name
from quire.api.shared.schema import History
from quire.core.errors import RequestError
from quire.serving.messages import TemplateMessage


class McpCallItem(History):
    """A call of an MCP tool that a server made, with its output or its error."""

    type: Literal["mcp_call"]
    name: str
    arguments: str
    server_label: str = ""
    id: str | None = None
    approval_request_id: str | None = None
    output: str | None = None
    error: Any = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None

    def told(self) -> str:
        """Return the result that the model reads."""
        if self.output is not None:
            return self.output
        return NOT_MADE if self.error is None else f"The call failed: {_text(self.error)}"


class McpListItem(History):
    """The tools of an MCP server as they were listed. The request's own tools count instead."""

    type: Literal["mcp_list_tools"]
    tools: list[dict[str, object]] | None = None
    server_label: str = ""
    id: str | None = None
    error: Any = None


class ApprovalRequestItem(History):
    """A call of an MCP tool that waits for the user's approval."""

    type: Literal["mcp_approval_request"]
    name: str
    arguments: str
    server_label: str = ""
    id: str | None = None


class ApprovalResponseItem(History):
    """The user's answer to a request for approval."""

    type: Literal["mcp_approval_response"]
    approval_request_id: str
    approve: bool
    reason: str | None = None
    id: str | None = None


McpItem = McpCallItem | McpListItem | ApprovalRequestItem | ApprovalResponseItem


class McpConversation:
    """The MCP items of one conversation. A call keeps the position at which the model made it."""

    def __init__(self, items: Sequence[object]) -> None:
        self._requests = {
            each.id for each in items if isinstance(each, ApprovalRequestItem) and each.id
        }
        self._made = {
            each.approval_request_id: each
            for each in items
            if isinstance(each, McpCallItem) and each.approval_request_id
        }
        self._decided = {
            each.approval_request_id: each
            for each in items
            if isinstance(each, ApprovalResponseItem)
        }

    def messages(self, item: McpItem, param: str) -> list[TemplateMessage]:
        """Return the messages of an item, if any.

        Raises:
            RequestError: a response to an approval that nobody asked for, or an approved call that
                was not made.
        """
        match item:
            case McpCallItem(approval_request_id=request) if request in self._requests:
                return []  # it stands at the request
            case McpCallItem():
                return _pair(item, item.told())
            case ApprovalRequestItem():
                return _pair(item, self._outcome(item, param))
            case ApprovalResponseItem(approval_request_id=request):
                if request not in self._requests:
                    raise RequestError(
                        f"'{param}.approval_request_id' is '{request[:80]}', which is not the "
                        "id of an earlier mcp_approval_request.",
                        param=f"{param}.approval_request_id",
                        code="invalid_value",
                    )
                return []
            case McpListItem():
                return []

    def _outcome(self, item: ApprovalRequestItem, param: str) -> str:
        made = self._made.get(item.id or "")
        if made is not None:
            return made.told()
        decided = self._decided.get(item.id or "")
        if decided is None:
            return "The user has not approved this call yet."
        if decided.approve:
            raise RequestError(
                f"'{param}' is an approved call that was not made: this server makes calls with "
                "--mcp, if the request's 'tools' name the call's MCP server.",
                param=param,
                code="unsupported_value",
            )
        reason = f": {decided.reason}" if decided.reason else "."
        return f"The user declined this call{reason}"


def _pair(item: McpCallItem | ApprovalRequestItem, output: str) -> list[TemplateMessage]:
    function = function_name(item.server_label, item.name)
    return call_and_result(
        item.id or "call", function, arguments=read_arguments(item.arguments), output=output
    )


def _text(error: Any) -> str:
    """Return the text of an error, in any of the forms that OpenAI's API has had."""
    if isinstance(error, str):
        return error
    if not isinstance(error, dict):
        return "unknown error"
    content = error.get("message", error.get("content", ""))
    if isinstance(content, list):
        content = "\n".join(str(each.get("text", "")) for each in content if isinstance(each, dict))
    return str(content)
