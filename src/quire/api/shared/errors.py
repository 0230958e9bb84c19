"""Turns errors into responses in the format of the request's protocol.

The path decides: `/v1/messages` is Anthropic's, `/api/` is Ollama's, all else is OpenAI's.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.shared.not_offered import refusal
from quire.api.shared.notes import note
from quire.core.errors import (
    EngineFailure,
    LoadingStopped,
    NotOffered,
    Overloaded,
    RequestError,
    StorageFailed,
)
from quire.core.request import Failure
from quire.serving.run_failed import RunFailed

log = logging.getLogger("quire.api")

_LONGEST_LOGGED = 300
"""Most characters of an error's message in the log: some contain what the client sent."""
_BASE_URL = (
    "/v1 is the base URL for OpenAI's clients, which add a route, as in /v1/models; "
    "Anthropic's clients add /v1 themselves. Browsers open /."
)

_STOPPED = "loading_stopped"
_RETRY_AFTER_S = 1.0
"""Seconds after which a client should try again that a failed engine did not answer: another is
started, and the request waits for it.
"""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def failure_of(error: Exception) -> Failure:
    """Return the wire fields of an error. Errors other than `QuireError` reveal no details."""
    match error:
        case RequestError():
            return Failure.of(error)
        case RunFailed():
            return error.failure
        case LoadingStopped():
            return Failure(str(error), 503, "server_error", code=_STOPPED)
        case EngineFailure():
            return Failure(str(error), 503, "server_error", code="engine_failure")
        case ClientDisconnect():
            return Failure("The client disconnected before its request was complete.", 499)
        case HTTPException(status_code=404):
            return Failure("There is no such route.", 404, "not_found_error", code="unknown_url")
        case HTTPException(status_code=405):
            what = f"This route takes {(error.headers or {}).get('Allow', 'another method')}."
            return Failure(what, 405, "invalid_request_error", code="method_not_allowed")
        case HTTPException():
            return Failure(error.detail, error.status_code, "invalid_request_error")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            what = "The server's disk is full: delete files, or ask its operator to free space."
            return Failure(what, 507, "server_error", code="disk_full")
        case StorageFailed():
            return Failure(str(error), 507, "server_error", code="storage_failed")
        case _:
            return Failure("The server met an unexpected error.", 500, code="internal_error")


def openai_body(failure: Failure) -> dict[str, object]:
    """Return `{"error": {message, type, param, code}}`."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.type,
            "param": failure.param,
            "code": failure.code,
        }
    }


def anthropic_body(failure: Failure) -> dict[str, object]:
    """Return `{"type": "error", "error": {type, message, details}}`. SDKs act on the error's code.

    Claude Code compacts a conversation only on Anthropic's wording of an overflow.
    """
    message = failure.message
    if failure.overflow is not None:
        tokens, limit = failure.overflow
        message = f"prompt is too long: {tokens} tokens > {limit} maximum"
    other = "api_error" if failure.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(failure.status, other)
    error: dict[str, object] = {"type": kind, "message": message}
    if failure.code is not None:
        error["details"] = {"error_code": failure.code}
    return {"type": "error", "error": error}


def speaks_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def speaks_ollama(path: str) -> bool:
    """Return whether a path belongs to Ollama's protocol, whose errors are a message."""
    return path.startswith("/api/")


def body_for(path: str, failure: Failure) -> dict[str, object]:
    """Return the error's body in the shape of the protocol that `path` belongs to."""
    if speaks_ollama(path):
        return {"error": failure.message}
    return anthropic_body(failure) if speaks_anthropic(path) else openai_body(failure)


def error_response(
    scope: Scope, failure: Failure, headers: dict[str, str] | None = None
) -> Response:
    """Return a whole response for a request that failed before its answer started.

    The log line holds the reason. A header tells SDKs not to retry requests that ran into a
    deadline, whose model's loading was stopped, or that ask for something not offered: a retry
    would only add load. It is set for a full or failed disk, too, and for wrong keys, because
    Claude Code 2.1.330 would silently retry one for three minutes.
    """
    note(scope, {"error": {"type": failure.type, "message": failure.message[:_LONGEST_LOGGED]}})
    headers = dict(headers or {})
    if failure.status in (401, 408, 501, 507) or failure.code == _STOPPED:
        headers["x-should-retry"] = "false"
    elif failure.status == 503:
        headers.setdefault("retry-after", _seconds(_RETRY_AFTER_S))
    content = json.dumps(body_for(scope["path"], failure))
    return Response(content, failure.status, headers, media_type="application/json")


class ErrorMiddleware:
    """Middleware that answers unexpected exceptions, so that the connection survives.

    An error that leaves the application ends its connection, with answers that wait on it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # whatever a bug raises: only this answer ends
            if started or scope["type"] != "http":
                raise
            failure = failure_of(error)
            expected = failure.code != "internal_error"
            where = f"{scope['method']} {scope['path']}"
            log.error("%s: %s", where, error, exc_info=not expected)
            response = error_response(scope, failure)
            await response(scope, receive, send)


def _seconds(retry_after_s: float) -> str:
    """Return the value of a `retry-after` header."""
    return str(max(1, math.ceil(retry_after_s)))


def _unknown_url(request: Request) -> str:
    """Return the message for an unknown URL. Most come from a base URL with a surplus or missing
    `/v1`, or a final slash.
    """
    path = _path(request)
    if path.rstrip("/") == "/v1":
        return _BASE_URL
    other = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    for meant in (path, other):
        scope = {**request.scope, "path": meant}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return f"There is no such route; did you mean {meant}? {_BASE_URL}"
    return "There is no such route; /openapi.json lists all routes."


def _path(request: Request) -> str:
    return re.sub("/{2,}", "/", request.scope["path"])


async def handle(request: Request, error: Exception) -> Response:
    """Handle all exceptions for starlette. Unexpected ones are logged."""
    failure = failure_of(error)
    if failure.code == "unknown_url":
        why = refusal(_path(request))
        if why is None:
            failure = replace(failure, message=_unknown_url(request))
        else:
            failure = Failure(why, NotOffered.status, NotOffered.type, code="not_offered")
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | EngineFailure) and error.retry_after_s is not None:
        headers["retry-after"] = _seconds(error.retry_after_s)
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return error_response(request.scope, failure, headers)
