"""API keys, and the caller of a request."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.shared.errors import error_response, failure_of
from quire.core.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ping"})
METRICS_PATH = "/metrics"
EVERYONE = ""
"""The caller's name where there are not several API keys."""

_CALLER = "quire.caller"


def caller_of(scope: Scope) -> str:
    """Return the caller's name: a digest of its API key, the same after a restart.

    It is `EVERYONE` if there is at most one key, on open paths, and for the metrics key.
    """
    caller: str = scope.get(_CALLER, EVERYONE)
    return caller


def callers(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the caller name of each key: a digest, because it appears where keys must not."""
    if len(set(keys)) < 2:
        return (EVERYONE,) * len(keys)
    return tuple(hashlib.sha256(b"quire caller " + key.encode()).hexdigest()[:32] for key in keys)


def as_caller(app: ASGIApp, caller: str) -> ASGIApp:
    """Return an application whose requests come from a caller, for the server's own requests.

    `ApiKeys` lets them pass.
    """

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, _CALLER: caller}, receive, send)

    return asked


class ApiKeys:
    """Middleware that lets only requests with a known key pass, on every path but `OPEN_PATHS`.

    The key comes as `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic).

    Args:
        metrics_key: key for `/metrics` alone, which then shows all callers' metrics.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], metrics_key: str | None = None) -> None:
        self._app = app
        pairs = zip(keys, callers(keys), strict=True)
        self._callers = {key.encode(): caller for key, caller in pairs}
        self._metrics_key = None if metrics_key is None else metrics_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or _CALLER in scope:
            await self._app(scope, receive, send)
            return
        caller = self._caller(Request(scope))
        if caller is not None:
            scope[_CALLER] = caller
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.",
            code="invalid_api_key",
        )
        headers = {"www-authenticate": "Bearer"}
        await error_response(scope, failure_of(error), headers)(scope, receive, send)

    def _caller(self, request: Request) -> str | None:
        """Return the caller of a request; None if its key is unknown.

        It compares with every key, so that the time reveals nothing.
        """
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        # Header values are bytes, which Starlette shows as latin-1.
        known = dict(self._callers)
        if self._metrics_key is not None and request.scope["path"] == METRICS_PATH:
            known[self._metrics_key] = EVERYONE
        matches = [
            caller
            for value in given
            for key, caller in known.items()
            if hmac.compare_digest(value.encode("latin-1"), key)
        ]
        return matches[0] if matches else None
