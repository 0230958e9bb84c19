"""The table of routes. The application and `/openapi.json` are built from it."""

from __future__ import annotations

from quire.api.adapters.endpoint import LoadAdapter, UnloadAdapter
from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.embeddings.endpoint import EmbeddingRequest
from quire.api.file_routes import FILES
from quire.api.infill.endpoint import InfillRequest
from quire.api.mcp.endpoint import McpCall
from quire.api.messages.schema import CountRequest, MessagesRequest
from quire.api.ollama.schema import ChatRequest as OllamaChatRequest
from quire.api.ollama.schema import EmbedRequest, GenerateRequest, ShowRequest
from quire.api.operations import EVENTS, JSON, LINES, TEXT, Operation
from quire.api.rerank.endpoint import RerankRequest, ScoreRequest
from quire.api.responses.listing import ItemsQuery
from quire.api.responses.schema import CompactRequest, ResponsesRequest
from quire.api.responses.schema import CountRequest as ResponsesCountRequest
from quire.api.shared.kept_streams import StreamQuery
from quire.api.stored_routes import STORED
from quire.api.utilities import DetokenizeRequest, ModelRequest, TemplateRequest, TokenizeRequest

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
        lambda e: e.infill.create,
        "post",
        "/infill",
        summary="Fills a gap in a text, at llama.cpp's path",
        body=InfillRequest,
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
        summary="The user's messages of a conversation, and a summary of it",
        body=CompactRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.responses.retrieve,
        "get",
        "/v1/responses/{id}",
        summary="A response that is kept",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.cancel,
        "post",
        "/v1/responses/{id}/cancel",
        summary="Stops a response in the background",
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
        lambda e: e.utilities.apply_template,
        "post",
        "/apply-template",
        summary="Messages to the prompt that a model reads, as text",
        body=TemplateRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.version, "get", path="/version", summary="The version of this server"
    ),
    Operation(
        lambda e: e.utilities.ping,
        "get",
        path="/ping",
        summary="Whether the engine can go on, without a body",
        answers=(TEXT,),
        open=True,
        statuses=(503,),
    ),
    Operation(
        lambda e: e.utilities.props,
        "get",
        path="/props",
        summary="What a model is, at llama.cpp's path",
        statuses=(404,),
    ),
    Operation(lambda e: e.utilities.slots, "get", "/slots", summary="Not offered", listed=False),
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
        path="/v1/embeddings",
        summary="Texts to vectors",
        body=EmbeddingRequest,
        statuses=_GENERATING,
    ),
    *(
        Operation(
            lambda e: e.rerank.rerank,
            "post",
            path=path,
            summary="Documents by how well they answer a query",
            body=RerankRequest,
            statuses=_GENERATING,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Operation(
        lambda e: e.rerank.score,
        "post",
        path="/v1/score",
        summary="How well texts fit each other",
        body=ScoreRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.chat,
        "post",
        path="/api/chat",
        summary="Answers a conversation, as Ollama's API does",
        body=OllamaChatRequest,
        answers=(JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.generate,
        "post",
        path="/api/generate",
        summary="Answers a prompt, as Ollama's API does",
        body=GenerateRequest,
        answers=(JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.embed,
        "post",
        path="/api/embed",
        summary="Texts to vectors, as Ollama's API does",
        body=EmbedRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.tags, "get", path="/api/tags", summary="The models that are served"
    ),
    Operation(
        lambda e: e.ollama.running, "get", path="/api/ps", summary="The models that are loaded"
    ),
    Operation(
        lambda e: e.ollama.show,
        "post",
        path="/api/show",
        summary="What a model is and can do",
        body=ShowRequest,
        statuses=(404, 429),
    ),
    Operation(
        lambda e: e.ollama.version,
        "get",
        path="/api/version",
        summary="The version of Ollama's API",
    ),
    Operation(
        lambda e: e.mcp.tools, "get", path="/mcp/tools", summary="The tools of the MCP servers"
    ),
    Operation(
        lambda e: e.mcp.call,
        "post",
        path="/mcp/call",
        summary="Calls a tool of an MCP server",
        body=McpCall,
        statuses=(404, 429, 502),
    ),
    Operation(
        lambda e: e.transcriptions.create,
        "post",
        path="/v1/audio/transcriptions",
        summary="Speech to text, sent as a form with file",
        answers=(JSON, TEXT),
        statuses=(404, 408, 413, 415, 429, 501, 503),
        form=True,
    ),
    Operation(
        lambda e: e.transcriptions.translate,
        "post",
        "/v1/audio/translations",
        "Speech to English text, sent as a form with file",
        answers=(JSON, TEXT),
        statuses=(404, 408, 413, 415, 429, 501, 503),
        form=True,
    ),
    Operation(
        lambda e: e.adapters.load,
        "post",
        path="/v1/load_lora_adapter",
        summary="Loads a LoRA adapter that requests may name then",
        body=LoadAdapter,
        statuses=(404, 429, 501, 503),
    ),
    Operation(
        lambda e: e.adapters.unload,
        "post",
        path="/v1/unload_lora_adapter",
        summary="Forgets a LoRA adapter",
        body=UnloadAdapter,
        statuses=(404, 429, 501, 503),
    ),
    *STORED,
    *FILES,
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
        answers=(TEXT,),
        statuses=(503,),
    ),
    Operation(lambda e: e.document, "get", "/openapi.json", summary="This document"),
)
