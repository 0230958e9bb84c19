"""API keys, and the rule that a server which others can reach has one."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.errors import error_response, failure_of
from quire.config import ServerConfig
from quire.errors import AuthenticationError, QuireError

OPEN_PATHS = frozenset({"/health"})


class ApiKeys:
    """Middleware that lets only requests with a known key pass, on every path but `/health`.

    The key comes as `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic).
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(Request(scope)):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "A valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY.",
            code="invalid_api_key",
        )
        headers = {"www-authenticate": "Bearer"}
        await error_response(scope["path"], failure_of(error), headers)(scope, receive, send)

    def _known(self, request: Request) -> bool:
        """Compares with every key, whichever matches first, so that time tells nothing."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(bearer.strip())
        # Header values are bytes, which Starlette shows as latin-1.
        matches = [
            hmac.compare_digest(value.encode("latin-1"), key)
            for value in given
            for key in self._keys
        ]
        return any(matches)


def check_exposure(config: ServerConfig, *, said_twice: bool) -> None:
    """Refuses to serve strangers by accident.

    Args:
        said_twice: the operator asked a second time for an open server without a key.

    Raises:
        QuireError: the host is reachable from other machines and no key is set.
    """
    if config.api_keys or said_twice or is_loopback(config.host):
        return
    raise QuireError(
        f"Binding {config.host} lets other machines in, and no API key is set. "
        "Set --api-key, or say --allow-anyone as well if that is what you want."
    )


def is_loopback(host: str) -> bool:
    """Whether a host to bind can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
