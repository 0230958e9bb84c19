"""Translates items of a response's input to messages of chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.api.responses.configuration import ConfigurationUpdateItem
from quire.api.responses.mcp_items import McpConversation, McpItem
from quire.api.responses.own_tools import CompactionItem, HostedCallItem, OwnCallItem, OwnOutputItem
from quire.api.responses.schema import (
    AdditionalToolsItem,
    AgentMessageItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    CustomTool,
    FilePart,
    FunctionCallItem,
    FunctionTool,
    ImagePart,
    Item,
    MessageItem,
    NamespaceTool,
    ReasoningItem,
    RefusalPart,
    SealedPart,
    SearchCallItem,
    SearchOutputItem,
    TextPart,
    Tool,
)
from quire.api.shared.content import (
    INPUT,
    document_parts,
    function_call,
    pdf_url,
    read_arguments,
)
from quire.api.shared.media_parts import media_part
from quire.api.shared.signing import Signer
from quire.api.shared.template_messages import check_answered, merge, summary
from quire.api.shared.toolbox import SEARCH, model_name
from quire.core.errors import RequestError
from quire.serving.messages import JsonObject, Part, TemplateMessage, text_part


class Translator:
    """Translates the items of one conversation in order, and remembers the calls so far.

    Attributes:
        dropped: ids of reasoning items that another server signed.
        left_out: paths of these, and of uses of hosted tools, among the request's own items.
    """

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._names: dict[str, str] = {}
        self._open: dict[str, None] = {}  # ids of calls without an output, in order
        self._calls: dict[str, str] = {}  # ids of calls by those of their items
        self.dropped: list[str] = []
        self.left_out: list[str] = []

    def messages(
        self, instructions: str | None, items: Sequence[Item], new: int
    ) -> tuple[TemplateMessage, ...]:
        """Return the conversation, its instructions first.

        Args:
            new: number of items that are the request's own. Errors count from the first of these.

        Raises:
            RequestError: a file, which no model here takes; media that the assistant said; an
                output without its call, or at the end a call without its output.
        """
        messages: list[TemplateMessage] = []
        if instructions:
            messages.append({"role": "system", "content": instructions})
        mcp = McpConversation(items)
        for index, item in enumerate(items, new - len(items)):
            named = len(self.left_out)
            if isinstance(item, McpItem):
                messages += mcp.messages(item, f"input[{index}]")
                continue
            message = self._message(item, f"input[{index}]")
            if index < 0:
                del self.left_out[named:]  # of an earlier request, which was told
            if message is not None:
                messages.append(message)
        merged = merge(messages)
        check_answered(merged, "input")
        return tuple(merged)

    def _message(self, item: Item, param: str) -> TemplateMessage | None:
        match item:
            case MessageItem(role=role, content=content):
                parts = _parts(content, f"{param}.content", media=role != "assistant")
                return {"role": "system" if role == "developer" else role, "content": parts}
            case AgentMessageItem(content=content):
                return {"role": "user", "content": _parts(content or "", f"{param}.content")}
            case ReasoningItem():
                reasoning = self._reasoning(item, param)
                if not reasoning:
                    return None
                return {"role": "assistant", "content": "", "reasoning_content": reasoning}
            case CompactionItem():
                return self._summary(item, param)
            case FunctionCallItem():
                arguments = read_arguments(item.arguments)
                return self._call(item.call_id, model_name(item.name, item.namespace), arguments)
            case CustomCallItem():
                name = model_name(item.name, item.namespace)
                return self._call(item.call_id, name, {INPUT: item.input})
            case SearchCallItem(call_id=str(call_id), arguments=arguments):
                return self._call(call_id, SEARCH, arguments)
            case OwnCallItem():
                self._calls[item.id or ""] = item.call_id
                return self._call(item.call_id, item.kind, item.arguments())
            case OwnOutputItem(id=output_id):
                call_id = item.call_id or self._calls.get(output_id or "", output_id or "")
                return self._output(call_id, item.text(), param)
            case CallOutputItem():
                call_id = self._only_open(param) if item.call_id is None else item.call_id
                return self._output(call_id, _parts(item.output, f"{param}.output"), param)
            case SearchOutputItem(call_id=str(call_id), tools=tools):
                return self._output(call_id, _told(tools), param)
            case HostedCallItem() | SearchCallItem() | SearchOutputItem():
                self.left_out.append(param)
                return None
            case ConfigurationUpdateItem():
                self.left_out += [f"{param}.{name}" for name in item.without_effect()]
                return None  # its effort and its format hold for the whole answer
            case AdditionalToolsItem():
                return None  # what they hold stands with the request's own fields
            case _:  # references have been resolved
                raise AssertionError(item)

    def _only_open(self, param: str) -> str:
        """Return the id of the only call without an output.

        Raises:
            RequestError: there is none, or several.
        """
        if len(self._open) != 1:
            raise RequestError(
                f"Missing required parameter: '{param}.call_id'. {len(self._open)} calls have no "
                "output here; only if it is one may its id be left out.",
                param=f"{param}.call_id",
                code="missing_required_parameter",
            )
        return next(iter(self._open))

    def _call(self, call_id: str, name: str, arguments: JsonObject) -> TemplateMessage:
        self._names[call_id] = name
        self._open[call_id] = None
        call = function_call(call_id, name, arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _output(self, call_id: str, content: str | list[Part], param: str) -> TemplateMessage:
        name = self._names.get(call_id)
        if name is None:
            raise RequestError(
                f"'{param}.call_id' is '{call_id}', which is not the id of an earlier call.",
                param=f"{param}.call_id",
                code="invalid_value",
            )
        self._open.pop(call_id, None)
        return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}

    def _summary(self, item: CompactionItem, param: str) -> TemplateMessage | None:
        """Return a summary as a message of the user; None if it was not packed here."""
        opened = self._signer.open(item.encrypted_content or "")
        if opened is None:
            self.left_out.append(param)
            return None
        return summary(opened)

    def _reasoning(self, item: ReasoningItem, param: str) -> str:
        """Return the text of earlier reasoning; empty if it cannot be read."""
        opened = self._signer.open(item.encrypted_content) if item.encrypted_content else None
        if opened is not None:
            return opened
        parts = item.content or item.summary or []
        if not parts and item.encrypted_content:
            self.dropped.append(item.id or "")
            self.left_out.append(param)
        return "\n".join(part.text for part in parts)


def _told(tools: Sequence[Tool]) -> str:
    """Return the text that answers a tool search: the names of the added tools."""
    names: list[str] = []
    for tool in tools:
        match tool:
            case NamespaceTool():
                names += [model_name(each.name, tool.name) for each in tool.tools]
            case FunctionTool() | CustomTool():
                names.append(tool.name)
    return json.dumps({"tools": names}, ensure_ascii=False)


def _document(part: FilePart, param: str) -> list[Part]:
    name = f"{param}.file_data" if part.file_data else f"{param}.file_url"
    url = pdf_url(part.file_data) or part.file_url or ""
    return document_parts(url, name if url else param, part.type, part.filename)


def _parts(content: Content, param: str, *, media: bool = True) -> str | list[Part]:
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for index, part in enumerate(content):
        match part:
            case (
                TextPart(text=text) | RefusalPart(refusal=text) | SealedPart(encrypted_content=text)
            ):
                parts.append(text_part(text))
            case _ if not media:
                raise RequestError(
                    f"'{param}[{index}]' is of type '{part.type}', which an assistant message "
                    "cannot hold.",
                    param=f"{param}[{index}]",
                    code="invalid_value",
                )
            case FilePart():
                parts += _document(part, f"{param}[{index}]")
            case ImagePart():
                name = f"{param}[{index}].image_url"
                parts.append(
                    media_part("image", part.image_url, name, named=part.type, options=part)
                )
            case _:
                parts.append(part.to_template(f"{param}[{index}]"))
    return parts
