"""Serves the page's files without an API key. They contain no secrets, and the page asks for the
key.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
_DOCUMENTS = {"/": "index.html", "/docs": "docs.html"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data:",
        "font-src 'self'",
        "manifest-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Content Security Policy of the page: scripts and styles come only from its own files, and text
becomes markup only through DOMPurify (trusted types).
"""

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again by its tag
    "vary": "accept",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        body = path.read_bytes()
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        return cls(body, _TYPES[path.suffix], tag)

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


class PageFiles:
    """Middleware that serves the page: `/` to clients that accept HTML, `/docs`, `/page/...`.

    All other requests pass on.
    """

    ROUTES = tuple(
        Route(path, lambda request: Response(), name=path)
        for path in ("/docs", "/page/{file:path}")
    )
    """Routes of the page, by which the access log and metrics name its paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = {
            path.relative_to(_FOLDER).as_posix(): _File.read(path)
            for path in sorted(_FOLDER.rglob("*"))
            if path.suffix in _TYPES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        file = self._asked_for(Request(scope)) if read else None
        if file is None:
            await self._app(scope, receive, send)
        else:
            await file.response(Request(scope))(scope, receive, send)

    def _asked_for(self, request: Request) -> _File | None:
        """Return the file that a request asks for; None if the page has none."""
        path = request.scope["path"]  # never from the URL, which a Host header may bend
        if path == "/" and "text/html" not in request.headers.get("accept", ""):
            return None
        found = re.fullmatch(r"/page/([\w./-]+)", path)
        return self._files.get(found[1] if found else _DOCUMENTS.get(path, ""))
