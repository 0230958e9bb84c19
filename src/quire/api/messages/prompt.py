"""Translates Anthropic's messages to those of chat templates.

An answer's blocks become one message; a message of tool results becomes one message for each
result. The service removes the parts that agents change with each request, as for every protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.messages.assistant_blocks import AssistantBlock, CompactionBlock
from quire.api.messages.blocks import (
    ContentSource,
    DocumentBlock,
    HostedBlock,
    McpResultBlock,
    McpUseBlock,
    MediaBlock,
    RedactedThinkingBlock,
    ResultPart,
    SearchResultBlock,
    SystemText,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
)
from quire.api.messages.loaded_tools import changes
from quire.api.messages.mcp_turns import results, turns
from quire.api.messages.schema import (
    AssistantMessage,
    ClearThinking,
    ClearToolUses,
    Compact,
    CountRequest,
    KeptTurns,
    Message,
    SystemMessage,
    ThinkingAdaptive,
    ThinkingEnabled,
    UserMessage,
)
from quire.api.messages.tool_changes import SystemBlocks
from quire.api.messages.tool_changes import without_effect as ignored_part
from quire.api.messages.tools import HostedTool
from quire.api.shared.content import document_parts, function_call
from quire.api.shared.mcp_calls import function_name
from quire.api.shared.signing import Signer
from quire.api.shared.template_messages import check_answered, merge, summary
from quire.core.errors import RequestError
from quire.serving.messages import Call, Part, TemplateMessage, text_part

_FAILED = "Error: "
_ANSWERED = McpUseBlock | McpResultBlock | CompactionBlock


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the shape that chat templates read.

    Attributes:
        dropped: paths of reasoning that did not verify, as `messages.0.content.1`.
        left_out: paths of blocks without effect, as `messages[0].content[1]`: uses of hosted tools,
            and reasoning that did not verify.
    """

    messages: tuple[TemplateMessage, ...]
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def conversation(fields: CountRequest, signer: Signer) -> Conversation:
    """Return the conversation from its last summary on, its system prompt first.

    Raises:
        RequestError: a tool result without its call, or at the end a call without its result; a
            reasoning that does not verify, if the request says that this is an error.
    """
    translator = _Translator(fields, signer)
    messages: list[TemplateMessage] = []
    if fields.system:
        messages.append({"role": "system", "content": _system(fields.system)})
    last_question = max(
        (i for i, message in enumerate(fields.messages) if isinstance(message, UserMessage)),
        default=-1,
    )
    text, first, start = _last_summary(fields.messages)
    if text:
        messages.append(summary(text))
    for index, message in enumerate(fields.messages[first:], first):
        if not (_clears(message) and index < last_question):
            messages += translator.message(message, index, start if index == first else 0)
    merged = merge(messages)
    check_answered(merged, "messages")
    return Conversation(tuple(merged), tuple(translator.dropped), tuple(translator.left_out))


def without_effect(fields: CountRequest) -> list[str]:
    """Return the paths of hosted tools and of summaries, which have no effect here."""
    named: list[str] = []
    for index, tool in enumerate(fields.tools or ()):
        if isinstance(tool, HostedTool):
            named.append(f"tools[{index}]")
        elif tool.called_by_code:
            named.append(f"tools[{index}].allowed_callers")
    if fields.mcp_servers:
        named.append("mcp_servers")
    edits = enumerate(_edits(fields))
    named += [
        f"context_management.edits[{index}]" for index, edit in edits if isinstance(edit, Compact)
    ]
    named += filter(None, (ignored_part(*change) for change in changes(fields.messages)))
    return named


def _last_summary(messages: Sequence[Message]) -> tuple[str, int, int]:
    """Return the text of a conversation's last summary, and the indices of the message and of the
    block that come next. Without a summary, the text is empty and both indices are 0.
    """
    for index, message in reversed(list(enumerate(messages))):
        if not isinstance(message, AssistantMessage) or isinstance(message.content, str):
            continue
        for number, block in reversed(list(enumerate(message.content, 1))):
            if isinstance(block, CompactionBlock) and block.content:
                ends = number == len(message.content)
                return (block.content, index + 1, 0) if ends else (block.content, index, number)
    return "", 0, 0


