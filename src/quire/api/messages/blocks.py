"""The content blocks of Anthropic's messages."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, create_model

from quire.api.shared.media_parts import Registered, fields_of, literal, media_part
from quire.api.shared.schema import History, TextOrList, tag_by_type
from quire.media.kinds import Option
from quire.serving.messages import JsonObject, SourcePart


class CacheControl(History):
    """A cache breakpoint. It is accepted and has no effect: every prompt is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class ContentBlock(History):
    """Fields that every content block may carry."""

    cache_control: CacheControl | None = None


class TextBlock(ContentBlock):
    """Plain text. Citations come back with earlier answers and are not read."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class Base64Source(History):
    """The source of a file as base64 within the request."""

    type: Literal["base64"]
    media_type: str
    data: str = Field(min_length=1)

    @property
    def location(self) -> str:
        """The file as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(History):
    """The source of a file by URL: http(s), `data:` or `file://`."""

    type: Literal["url"]
    url: str = Field(min_length=1)

    @property
    def location(self) -> str:
        return self.url


class ImageTransformations(History):
    """Preprocessing options of an image. An image that is too large is scaled down."""

    oversized_image: Literal["downsize"] | None = None


class MediaBlock(ContentBlock):
    """A block with a file. Anthropic defines images; blocks of other media kinds look alike."""

    type: str
    source: Base64Source | UrlSource
    transformations: ImageTransformations | None = None

    def to_template(self, param: str) -> SourcePart:
        """Return the block in the form that templates read; `param` is its path in the request."""
        kind, url = BLOCKS.kinds()[self.type], self.source.location
        return media_part(kind, url, f"{param}.source", named=self.type, options=self)


@cache
def _media_block(name: str, media_types: str, options: tuple[Option, ...]) -> type[MediaBlock]:
    title = name.capitalize()
    kind: dict[str, Any] = {"media_type": (Annotated[str, Field(pattern=media_types)], ...)}
    data = create_model(
        f"Base64{title}", __base__=Base64Source, __doc__=Base64Source.__doc__, **kind
    )
    source: Any = Annotated[
        Annotated[data, Tag("@base64")] | Annotated[UrlSource, Tag("@url")],
        Discriminator(tag_by_type),
    ]
    fields: dict[str, Any] = {"type": (literal(name), ...), "source": (source, ...)}
    fields |= fields_of(tuple(each for each in options if each != "detail"))
    return create_model(f"{title}Block", __base__=MediaBlock, __doc__=MediaBlock.__doc__, **fields)


BLOCKS = Registered("block", lambda kind: _media_block(kind.block, kind.media_types, kind.options))
"""The content blocks, by the registry's media kinds."""


class TextSource(History):
    """The source of a document as plain text within the request."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class Base64Document(Base64Source):
    """The source of a document as base64 within the request. PDF is read; other formats are
    accepted in a conversation's history.
    """

    media_type: str = Field(pattern="^application/")

    @property
    def location(self) -> str:
        """The PDF as a `data:` URL; empty for another format."""
        return super().location if self.media_type == "application/pdf" else ""


class ContentSource(History):
    """A document that the client has split: a text, or texts and images."""

    type: Literal["content"]
    content: TextOrList[
        Annotated[
            Annotated[TextBlock, Tag("@text")] | Annotated[MediaBlock, BLOCKS, Tag(BLOCKS.tag)],
            Discriminator(BLOCKS.tag_of),
        ]
    ]


class NoCitations(History):
    """The `citations` field of a document. They are not offered."""

    enabled: Literal[False] | None = None


class DocumentBlock(ContentBlock):
    """A document: text, PDF or content blocks. Other formats are accepted in a conversation's
    history.
    """

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("@text")]
        | Annotated[ContentSource, Tag("@content")]
        | Annotated[Base64Document, Tag("@base64")]
        | Annotated[UrlSource, Tag("@url")],
        Discriminator(tag_by_type),
    ]
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None


class SearchResultBlock(ContentBlock):
    """A passage that the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: NoCitations | None = None


class ToolReferenceBlock(ContentBlock):
    """A tool that a search found. The model sees it from then on; see `Tool.defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(ContentBlock):
    """Earlier reasoning. If its text is empty, it is packed in the signature.

    Servers that sign nothing leave the signature out. Their reasoning cannot be verified here.
    """

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(ContentBlock):
    """Earlier reasoning that was not shown."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(History):
    """The caller of a tool: the model, or code of its that ran at Anthropic."""

    type: str
    tool_id: str | None = None


class ToolUseBlock(ContentBlock):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: JsonObject
    caller: Caller | None = None
    toolset_name: None = None


class McpUseBlock(ContentBlock):
    """A call of an MCP tool that a server made."""

    type: Literal["mcp_tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    server_name: str
    input: JsonObject


class McpResultBlock(ContentBlock):
    """The result of a call of an MCP tool, in the answer that made it."""

    type: Literal["mcp_tool_result"]
    tool_use_id: str
    content: TextOrList[TextBlock] | None = None
    is_error: bool | None = None


class HostedBlock(ContentBlock):
    """A block of a conversation that started at Anthropic: a call or result of a tool that runs
    there, or the mark of a change of models.

    The model does not see it: the following text states what was found. The client is told that it
    had no effect.
    """

    type: str = Field(pattern=r"^[a-z_]+$")


_Given = (
    Annotated[TextBlock, Tag("@text")]
    | Annotated[MediaBlock, BLOCKS, Tag(BLOCKS.tag)]
    | Annotated[DocumentBlock, Tag("@document")]
    | Annotated[SearchResultBlock, Tag("@search_result")]
)
"""Content blocks that a user message or a tool result may hold."""

ResultPart = Annotated[
    _Given | Annotated[ToolReferenceBlock, Tag("@tool_reference")],
    Discriminator(BLOCKS.tag_of),
]


class ToolResultBlock(ContentBlock):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrList[ResultPart] | None = None
    is_error: bool | None = None
    toolset_name: None = None


_HOSTED = frozenset({"@server_tool_use", "@mcp_tool_listing", "@container_upload", "@fallback"})
_OWN_RESULTS = ("@tool_result", "@mcp_tool_result")


def or_hosted(tag: str | None) -> str | None:
    """Return one shared tag for all blocks of hosted tools, and other tags unchanged."""
    result = tag is not None and tag not in _OWN_RESULTS and tag.endswith("_tool_result")
    return "@hosted" if result or tag in _HOSTED else tag


UserBlock = Annotated[
    _Given
    | Annotated[ToolResultBlock, Tag("@tool_result")]
    | Annotated[HostedBlock, Tag("@hosted")],
    Discriminator(lambda value: or_hosted(BLOCKS.tag_of(value))),
]
SystemText = TextOrList[TextBlock]
