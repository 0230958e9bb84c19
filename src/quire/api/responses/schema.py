"""Schema of https://platform.openai.com/docs/api-reference/responses: items, tools and fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.responses.configuration import ConfigurationUpdateItem, Reasoning, TextConfig
from quire.api.responses.conversation_name import ConversationName, ConversationParam
from quire.api.responses.mcp_items import (
    ApprovalRequestItem,
    ApprovalResponseItem,
    McpCallItem,
    McpListItem,
)
from quire.api.responses.own_tools import (
    Caller,
    ClientRunTool,
    CompactionItem,
    HostedCallItem,
    HostedTool,
    OwnCallItem,
    OwnOutputItem,
    Status,
    tag_hosted_item,
    tag_tool,
)
from quire.api.responses.tool_choice import RequestedChoice
from quire.api.shared.content import AudioPart, FunctionName
from quire.api.shared.formats import GuidedFields
from quire.api.shared.media_parts import URL_PARTS, ImageDetail, SoftTokens, UrlPart
from quire.api.shared.numbers import Integer
from quire.api.shared.schema import (
    CacheBreakpoint,
    CacheOptions,
    DecodingFields,
    History,
    StreamOptions,
    TextOrList,
    TokenCount,
    UnlessEmpty,
    Wire,
    tag_by_type,
)
from quire.api.shared.thinking import Effort
from quire.serving.messages import JsonObject


class TextPart(History):
    """Text of an input, of an answer, or of reasoning."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(History):
    """A refusal in place of the assistant's answer; read as text."""

    type: Literal["refusal"]
    refusal: str


class SealedPart(History):
    """A message between agents. OpenAI encrypts it; Quire reads plain text."""

    type: Literal["encrypted_content"]
    encrypted_content: str


class ImagePart(History):
    """An image: http(s), `data:` or `file://`."""

    type: Literal["input_image"]
    file_id: None = None  # first, so that what refers to a file is told of that
    image_url: str = Field(min_length=1)
    detail: ImageDetail | None = None
    max_soft_tokens: SoftTokens | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class FilePart(History):
    """A document."""

    type: Literal["input_file"]
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Part = Annotated[
    Annotated[TextPart, Tag("@input_text")]
    | Annotated[TextPart, Tag("@output_text")]
    | Annotated[TextPart, Tag("@text")]
    | Annotated[RefusalPart, Tag("@refusal")]
    | Annotated[SealedPart, Tag("@encrypted_content")]
    | Annotated[ImagePart, Tag("@input_image")]
    | Annotated[AudioPart, Tag("@input_audio")]
    | Annotated[UrlPart, URL_PARTS, Tag(URL_PARTS.tag)]
    | Annotated[FilePart, Tag("@input_file")],
    Discriminator(URL_PARTS.tag_of),
]
Content = TextOrList[Part]


class MessageItem(History):
    """A message of any role. `phase` and `status` are fields of earlier answers, sent back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class AgentMessageItem(History):
    """A task or a result that one of a client's agents sends to another; read as the user's."""

    type: Literal["agent_message"]
    content: Content | None = None
    id: str | None = None


class FunctionCallItem(History):
    """A function that the assistant called; `arguments` is JSON text, or its object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | JsonObject | None = None
    id: str | None = None
    namespace: str | None = None
    caller: Caller | None = None
    status: Status | None = None
    async_: Literal[False] | None = Field(default=None, alias="async")


class CustomCallItem(History):
    """A custom tool that the assistant called with a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    namespace: str | None = None
    caller: Caller | None = None
    status: Status | None = None
    async_: Literal[False] | None = Field(default=None, alias="async")


class CallOutputItem(History):
    """The output of a tool call. Without a `call_id`, it is the only open call's."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: Content
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Caller | None = None
    status: Status | None = None


class SearchCallItem(History):
    """A search for tools that the assistant asked the client for.

    Without a `call_id` it is one that OpenAI's servers made: the model does not see it.
    """

    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: JsonObject
    execution: Literal["client", "server"] | None = None
    id: str | None = None
    status: Status | None = None


class ReasoningItem(History):
    """Earlier reasoning: readable, summarised, or packed and signed."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ReferenceItem(History):
    """An item of an earlier answer that is stored here."""

    type: Literal["item_reference"] | None = None
    id: str


class FunctionTool(History):
    """A function that the client runs.

    The model sees a tool with `defer_loading` only after a `tool_search_output` holds it. Of the
    callers, only the model (`direct`) has an effect.
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: JsonObject | None = None
    async_: Literal[False] | None = Field(default=None, alias="async")


class CustomFormat(History):
    """The format of a custom tool's text; see `ToolboxBuilder.add_custom`."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(History):
    """A tool that takes a text instead of arguments."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    async_: Literal[False] | None = Field(default=None, alias="async")


class NamespaceTool(History):
    """Tools that belong together, called by their namespace and their name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("@function")] | Annotated[CustomTool, Tag("@custom")],
            Discriminator(tag_by_type),
        ]
    ] = Field(max_length=1024)


class SearchTool(History):
    """A search for further tools, which the client runs."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: JsonObject | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("@function")]
    | Annotated[CustomTool, Tag("@custom")]
    | Annotated[NamespaceTool, Tag("@namespace")]
    | Annotated[SearchTool, Tag("@tool_search")]
    | Annotated[ClientRunTool, Tag("@local_shell")]
    | Annotated[ClientRunTool, Tag("@shell")]
    | Annotated[ClientRunTool, Tag("@apply_patch")]
    | Annotated[HostedTool, Tag("@hosted")],
    Discriminator(tag_tool),
]