def continues(messages: Sequence[Message]) -> bool:
    """Return whether the last message is the start of the requested answer. Results of MCP calls
    and summaries are answered by a new turn.
    """
    last = messages[-1]
    if not isinstance(last, AssistantMessage):
        return False
    return not (last.content and isinstance(last.content[-1], _ANSWERED))


class _Translator:
    """Translates one request's messages in order, and remembers the calls so far."""

    def __init__(self, fields: CountRequest, signer: Signer) -> None:
        self._signer = signer
        self._names: dict[str, str] = {}
        self._cleared_reasoning = _cleared_reasoning(fields)
        thinking = fields.thinking
        self._strict = (
            isinstance(thinking, ThinkingEnabled | ThinkingAdaptive)
            and thinking.block_binding is not None
            and thinking.block_binding.prefix_mismatch_behavior != "drop_block"
        )
        self.dropped: list[str] = []
        self.left_out: list[str] = []

    def message(self, message: Message, index: int, start: int = 0) -> list[TemplateMessage]:
        """Translate a message, an assistant's from its block `start` on, into one message, or into
        several with tool results among them.
        """
        if isinstance(message, SystemMessage):
            content = _system(message.content)
            return [{"role": "system", "content": content}] if content else []
        if isinstance(message.content, str):
            return [{"role": message.role, "content": message.content}]
        if isinstance(message, UserMessage):
            return self._user(message.content, f"messages[{index}].content")
        return [
            each
            for begin, turn in turns(message.content, start)
            for each in (
                self._turn(turn, index, begin),
                *results(turn, f"messages[{index}].content"),
            )
        ]

    def _user(self, blocks: Sequence[UserBlock], param: str) -> list[TemplateMessage]:
        messages: list[TemplateMessage] = []
        for number, block in enumerate(blocks):
            name = f"{param}[{number}]"
            if isinstance(block, ToolResultBlock):
                messages.append(self._result(block, name))
            elif isinstance(block, HostedBlock):
                self.left_out.append(name)
            else:
                messages.append({"role": "user", "content": _parts_of(block, name)})
        return messages or [{"role": "user", "content": ""}]

    def _result(self, block: ToolResultBlock, param: str) -> TemplateMessage:
        called = self._names.get(block.tool_use_id)
        if called is None:
            raise RequestError(
                f"'{param}.tool_use_id' is '{block.tool_use_id}', which is not the id of an "
                "earlier tool_use.",
                param=f"{param}.tool_use_id",
                code="invalid_value",
            )
        content: str | list[Part]
        if isinstance(block.content, list):
            content = [
                each
                for number, part in enumerate(block.content)
                for each in _parts_of(part, f"{param}.content[{number}]")
            ]
        else:
            content = block.content or ""
        if block.is_error:
            content = _as_error(content)
        return {
            "role": "tool",
            "content": content,
            "tool_call_id": block.tool_use_id,
            "name": called,
        }

    def _turn(self, blocks: Sequence[AssistantBlock], index: int, start: int) -> TemplateMessage:
        """Translate the blocks of one turn, the first of which has the number `start`."""
        texts: list[Part] = []
        earlier: list[str] = []
        calls: list[Call] = []
        for number, block in enumerate(blocks, start):
            match block:
                case TextBlock(text=text):
                    texts.append(text_part(text))
                case ToolUseBlock():
                    self._names[block.id] = block.name
                    calls.append(function_call(block.id, block.name, block.input))
                case McpUseBlock():
                    name = function_name(block.server_name, block.name)
                    calls.append(function_call(block.id, name, block.input))
                case HostedBlock():
                    self.left_out.append(f"messages[{index}].content[{number}]")
                case ThinkingBlock() | RedactedThinkingBlock() if (
                    index not in self._cleared_reasoning
                ):
                    reasoning = self._reasoning(block, index, number)
                    if reasoning is not None:
                        earlier.append(reasoning)
        message: TemplateMessage = {"role": "assistant", "content": texts or ""}
        if earlier:
            message["reasoning_content"] = "\n".join(earlier)
        if calls:
            message["tool_calls"] = calls
        return message

    def _reasoning(
        self, block: ThinkingBlock | RedactedThinkingBlock, index: int, number: int
    ) -> str | None:
        """Return earlier reasoning. Reasoning made elsewhere is left out, or refused on request."""
        if isinstance(block, RedactedThinkingBlock):
            reasoning = self._signer.open(block.data)
        elif block.thinking:
            known = self._signer.verifies(block.thinking, block.signature)
            reasoning = block.thinking if known else None
        else:
            reasoning = self._signer.open(block.signature)
        if reasoning is None:
            name = f"messages[{index}].content[{number}]"
            self.left_out.append(name)
            if self._strict:
                raise RequestError(
                    f"The signature of '{name}' does not verify: send the block as this server "
                    "returned it, or leave it out.",
                    param=name,
                    code="invalid_signature",
                )
            self.dropped.append(f"messages.{index}.content.{number}")
        return reasoning


