"""Paths with a slash at their end."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """Outermost middleware: a path with a slash at its end is the one without.

    Starlette would redirect to an absolute URL. It names `http` behind a proxy that ends TLS, and
    many clients follow it without the body or the key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
