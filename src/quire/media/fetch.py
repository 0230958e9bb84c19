"""Fetches the media that a request names, without exposing the operator's network or disk.

`data:` URLs always work. http(s) works where the operator allows it, and only to public addresses:
a name is resolved once, every address it has is checked, and the connection goes to the address
that was checked, at each redirect anew. `file://` works below the folders that the operator names.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import httpcore

from quire.media.addresses import IPAddress, is_public
from quire.media.source import refusal

_NO_BLANKS = dict.fromkeys(map(ord, " \t\n\f\r"))
_ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
_BYTES = {b"%%%02X" % value: bytes([value]) for value in range(256)}
_LONGEST_PATH = 4096  # of Linux; no system here has a longer one
_NO_HOSTS = (
    "this server fetches nothing from the network unless it is started with --allow-media-hosts; "
    "send a data URL"
)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Rules for fetching media.

    Attributes:
        allow_hosts: whether http(s) may be used at all.
        folders: folders that `file://` may read; symbolic links out of them are not followed.
        max_bytes: the most bytes of one item, as transferred.
        timeout_s: time limit in seconds for one item, redirects included.
        may_connect: whether connections to an address are allowed; asked for each address of a
            name.
    """

    allow_hosts: bool = False
    folders: tuple[Path, ...] = ()
    max_bytes: int = 20 << 20
    timeout_s: float = 20.0
    max_redirects: int = 3
    may_connect: Callable[[IPAddress], bool] = is_public


async def fetch(url: str, policy: FetchPolicy, *, param: str) -> bytes:
    """Fetch one item.

    Args:
        param: the request field that holds the URL, for errors.

    Raises:
        RequestError: the item may not be fetched, cannot be fetched, or is too large.
    """
    scheme = url.partition(":")[0].lower()
    try:
        match scheme:
            case "data":
                return await asyncio.to_thread(_decode_data, url, policy)
            case "http" | "https":
                if not policy.allow_hosts:
                    raise _Refused(_NO_HOSTS, "not_allowed")
                return await _fetch_http(url, policy)
            case "file":
                return await asyncio.to_thread(_read_file, url, policy)
            case _:
                raise _Refused("its scheme is none of data, http, https and file", "invalid")
    except _Refused as refused:
        raise refusal(param, str(refused), refused.code) from refused


class _Refused(Exception):
    """Raised with the reason why an item is not fetched; `code` is the last part of the
    wire code.
    """

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def _too_large(policy: FetchPolicy) -> _Refused:
    return _Refused(f"it is larger than {policy.max_bytes:,} bytes", "too_large")


def _outside() -> _Refused:
    return _Refused("it lies in no folder that --media-folder names to this server", "not_allowed")


def _decode_data(url: str, policy: FetchPolicy) -> bytes:
    """Decode a `data:` URL (RFC 2397). As in browsers, base64 may have blanks and line ends, and
    lack its padding.
    """
    head, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise _Refused("the data URL has no comma", "invalid")
    if "base64" not in head.lower().split(";")[1:]:
        data = _unquoted(body)
    else:
        data = _decode_base64(body.translate(_NO_BLANKS), policy)
    if len(data) > policy.max_bytes:
        raise _too_large(policy)
    return data


def _decode_base64(body: str, policy: FetchPolicy) -> bytes:
    if len(body) * 3 // 4 > policy.max_bytes * (3 if "%" in body else 1) + 3:
        raise _too_large(policy)
    try:
        if "%" in body:
            body = _unquoted(body).decode("ascii").translate(_NO_BLANKS)
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Refused("the data URL is not valid base64", "invalid") from error


def _unquoted(text: str) -> bytes:
    """Decode percent escapes. Malformed escapes stay as they are."""
    return _ESCAPE.sub(
        lambda found: _BYTES[found[0].upper()], text.encode("utf-8", "surrogatepass")
    )