def _cleared_reasoning(fields: CountRequest) -> frozenset[int]:
    """Return the indices of the messages whose reasoning the request asks to clear."""
    kept = [_kept_turns(edit) for edit in _edits(fields) if isinstance(edit, ClearThinking)]
    limits = [limit for limit in kept if limit is not None]
    if not limits:
        return frozenset()
    thinking = [
        index
        for index, message in enumerate(fields.messages)
        if isinstance(message.content, list)
        and any(isinstance(b, ThinkingBlock | RedactedThinkingBlock) for b in message.content)
    ]
    return frozenset(thinking[: -min(limits)])


def _edits(fields: CountRequest) -> Sequence[ClearThinking | ClearToolUses | Compact]:
    management = fields.context_management
    return (management.edits or ()) if management is not None else ()


def _kept_turns(edit: ClearThinking) -> int | None:
    """Return how many turns keep their reasoning; None for all. Anthropic's default is one."""
    match edit.keep:
        case "all" | KeptTurns(type="all"):
            return None
        case KeptTurns(value=value) if value is not None:
            return value
        case _:
            return 1


def _clears(message: Message) -> bool:
    """Return whether a message applies only to the turn after it."""
    return isinstance(message, SystemMessage) and message.clear_at == "next_user_message"


def _system(system: SystemText | SystemBlocks) -> str | list[Part]:
    """Return a system prompt's or message's text. Blocks stay separate, because the parts to
    remove are blocks.
    """
    if isinstance(system, str):
        return system
    return [text_part(block.text) for block in system if isinstance(block, TextBlock)]


def _document(block: DocumentBlock, param: str) -> list[Part]:
    if isinstance(block.source, ContentSource):
        return _split_document(block.source, block.title, block.context, param=f"{param}.source")
    if isinstance(block.source, TextSource):
        lines = (block.title, block.context, block.source.data)
        return [text_part("\n".join(line for line in lines if line))]
    about = (block.title, block.context)
    return document_parts(block.source.location, f"{param}.source", block.type, *about)


def _split_document(
    source: ContentSource, title: str | None, context: str | None, param: str
) -> list[Part]:
    about = [text_part(line) for line in (title, context) if line]
    if isinstance(source.content, str):
        return [*about, text_part(source.content)]
    parts = (_part(each, f"{param}.content[{n}]") for n, each in enumerate(source.content))
    return [*about, *parts]


def _parts_of(block: ResultPart, param: str) -> list[Part]:
    """Return a block as the parts of a message."""
    return _document(block, param) if isinstance(block, DocumentBlock) else [_part(block, param)]


def _part(
    block: TextBlock | MediaBlock | SearchResultBlock | ToolReferenceBlock, param: str
) -> Part:
    """Return a block as text, or as media."""
    lines: list[str | None]
    match block:
        case MediaBlock():
            return block.to_template(param)
        case TextBlock(text=text):
            lines = [text]
        case SearchResultBlock():
            lines = [block.title, block.source, *(each.text for each in block.content)]
        case ToolReferenceBlock():
            lines = [block.tool_name]
    return text_part("\n".join(line for line in lines if line))


def _as_error(content: str | list[Part]) -> str | list[Part]:
    """Return a result whose text says that the tool failed, because templates have no flag
    for it.
    """
    if isinstance(content, str):
        return content if _names_an_error(content) else _FAILED + content
    texts = [part["text"] for part in content if "text" in part]
    if texts and _names_an_error(texts[0]):
        return content
    if content and "text" in content[0]:
        return [text_part(_FAILED + content[0]["text"]), *content[1:]]
    return [text_part(_FAILED.rstrip()), *content]


def _names_an_error(text: str) -> bool:
    return "error" in text[:64].lower()
