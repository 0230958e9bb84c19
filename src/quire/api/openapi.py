"""`/openapi.json`, built from the models that validate requests, so that the two cannot
disagree.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import quire
from quire.api.operations import EVENTS, JSON, LINES, Operation
from quire.api.shared.errors import speaks_anthropic, speaks_ollama

_REASONS = {
    400: "The request is invalid; `param` names the field",
    401: "No valid API key; `x-should-retry` tells clients not to send it again",
    403: "The Host or Origin header is not allowed",
    404: "The model, response or item does not exist",
    408: "The request took longer than the operator's time limit; "
    "`x-should-retry` tells SDKs not to send it again",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many requests are in flight; `retry-after` says when to try again",
    500: "The server failed",
    501: "Not offered",
    502: "An MCP server cannot be reached, or does not answer",
    503: "The engine has failed, or the loading of the model was stopped",
    507: "The server's disk is full or failed; `x-should-retry` tells SDKs not to send it again",
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

_OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def document(operations: Sequence[Operation], names: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server with these models."""
    models = [operation.body for operation in operations if operation.body is not None]
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    bodies = {body: reference for (body, _), reference in references.items()}
    for schema in schemas["$defs"].values():
        if "model" in schema.get("properties", {}):
            optional = "model" not in schema.get("required", ())
            schema["properties"]["model"] = {"enum": [*names, None] if optional else [*names]}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _describe(operation)
        if operation.body is not None:
            content = {JSON: {"schema": bodies[operation.body]}}
            described["requestBody"] = {"required": True, "content": content}
        paths.setdefault(operation.template, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": quire.__version__},
        "paths": paths,
        "components": {
            "schemas": {
                **schemas["$defs"],
                "Error": _ERROR,
                "AnthropicError": _ANTHROPIC_ERROR,
                "OllamaError": _OLLAMA_ERROR,
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
    shape = "OllamaError" if speaks_ollama(operation.path) else shape
    error = {"schema": {"$ref": f"#/components/schemas/{shape}"}}
    if operation.open:
        error = {"schema": {"type": "object"}}
    responses: dict[str, Any] = {
        str(status): {"description": _REASONS[status], "content": {JSON: error}}
        for status in sorted(statuses)
    }
    if operation.answers:
        content = {media: _content(media, operation.value) for media in operation.answers}
        responses["200"] = {"description": "The answer", "content": content}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    names = re.findall(r"\{(\w+)\}", operation.template)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.query is not None:
        described.setdefault("parameters", []).extend(
            {"name": name, "in": "query", "schema": schema}
            for name, schema in operation.query.model_json_schema()["properties"].items()
        )
    if operation.open:
        described["security"] = []
    return described


def _content(media: str, value: str) -> dict[str, Any]:
    """Return an answer's schema: of JSON, a `value`.

    OpenAPI 3.1 cannot describe the events of a stream.
    """
    if media in (EVENTS, LINES):
        return {}
    return {"schema": {"type": value if media == JSON else "string"}}


class OpenApi:
    """The endpoint of `/openapi.json`. It builds the document at the first request, in 0.1 s."""

    def __init__(self, operations: Sequence[Operation], names: Sequence[str]) -> None:
        self._operations, self._names = operations, names
        self._document: dict[str, Any] | None = None
        self._one_making = asyncio.Lock()

    async def get(self, request: Request) -> Response:
        """Answer `GET /openapi.json`."""
        async with self._one_making:
            if self._document is None:  # in a thread, for the streams
                making = asyncio.to_thread(document, self._operations, self._names)
                self._document = await making
        return JSONResponse(self._document)