def _read_file(url: str, policy: FetchPolicy) -> bytes:
    """Read a file below the allowed folders. Errors do not reveal whether other files exist."""
    if not policy.folders:
        raise _outside()
    if len(url) > 3 * _LONGEST_PATH:  # each character may be escaped
        raise _Refused("the file URL is too long", "invalid")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise _Refused("the file URL names another machine", "invalid")
        path = Path(os.path.realpath(unquote(parts.path)))
        inside = any(path.is_relative_to(os.path.realpath(folder)) for folder in policy.folders)
    except ValueError as error:
        raise _Refused("the file URL holds no path", "invalid") from error
    if not inside:
        raise _outside()
    try:
        # The path is resolved: a link here is newer than that. A pipe must not block.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _Refused("it is not a file", "unavailable")
            data = file.read(policy.max_bytes + 1)
    except OSError as error:
        raise _Refused(f"it cannot be read ({error.strerror})", "unavailable") from error
    if len(data) > policy.max_bytes:
        raise _too_large(policy)
    return data


async def _fetch_http(url: str, policy: FetchPolicy) -> bytes:
    try:
        async with asyncio.timeout(policy.timeout_s):
            for _ in range(policy.max_redirects + 1):
                answer = await _get(url, policy)
                if isinstance(answer, bytes):
                    return answer
                url = answer
    except TimeoutError as error:
        raise _Refused(f"it took longer than {policy.timeout_s:g} s", "unavailable") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise _Refused("its server could not be talked to", "unavailable") from error
    raise _Refused(f"it redirects more than {policy.max_redirects} times", "unavailable")


async def _get(url: str, policy: FetchPolicy) -> bytes | str:
    """Return the item, or the target of a redirect as a string."""
    parts, target = _split(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _Refused("it does not lead to an http(s) address", "not_allowed")
    if parts.username is not None or parts.password is not None:
        raise _Refused("its URL holds credentials", "invalid")
    headers = {"host": parts.netloc, "accept-encoding": "identity", "user-agent": "quire"}
    async with (
        httpcore.AsyncConnectionPool(network_backend=_Checked(policy)) as pool,
        pool.stream("GET", target, headers=list(headers.items())) as response,
    ):
        found = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in found:
            return _followed(url, found[b"location"])
        if response.status != 200:
            raise _Refused(f"its server answered {response.status}", "unavailable")
        if found.get(b"content-encoding", "identity").lower() != "identity":
            raise _Refused("its server sent it compressed", "unavailable")
        length = found.get(b"content-length", "")
        if length.isdecimal() and int(length) > policy.max_bytes:
            raise _too_large(policy)
        data = bytearray()
        async for piece in response.aiter_stream():
            data += piece
            if len(data) > policy.max_bytes:
                raise _too_large(policy)
    return bytes(data)


def _followed(url: str, location: str) -> str:
    """Return the absolute URL of a redirect from `url`."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise _Refused("it redirects to no valid URL", "unavailable") from error


def _split(url: str) -> tuple[SplitResult, httpcore.URL]:
    """Split a URL for inspection, and encode it for the request."""
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            raise ValueError("no port 0")
        return parts, httpcore.URL(url.encode("ascii"))
    except ValueError as error:
        raise _Refused("its URL is not valid", "invalid") from error


class _Checked(httpcore.AsyncNetworkBackend):
    """Connects to the first address that answers, after checking all addresses of the name. TLS
    verifies the name.
    """

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *others, last = await self._resolve(host, port)
        share = self._policy.timeout_s / (len(others) + 1)
        for address in others:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(
                    address, port, share, local_address=local_address, socket_options=socket_options
                )
        return await self._backend.connect_tcp(
            last, port, timeout, local_address=local_address, socket_options=socket_options
        )

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise _Refused("it leads to a local socket", "not_allowed")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _resolve(self, host: str, port: int) -> list[str]:
        """Return all addresses of a host name, at least one. Raise if one of them may not be
        connected to.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _Refused("its host name cannot be resolved", "unavailable") from error
        if not found:
            raise _Refused("its host name has no address", "unavailable")
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        for address in addresses:
            if not self._policy.may_connect(ipaddress.ip_address(address)):
                raise _Refused("its host is not on the public internet", "not_allowed")
        return addresses
