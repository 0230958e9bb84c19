"""`/openapi.json`, built from the models that validate the requests, so that it cannot disagree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.messages.schema import CountRequest, MessagesRequest
from quire.api.operation import DetokenizeRequest, ModelRequest, TokenizeRequest
from quire.api.responses.schema import ResponsesRequest
from quire.api.shared.errors import speaks_anthropic
from quire.api.shared.schema import Wire

_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        body: the model of the request's body; None if it has none.
        answers: media types of a good answer.
        open: whether it needs no key.
        statuses: of answers that are not good, beside those that every operation may give.
    """

    method: str
    path: str
    summary: str
    body: type[Wire] | None = None
    answers: tuple[str, ...] = (_JSON,)
    open: bool = False
    statuses: tuple[int, ...] = ()


_GENERATING = (404, 408, 429, 501, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answers a conversation",
        ChatRequest,
        (_JSON, _EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Goes on with a text",
        CompletionRequest,
        (_JSON, _EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answers a conversation, as Anthropic's API does",
        MessagesRequest,
        (_JSON, _EVENTS),
        statuses=_GENERATING,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation",
        CountRequest,
        statuses=(404,),
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answers a conversation of items, and keeps it",
        ResponsesRequest,
        (_JSON, _EVENTS),
        statuses=_GENERATING,
    ),
    Operation("get", "/v1/responses/{id}", "A response that is kept", statuses=(404,)),
    Operation("delete", "/v1/responses/{id}", "Forgets a response", statuses=(404,)),
    Operation("get", "/v1/models", "The models that are served"),
    Operation("get", "/v1/models/{name}", "A model that is served", statuses=(404,)),
    Operation(
        "post",
        "/models/load",
        "Loads a model ahead of its first request",
        ModelRequest,
        statuses=(404, 429, 503),
    ),
    Operation(
        "post",
        "/models/unload",
        "Unloads a model as soon as nobody uses it",
        ModelRequest,
        statuses=(404, 429),
    ),
    Operation(
        "post", "/tokenize", "Text or messages to token ids", TokenizeRequest, statuses=(404,)
    ),
    Operation("post", "/detokenize", "Token ids to text", DetokenizeRequest, statuses=(404,)),
    Operation("get", "/", "Who answers here"),
    Operation("get", "/health", "Whether the engine can go on", open=True, statuses=(503,)),
    Operation("get", "/metrics", "Counters for Prometheus", answers=(_TEXT,), statuses=(503,)),
    Operation("get", "/openapi.json", "This document"),
)

_REASONS = {
    400: "The request cannot be served as it is; `param` names the field at fault",
    401: "No valid API key",
    403: "The Host or Origin header is none that this server is to answer",
    404: "There is no such model, response or item",
    408: "The request was not finished within the time that the operator allows; "
    "`x-should-retry` tells SDKs not to send it again",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many requests are in flight; `retry-after` says when to try again",
    500: "The server failed",
    501: "Not offered",
    503: "The engine cannot go on, or the loading of the model was stopped",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def document(names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server whose models have these names."""
    models = [operation.body for operation in OPERATIONS if operation.body is not None]
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    bodies = {body: reference for (body, _), reference in references.items()}
    for schema in schemas["$defs"].values():
        if "model" in schema.get("properties", {}):
            optional = "model" not in schema.get("required", ())
            schema["properties"]["model"] = {"enum": [*names, None] if optional else [*names]}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
        if operation.body is not None:
            content = {_JSON: {"schema": bodies[operation.body]}}
            paths[operation.path][operation.method]["requestBody"] = {
                "required": True,
                "content": content,
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": quire.__version__},
        "paths": paths,
        "components": {
            "schemas": {
                **schemas["$defs"],
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _describe(operation: Operation) -> dict[str, Any]:
    statuses = {*operation.statuses, 400, 403, 500}
    if operation.body is not None:
        statuses |= {413, 415}
    if not operation.open:
        statuses.add(401)
    shape = "AnthropicError" if speaks_anthropic(operation.path) else "Error"
    error = {"schema": {"$ref": f"#/components/schemas/{shape}"}}
    if operation.open:
        error = {"schema": {"type": "object"}}
    responses: dict[str, Any] = {
        str(status): {"description": _REASONS[status], "content": {_JSON: error}}
        for status in sorted(statuses)
    }
    if operation.answers:
        content = {media: _content(media) for media in operation.answers}
        responses["200"] = {"description": "The answer", "content": content}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = re.findall(r"\{(\w+)\}", operation.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.open:
        described["security"] = []
    return described


def _content(media: str) -> dict[str, Any]:
    """An answer's schema; OpenAPI 3.1 has no words for the events of a stream."""
    if media == _EVENTS:
        return {}
    return {"schema": {"type": "object" if media == _JSON else "string"}}


class OpenApi:
    """The endpoint."""

    def __init__(self, names: Sequence[str]) -> None:
        self._document = document(names)

    async def get(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return JSONResponse(self._document)
