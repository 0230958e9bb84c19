"""The table of routes and endpoints. The application and `/openapi.json` are built from it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from quire.api.chat.endpoint import Chat, ChatRequest
from quire.api.completions.endpoint import CompletionRequest, Completions
from quire.api.embeddings.endpoint import EmbeddingRequest, Embeddings
from quire.api.mcp.endpoint import Mcp, McpCall
from quire.api.messages.endpoint import Messages
from quire.api.messages.schema import CountRequest, MessagesRequest
from quire.api.ollama.endpoint import Ollama
from quire.api.ollama.schema import ChatRequest as OllamaChatRequest
from quire.api.ollama.schema import EmbedRequest, GenerateRequest, ShowRequest
from quire.api.rerank.endpoint import Rerank, RerankRequest, ScoreRequest
from quire.api.responses.endpoint import Responses
from quire.api.responses.listing import ItemsQuery
from quire.api.responses.schema import CountRequest as ResponsesCountRequest
from quire.api.responses.schema import ResponsesRequest
from quire.api.shared.kept_streams import CallerStreams, StreamQuery
from quire.api.shared.schema import Wire
from quire.api.utilities import DetokenizeRequest, ModelRequest, TokenizeRequest, Utilities

JSON, EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
LINES = "application/x-ndjson"

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints of one server.

    Attributes:
        document: `GET /openapi.json`.
    """

    chat: Chat
    completions: Completions
    messages: Messages
    responses: Responses
    embeddings: Embeddings
    rerank: Rerank
    ollama: Ollama
    utilities: Utilities
    streams: CallerStreams
    mcp: Mcp
    document: Endpoint


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, as OpenAPI calls it.

    Attributes:
        endpoint: which of the endpoints answers.
        path: with starlette's convertors.
        body: the model of the request's body; None if it has none. Requests with a body take a
            slot and hold a model.
        answers: media types of a good answer.
        open: whether it needs no key.
        statuses: of answers that are not good, beside those that every operation may give.
        listed: whether `/openapi.json` has it.
        query: the model of the URL's parameters; None if it has none.
    """

    endpoint: Callable[[Endpoints], Endpoint]
    method: str
    path: str
    summary: str
    body: type[Wire] | None = None
    answers: tuple[str, ...] = (JSON,)
    open: bool = False
    statuses: tuple[int, ...] = ()
    listed: bool = True
    query: type[Wire] | None = None

    @property
    def template(self) -> str:
        """The path without convertors, as OpenAPI has it."""
        return re.sub(r":\w+\}", "}", self.path)


_GENERATING = (404, 408, 429, 501, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        lambda e: e.chat.create,
        "post",
        "/v1/chat/completions",
        summary="Answers a conversation",
        body=ChatRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.completions.create,
        "post",
        "/v1/completions",
        summary="Goes on with a text",
        body=CompletionRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.messages.create,
        "post",
        "/v1/messages",
        summary="Answers a conversation, as Anthropic's API does",
        body=MessagesRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.messages.count_tokens,
        "post",
        "/v1/messages/count_tokens",
        summary="Counts the tokens of a conversation",
        body=CountRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.create,
        "post",
        "/v1/responses",
        summary="Answers a conversation of items, and keeps it",
        body=ResponsesRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.responses.count_tokens,
        "post",
        "/v1/responses/input_tokens",
        summary="Counts the tokens of a conversation of items",
        body=ResponsesCountRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.compaction,
        "post",
        "/v1/responses/compact",
        summary="Not offered",
        listed=False,
    ),
    Operation(
        lambda e: e.responses.retrieve,
        "get",
        "/v1/responses/{id}",
        summary="A response that is kept",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.input_items,
        "get",
        "/v1/responses/{id}/input_items",
        summary="The items that a kept response answers",
        query=ItemsQuery,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.delete,
        "delete",
        "/v1/responses/{id}",
        summary="Forgets a response",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.streams.resume,
        "get",
        "/streams/{id}",
        summary="Takes up a stream that its request named with x-quire-stream",
        answers=(EVENTS,),
        query=StreamQuery,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.streams.stop,
        "delete",
        "/streams/{id}",
        summary="Stops a stream that its request named with x-quire-stream",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.models, "get", "/v1/models", summary="The models that are served"
    ),
    Operation(
        lambda e: e.utilities.model,
        "get",
        "/v1/models/{name:path}",
        summary="A model that is served",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.models,
        "get",
        "/models",
        summary="The models that are served, at llama.cpp's path",
    ),
    Operation(
        lambda e: e.utilities.load,
        "post",
        "/models/load",
        summary="Loads a model ahead of its first request",
        body=ModelRequest,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.utilities.unload,
        "post",
        "/models/unload",
        summary="Unloads a model as soon as nobody uses it",
        body=ModelRequest,
        statuses=(404, 429),
    ),
    Operation(
        lambda e: e.utilities.tokenize,
        "post",
        "/tokenize",
        summary="Text or messages to token ids",
        body=TokenizeRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.detokenize,
        "post",
        "/detokenize",
        summary="Token ids to text",
        body=DetokenizeRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.embeddings.create,
        "post",
        "/v1/embeddings",
        "Texts to vectors",
        EmbeddingRequest,
        statuses=_GENERATING,
    ),
    *(
        Operation(
            lambda e: e.rerank.rerank,
            "post",
            path,
            "Documents by how well they answer a query",
            RerankRequest,
            statuses=_GENERATING,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Operation(
        lambda e: e.rerank.score,
        "post",
        "/v1/score",
        "How well texts fit each other",
        ScoreRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.chat,
        "post",
        "/api/chat",
        "Answers a conversation, as Ollama's API does",
        OllamaChatRequest,
        (JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.generate,
        "post",
        "/api/generate",
        "Answers a prompt, as Ollama's API does",
        GenerateRequest,
        (JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.embed,
        "post",
        "/api/embed",
        "Texts to vectors, as Ollama's API does",
        EmbedRequest,
        statuses=_GENERATING,
    ),
    Operation(lambda e: e.ollama.tags, "get", "/api/tags", "The models that are served"),
    Operation(lambda e: e.ollama.running, "get", "/api/ps", "The models that are loaded"),
    Operation(
        lambda e: e.ollama.show,
        "post",
        "/api/show",
        "What a model is and can do",
        ShowRequest,
        statuses=(404, 429),
    ),
    Operation(lambda e: e.ollama.version, "get", "/api/version", "The version of Ollama's API"),
    Operation(lambda e: e.mcp.tools, "get", "/mcp/tools", "The tools of the MCP servers"),
    Operation(
        lambda e: e.mcp.call,
        "post",
        "/mcp/call",
        "Calls a tool of an MCP server",
        McpCall,
        statuses=(404, 429, 502),
    ),
    Operation(lambda e: e.utilities.root, "get", "/", summary="Who answers here"),
    Operation(
        lambda e: e.utilities.health,
        "get",
        "/health",
        summary="Whether the engine can go on",
        open=True,
        statuses=(503,),
    ),
    Operation(
        lambda e: e.utilities.metrics,
        "get",
        "/metrics",
        summary="Counters for Prometheus",
        answers=(_TEXT,),
        statuses=(503,),
    ),
    Operation(lambda e: e.document, "get", "/openapi.json", summary="This document"),
)
