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
from quire.api.ollama.schema import (
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    ShowRequest,
)
from quire.api.operations import EVENTS, JSON, LINES, TEXT, Operation
from quire.api.rerank.endpoint import RerankRequest, ScoreRequest
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
        summary="Create a chat completion",
        body=ChatRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.completions.create,
        "post",
        "/v1/completions",
        summary="Create a text completion",
        body=CompletionRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.infill.create,
        "post",
        "/infill",
        summary="Fill a gap in a text, as llama.cpp's /infill does",
        body=InfillRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.messages.create,
        "post",
        "/v1/messages",
        summary="Create a message, as Anthropic's API does",
        body=MessagesRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.messages.count_tokens,
        "post",
        "/v1/messages/count_tokens",
        summary="Count the input tokens of a message",
        body=CountRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.create,
        "post",
        "/v1/responses",
        summary="Create a response, which is stored",
        body=ResponsesRequest,
        answers=(JSON, EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.responses.count_tokens,
        "post",
        "/v1/responses/input_tokens",
        summary="Count the input tokens of a response",
        body=ResponsesCountRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.responses.compaction,
        "post",
        "/v1/responses/compact",
        summary="Compact a conversation: return its user messages and a summary",
        body=CompactRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.streams.resume,
        "get",
        "/streams/{id}",
        summary="Resume a stream that its request named with x-quire-stream",
        answers=(EVENTS,),
        query=StreamQuery,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.streams.stop,
        "delete",
        "/streams/{id}",
        summary="Stop a stream that its request named with x-quire-stream",
        statuses=(404,),
    ),
    Operation(lambda e: e.utilities.models, "get", "/v1/models", summary="List the served models"),
    Operation(
        lambda e: e.utilities.model,
        "get",
        "/v1/models/{name:path}",
        summary="Retrieve a served model",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.models,
        "get",
        "/models",
        summary="List the served models, at llama.cpp's path",
    ),
    Operation(
        lambda e: e.utilities.load,
        "post",
        "/models/load",
        summary="Load a model before its first request",
        body=ModelRequest,
        statuses=(404, 429, 503),
    ),
    Operation(
        lambda e: e.utilities.unload,
        "post",
        "/models/unload",
        summary="Unload a model once no request uses it",
        body=ModelRequest,
        statuses=(404, 429),
    ),
    Operation(
        lambda e: e.utilities.tokenize,
        "post",
        "/tokenize",
        summary="Tokenize a text or messages",
        body=TokenizeRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.apply_template,
        "post",
        "/apply-template",
        summary="Render messages to the text of a prompt",
        body=TemplateRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.version, "get", path="/version", summary="Return the server's version"
    ),
    Operation(
        lambda e: e.utilities.ping,
        "get",
        path="/ping",
        summary="Check that the engine is running; no body",
        answers=(TEXT,),
        open=True,
        statuses=(503,),
    ),
    Operation(
        lambda e: e.utilities.props,
        "get",
        path="/props",
        summary="Describe a model, at llama.cpp's path",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.slots,
        "get",
        path="/slots",
        summary="List a model's running streams, at llama.cpp's path",
        value="array",
        statuses=(404,),
    ),
    Operation(
        lambda e: e.utilities.detokenize,
        "post",
        "/detokenize",
        summary="Detokenize token ids",
        body=DetokenizeRequest,
        statuses=(404,),
    ),
    Operation(
        lambda e: e.embeddings.create,
        "post",
        path="/v1/embeddings",
        summary="Create embeddings",
        body=EmbeddingRequest,
        statuses=_GENERATING,
    ),
    *(
        Operation(
            lambda e: e.rerank.rerank,
            "post",
            path=path,
            summary="Rank documents by their relevance to a query",
            body=RerankRequest,
            statuses=_GENERATING,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Operation(
        lambda e: e.rerank.score,
        "post",
        path="/v1/score",
        summary="Score pairs of texts",
        body=ScoreRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.chat,
        "post",
        path="/api/chat",
        summary="Create a chat answer, as Ollama's API does",
        body=OllamaChatRequest,
        answers=(JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.generate,
        "post",
        path="/api/generate",
        summary="Create a completion, as Ollama's API does",
        body=GenerateRequest,
        answers=(JSON, LINES),
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.embed,
        "post",
        path="/api/embed",
        summary="Create embeddings, as Ollama's API does",
        body=EmbedRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.embeddings,
        "post",
        path="/api/embeddings",
        summary="Create the embedding of one text, as Ollama's former API did",
        body=EmbeddingsRequest,
        statuses=_GENERATING,
    ),
    Operation(
        lambda e: e.ollama.pull,
        "post",
        path="/api/pull",
        summary="Load a served model, and download its files if they are not here",
        body=PullRequest,
        answers=(JSON, LINES),
        statuses=(404, 429, 503),
    ),
    Operation(lambda e: e.ollama.tags, "get", path="/api/tags", summary="List the served models"),
    Operation(lambda e: e.ollama.running, "get", path="/api/ps", summary="List the loaded models"),
    Operation(
        lambda e: e.ollama.show,
        "post",
        path="/api/show",
        summary="Describe a model and its capabilities",
        body=ShowRequest,
        statuses=(404, 429),
    ),
    Operation(
        lambda e: e.ollama.version,
        "get",
        path="/api/version",
        summary="Return the version of Ollama's API",
    ),
    Operation(
        lambda e: e.mcp.tools, "get", path="/mcp/tools", summary="List the tools of the MCP servers"
    ),
    Operation(
        lambda e: e.mcp.call,
        "post",
        path="/mcp/call",
        summary="Call a tool of an MCP server",
        body=McpCall,
        statuses=(404, 429, 502),
    ),
    Operation(
        lambda e: e.transcriptions.create,
        "post",
        path="/v1/audio/transcriptions",
        summary="Transcribe speech, sent as a form with file",
        answers=(JSON, TEXT),
        statuses=(404, 408, 413, 415, 429, 501, 503),
        form=True,
    ),
    Operation(
        lambda e: e.transcriptions.translate,
        "post",
        "/v1/audio/translations",
        summary="Translate speech to English text, sent as a form with file",
        answers=(JSON, TEXT),
        statuses=(404, 408, 413, 415, 429, 501, 503),
        form=True,
    ),
    Operation(
        lambda e: e.adapters.load,
        "post",
        path="/v1/load_lora_adapter",
        summary="Load a LoRA adapter, which requests may then name",
        body=LoadAdapter,
        statuses=(404, 429, 501, 503),
    ),
    Operation(
        lambda e: e.adapters.unload,
        "post",
        path="/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter",
        body=UnloadAdapter,
        statuses=(404, 429, 501, 503),
    ),
    *STORED,
    *FILES,
    Operation(
        lambda e: e.utilities.root, "get", "/", summary="Return the server's name and version"
    ),
    Operation(
        lambda e: e.utilities.health,
        "get",
        "/health",
        summary="Check that the engine is running",
        open=True,
        statuses=(503,),
    ),
    Operation(
        lambda e: e.utilities.metrics,
        "get",
        "/metrics",
        summary="Return metrics for Prometheus",
        answers=(TEXT,),
        statuses=(503,),
    ),
    Operation(lambda e: e.document, "get", "/openapi.json", summary="This document"),
)
