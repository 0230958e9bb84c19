"""Schemas of the bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

The schema is https://platform.claude.com/docs/en/api/messages, with what the official SDKs and
Claude Code send of its betas. Markers of the prompt cache are accepted and change nothing: every
prompt is kept for reuse as it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.messages.assistant_blocks import AssistantBlock
from quire.api.messages.blocks import CacheControl, SystemText, UserBlock
from quire.api.messages.tool_changes import SystemBlocks
from quire.api.messages.tools import Tool
from quire.api.shared.formats import GuidedFields
from quire.api.shared.numbers import Integer
from quire.api.shared.schema import (
    DecodingFields,
    History,
    TextOrList,
    TokenCount,
    Wire,
    tag_by_role,
    tag_by_type,
)
from quire.core.sampling_params import MOST_TOKENS
from quire.serving.messages import JsonObject


class UserMessage(History):
    """A user's message or the results of tool calls."""

    role: Literal["user"]
    content: TextOrList[UserBlock]


class AssistantMessage(History):
    """An earlier answer, or at the end the start of the one that is asked for."""

    role: Literal["assistant"]
    content: TextOrList[AssistantBlock]


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class MessageConfig(History):
    """The reasoning effort from a message on, in place of the request's."""

    effort: Effort | None = None
    format: None = Field(default=None, description="use the request's output_config")


class SystemMessage(History):
    """Operator instructions in the middle of a conversation, permanent or for one turn, and
    changes of tools and of the effort, which stay.
    """

    role: Literal["system"]
    content: SystemBlocks = ""
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageConfig | None = None


Message = Annotated[
    Annotated[UserMessage, Tag("@user")]
    | Annotated[AssistantMessage, Tag("@assistant")]
    | Annotated[SystemMessage, Tag("@system")],
    Discriminator(tag_by_role),
]


class ToolChoice(Wire):
    """Whether a tool may, must or must not be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


Display = Literal["summarized", "omitted", "updates"]
"""How much reasoning is shown: all of it, or none for the last two values. Anthropic's models mark
`updates`, notes between tool calls; here they are always text."""


class BlockBinding(Wire):
    """The policy for reasoning whose signature does not verify. By default it is left out."""

    prefix_mismatch_behavior: Literal["error", "drop_block"] | None = None


class ThinkingAdaptive(Wire):
    """Think first, for as long as the model likes within `max_tokens`."""

    type: Literal["adaptive"]
    display: Display | None = None
    block_binding: BlockBinding | None = None


class ThinkingEnabled(Wire):
    """Think first, for at most `budget_tokens`."""

    type: Literal["enabled"]
    budget_tokens: TokenCount | None = None
    display: Display | None = None
    block_binding: BlockBinding | None = None


class ThinkingDisabled(Wire):
    """Do not think, or do not show it; `between_tools` differs where models mark `updates`."""

    type: Literal["disabled", "between_tools"]


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("@enabled")]
    | Annotated[ThinkingAdaptive, Tag("@adaptive")]
    | Annotated[ThinkingDisabled, Tag("@disabled")]
    | Annotated[ThinkingDisabled, Tag("@between_tools")],
    Discriminator(tag_by_type),
]


class OutputFormat(Wire):
    """A schema that the answer must meet."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    name: str | None = None


class OutputConfig(Wire):
    """The reasoning effort, and the format of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class KeptTurns(Wire):
    """How many of the last turns keep their reasoning."""

    type: Literal["thinking_turns", "all"]
    value: int | None = Field(default=None, ge=1)


class ClearThinking(Wire):
    """Leaves reasoning of earlier turns out of the prompt."""

    type: Literal["clear_thinking_20251015"]
    keep: (
        Annotated[
            Annotated[Literal["all"], Tag("@text")] | Annotated[KeptTurns, Tag("@turns")],
            Discriminator(lambda value: "@text" if isinstance(value, str) else "@turns"),
        ]
        | None
    ) = None


class Trigger(Wire):
    """How much a conversation holds before an edit is made."""

    type: Literal["input_tokens", "tool_uses"]
    value: Integer = Field(ge=1)


class KeptUses(Wire):
    """How many of the last tool uses keep their results."""

    type: Literal["tool_uses"]
    value: Integer = Field(ge=0)


class LeastTokens(Wire):
    """How many tokens an edit has to clear to be made at all."""

    type: Literal["input_tokens"]
    value: Integer = Field(ge=0)


class ClearToolUses(Wire):
    """Leaves results of old tool uses out of the prompt."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger | None = Field(default=None, description="100,000 input tokens by default")
    keep: KeptUses | None = Field(default=None, description="3 tool uses by default")
    clear_at_least: LeastTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: (
        Annotated[
            Annotated[bool, Tag("@all")] | Annotated[list[str], Tag("@names")],
            Discriminator(lambda value: "@names" if isinstance(value, list) else "@all"),
        ]
        | None
    ) = Field(
        default=None,
        description="also clear the arguments of calls: true for all tools, or a list of tools",
    )


class Compact(History):
    """A summary of the conversation, which is not made here. It is named."""

    type: Literal["compact_20260112"]


class ContextManagement(Wire):
    """Edits of the prompt before it is read: reasoning and tool results are cleared."""

    edits: (
        list[
            Annotated[
                Annotated[ClearThinking, Tag("@clear_thinking_20251015")]
                | Annotated[ClearToolUses, Tag("@clear_tool_uses_20250919")]
                | Annotated[Compact, Tag("@compact_20260112")],
                Discriminator(tag_by_type),
            ]
        ]
        | None
    ) = None


class Metadata(History):
    """Information about the user: of several engines, one answers a user."""

    user_id: str | None = None


class CountRequest(Wire):
    """Fields that shape the prompt; the body of `count_tokens`.

    A `thread` names the start of a conversation.
    """

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: SystemText | None = None
    tools: list[Tool] | None = Field(default=None, max_length=1024)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[dict[str, object]] | None = None
    thread: dict[str, object] | None = None
    billing_policy: None = None
    compaction: None = None

    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort: the conversation's last, else the request's."""
        configs = [each.output_config for each in self.messages if isinstance(each, SystemMessage)]
        efforts = (each.effort for each in (self.output_config, *configs) if each is not None)
        return next(filter(None, reversed([*efforts])), None)


class MessagesRequest(CountRequest, DecodingFields, GuidedFields):
    """Every field of Anthropic's schema: honoured, refused by name, or without effect."""

    max_tokens: Integer = Field(
        ge=0, le=MOST_TOKENS, description="0: only read the prompt into the prefix cache"
    )
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, max_length=64
    )

    response_format: None = Field(default=None, description="use output_config.format")
    container: None = None
    inference_geo: None = None
    fallbacks: None = None
    fallback_credit_token: None = None
    safeguards: None = Field(
        default=None, description="this server does not judge tool calls; the client has to"
    )

    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, object] | None = None

    @property
    def session(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id
