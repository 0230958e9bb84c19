"""Stored conversation items, complete as OpenAI's API lists them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from quire.api.responses.schema import (
    CallOutputItem,
    Content,
    FunctionCallItem,
    ImagePart,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    TextPart,
)
from quire.api.shared.pieces import Merged, compact
from quire.core.ids import new_id

_ITEM: TypeAdapter[Item] = TypeAdapter(Item)
_PREFIXES = {
    "message": "msg",
    "agent_message": "amsg",
    "reasoning": "rs",
    "compaction": "cmp",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "web_search_call": "ws",
    "image_generation_call": "ig",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
_INPUT = "input_text"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of a conversation.

    Attributes:
        id: id, unique within its conversation.
        kind: the item's `type`.
        written: its JSON, without the id.
    """

    id: str
    kind: str
    written: bytes

    @classmethod
    def of(cls, item: Item) -> StoredItem:
        """Return a stored item for a request's item whose references are resolved."""
        kind = item.type or ""
        whole = item.model_copy(update=_filled(item))
        written = whole.model_dump_json(by_alias=True, exclude_unset=True, exclude={"id"})
        return cls(item.id or _new_id(kind), kind, written.encode())

    @classmethod
    def of_answer(cls, body: dict[str, object]) -> StoredItem:
        """Return a stored item for an answer's item."""
        written = compact({name: value for name, value in body.items() if name != "id"})
        return cls(str(body["id"]), str(body["type"]), written)

    def beside(self, taken: Collection[str]) -> StoredItem:
        """Return this item, with a new id if another item has the same."""
        return replace(self, id=_new_id(self.kind)) if self.id in taken else self

    def read(self) -> Item:
        """Return the item."""
        return _ITEM.validate_json(self.written).model_copy(update={"id": self.id})

    def pieces(self) -> Iterator[bytes]:
        """Yield the item's JSON, as `Written` wants it."""
        return Merged(self.written, {"id": self.id}).pieces()


def _new_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{new_id()}"


def _filled(item: Item) -> dict[str, object]:
    """Return the fields that clients may omit or shorten but item lists must contain."""
    filled: dict[str, object] = {"type": item.type}
    if "status" in type(item).model_fields:
        filled["status"] = getattr(item, "status", None) or "completed"
    match item:
        case MessageItem(role=role, content=content):
            filled["content"] = _parts(content, "output_text" if role == "assistant" else _INPUT)
        case FunctionCallItem(arguments=dict() | None as arguments):
            filled["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
        case CallOutputItem(output=list() as output):
            filled["output"] = _parts(output, _INPUT)
        case ReasoningItem(summary=summary, content=content):
            filled["summary"] = _typed(summary or (), "summary_text")
            if content:
                filled["content"] = _typed(content, "reasoning_text")
    return filled


def _parts(content: Content, kind: str) -> list[Part]:
    """Return content as a list of parts.

    Args:
        kind: type of its text parts.
    """
    if isinstance(content, str):
        content = [TextPart(type="text", text=content)] if content else []
    parts: list[Part] = []
    for part in content:
        match part:
            case TextPart():
                parts += _typed([part], kind)
            case ImagePart(detail=detail):
                parts.append(part.model_copy(update={"detail": detail or "auto"}))
            case _:
                parts.append(part)
    return parts


def _typed(texts: Sequence[TextPart], kind: str) -> list[TextPart]:
    typed = [each.model_copy(update={"type": kind}) for each in texts]
    if kind != "output_text":
        return typed
    return [each.model_copy(update={"annotations": each.annotations or []}) for each in typed]
