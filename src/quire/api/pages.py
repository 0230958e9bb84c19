"""Refuses requests that web pages, which a user of this machine visits, may have caused.

A browser sends a page's requests to any address, this machine's included. Three checks, none of
which a page can pass unless the operator has named its origin:

* `Host` has to name this server. A page whose own name was made to resolve to this machine (DNS
  rebinding) is of the same origin as what it asks, but it cannot change the name that it asks for.
* `Origin`, which browsers send with what a page posts, has to be this server's or one that is
  named.
* A body has to be `application/json`, which a page of another origin cannot send unasked: its
  browser asks first, and CORS answers for the origins that are named. Routes that take files take
  forms. Ollama reads any type as JSON, and its clients leave the header out: on its routes it may
  be missing where nothing says that a browser sent the request.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.listening import is_loopback
from quire.api.shared.errors import error_response, failure_of, speaks_ollama
from quire.api.shared.headers import headers_of
from quire.core.config import ServerConfig
from quire.core.errors import Forbidden, RequestError, UnsupportedMediaType

ANY = "*"
FORMS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})
"""Routes whose bodies may be forms."""
_HOST = re.compile(r"[\w.:\[\]-]+")
_KEPT_NAMES = 16
"""Names of hosts that were read last; a client sends the same one again and again."""


def host_names(config: ServerConfig) -> frozenset[str]:
    """Return the names by which clients may reach this server, besides addresses."""
    names = {"localhost", config.host, *config.allowed_hosts}
    if not is_loopback(config.host):
        own = socket.gethostname()
        names |= {own, f"{own}.local"}
    return frozenset(name.lower() for name in names if name)


def named_origins(config: ServerConfig) -> tuple[str, ...]:
    """Return the origins of pages that may call this server, as browsers send them."""
    return tuple(origin.lower().removesuffix("/") for origin in config.cors_origins)


class PageGuard:
    """Middleware that refuses what may come from a web page.

    Args:
        hosts: allowed names in `Host`; `*` allows any. Addresses always pass, because no page can
            make a browser send an address under another name.
        origins: origins of pages that may send requests, in lower case; `*` allows any.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                await error_response(scope, failure_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise `RequestError` for requests that may come from a web page."""
        method, version, path = scope["method"], scope.get("http_version", "1.0"), scope["path"]
        headers = headers_of(scope)
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1:
            raise RequestError("The request has more than one Host header.", code="invalid_host")
        if not hosts and version == "1.1":  # RFC 9112, 3.2; no browser leaves it out
            raise RequestError("The request has no Host header.", code="invalid_host")
        host = hosts[0].lower() if hosts else ""
        if hosts and not self._is_ours(host):
            raise Forbidden(
                f"The host name '{_shown(host)}' is not allowed. To allow it, start the server "
                f"with --allowed-host {_shown(_name_of(host))}.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._may_ask(origin.lower(), host):
            raise Forbidden(
                f"Pages from '{_shown(origin)}' may not call this server. To allow them, "
                f"start it with --cors-origin {_shown(origin)}.",
                code="origin_not_allowed",
            )
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if path in FORMS:
            return  # `Origin` has said which page posts it
        if speaks_ollama(path) and not _of_a_browser(headers):
            return
        if method != "OPTIONS" and has_body and not _is_json(headers.get("content-type", "")):
            raise UnsupportedMediaType(
                "The body must be JSON, with the header Content-Type: application/json.",
                code="unsupported_media_type",
            )

    def _is_ours(self, host: str) -> bool:
        name = _name_of(host)
        if not name:
            return False  # whatever it is, it is no name
        return ANY in self._hosts or name in self._hosts or _is_address(name)

    def _may_ask(self, origin: str, host: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and authority == host


@lru_cache(maxsize=_KEPT_NAMES)
def _name_of(host: str) -> str:
    """Return a `Host` header's name without port, brackets and final dot; empty if it is
    malformed.
    """
    if not _HOST.fullmatch(host):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _of_a_browser(headers: Mapping[str, str]) -> bool:
    """Return whether a browser sent a request with a body: it says from which page."""
    return "origin" in headers or "sec-fetch-site" in headers


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _shown(text: str) -> str:
    """Return a header's text, shortened for an error message."""
    return text[:100]