class AdditionalToolsItem(History):
    """An item with tools in addition to those of the request."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: list[Tool] = Field(max_length=1024)
    id: str | None = None


class SearchOutputItem(History):
    """The tools that a search found; the model sees them from then on."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    tools: list[Tool] = Field(max_length=1024)
    execution: Literal["client", "server"] | None = None
    id: str | None = None
    status: Status | None = None


def _tag_item(value: object) -> str | None:
    """Return the union tag of an item. Messages and references may lack a type."""
    tag = tag_hosted_item(tag_by_type(value))
    if tag is not None or not isinstance(value, dict):
        return tag
    return "@message" if "role" in value or set(value) - {"id", "type"} else "@item_reference"


Item = Annotated[
    Annotated[MessageItem, Tag("@message")]
    | Annotated[AgentMessageItem, Tag("@agent_message")]
    | Annotated[ConfigurationUpdateItem, Tag("@configuration_update")]
    | Annotated[FunctionCallItem, Tag("@function_call")]
    | Annotated[CallOutputItem, Tag("@function_call_output")]
    | Annotated[CustomCallItem, Tag("@custom_tool_call")]
    | Annotated[CallOutputItem, Tag("@custom_tool_call_output")]
    | Annotated[SearchCallItem, Tag("@tool_search_call")]
    | Annotated[SearchOutputItem, Tag("@tool_search_output")]
    | Annotated[AdditionalToolsItem, Tag("@additional_tools")]
    | Annotated[ReasoningItem, Tag("@reasoning")]
    | Annotated[CompactionItem, Tag("@compaction")]
    | Annotated[CompactionItem, Tag("@context_compaction")]
    | Annotated[OwnCallItem, Tag("@local_shell_call")]
    | Annotated[OwnCallItem, Tag("@shell_call")]
    | Annotated[OwnCallItem, Tag("@apply_patch_call")]
    | Annotated[OwnOutputItem, Tag("@local_shell_call_output")]
    | Annotated[OwnOutputItem, Tag("@shell_call_output")]
    | Annotated[OwnOutputItem, Tag("@apply_patch_call_output")]
    | Annotated[McpCallItem, Tag("@mcp_call")]
    | Annotated[McpListItem, Tag("@mcp_list_tools")]
    | Annotated[ApprovalRequestItem, Tag("@mcp_approval_request")]
    | Annotated[ApprovalResponseItem, Tag("@mcp_approval_response")]
    | Annotated[HostedCallItem, Tag("@hosted")]
    | Annotated[ReferenceItem, Tag("@item_reference")],
    Discriminator(_tag_item),
]


Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""The first two are honoured; the others add to items that no answer here holds."""


class PromptFields(Wire):
    """Fields that shape the prompt."""

    model: str | None = None
    input: TextOrList[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = Field(default=None, max_length=1024)
    tool_choice: RequestedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Annotated[Effort | None, UnlessEmpty] = Field(
        default=None, description="the same as reasoning.effort, under the name of chat completions"
    )
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="variables of the model's chat template, as in chat completions"
    )
    truncation: Literal["auto", "disabled"] | None = None

    conversation: ConversationName | None = Field(
        default=None,
        description="a conversation of /v1/conversations, or its id: its items are put before "
        "the input, and this request's items and the answer are appended to it",
    )

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the request continues."""
        named = self.conversation
        return named.id if isinstance(named, ConversationParam) else named

    def effort(self) -> tuple[Effort | None, str]:
        """The requested reasoning effort, and the field that set it."""
        if self.reasoning is not None and self.reasoning.effort is not None:
            return self.reasoning.effort, "reasoning.effort"
        return self.reasoning_effort, "reasoning_effort"


class CountRequest(PromptFields):
    """The body of a request that counts the tokens of a prompt."""

    personality: str | None = Field(default=None, max_length=64, description="no effect")


class ServiceFields(Wire):
    """Fields that tell OpenAI's servers how to serve a request."""

    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = None
    image: None = None


class CompactRequest(PromptFields, ServiceFields):
    """A conversation that becomes shorter."""


class ResponsesRequest(PromptFields, ServiceFields, DecodingFields, GuidedFields):
    """The body. Each of OpenAI's fields has an effect, is refused, or cannot change an answer."""

    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    include: list[Include] | None = None
    return_tokens_as_token_ids: bool | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=16)

    background: bool | None = Field(
        default=None, description="generate even if the client disconnects; needs store"
    )
    background_options: None = None
    messages: None = Field(default=None, description="send input")
    response_format: None = Field(default=None, description="use text.format")
    prompt: None = Field(default=None, description="use instructions and input")
    context_management: list[dict[str, object]] | None = Field(
        default=None, description="no effect"
    )
    moderation: None = None

    max_tool_calls: Integer | None = Field(default=None, ge=0, lt=2**31)
    access_programs: dict[str, object] | None = None
    client_metadata: JsonObject | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key
