"""Paths with a trailing slash."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """Outermost middleware: a path with a trailing slash is treated as the one without.

    Starlette would redirect to an absolute URL. Behind a proxy that ends TLS that URL says `http`,
    and many clients follow it without body or key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
