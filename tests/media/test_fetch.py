"""Fetching media: real sockets on loopback, real files."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import RequestError
from quire.media.addresses import IPAddress, is_public
from quire.media.fetch import FetchPolicy, fetch
from tests.support.waiting import HANG_S

BYTES = bytes(range(256)) * 4


def only_first_loopback(address: IPAddress) -> bool:
    return address == ipaddress.ip_address("127.0.0.1")


NETWORK = FetchPolicy(
    allow_hosts=True, max_bytes=2000, timeout_s=HANG_S, may_connect=only_first_loopback
)


class Handler(BaseHTTPRequestHandler):
    seen: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        routes: dict[str, tuple[int, dict[str, str], bytes]] = {
            "/item": (200, {"content-type": "image/png; x=y"}, BYTES),
            "/large": (200, {}, b"x" * 2001),
            "/zipped": (200, {"content-encoding": "gzip"}, b"x"),
            "/inside": (302, {"location": "/item"}, b""),
            "/elsewhere": (302, {"location": f"http://127.0.0.2:{self.port}/item"}, b""),
            "/name": (302, {"location": f"http://localhost:{self.port}/item"}, b""),
            "/disk": (302, {"location": "file:///etc/passwd"}, b""),
            "/back": (302, {"location": f"http://rebound.test:{self.port}/item"}, b""),
            "/broken": (302, {"location": "http://[x"}, b""),
            "/round": (302, {"location": "/round"}, b""),
        }
        status, headers, body = routes.get(self.path, (404, {}, b""))
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 1000)
            self.wfile.flush()
            self.server.stop.wait(HANG_S)  # type: ignore[attr-defined]
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.path != "/large":
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])  # type: ignore[index]

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def host() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    server.seen, server.stop = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def at(host: ThreadingHTTPServer, path: str, address: str = "127.0.0.1") -> str:
    return f"http://{address}:{host.server_address[1]}{path}"


async def code_of(url: str, policy: FetchPolicy) -> str | None:
    with pytest.raises(RequestError) as caught:
        await fetch(url, policy, param="image_url")
    assert caught.value.param == "image_url"
    return caught.value.code


@pytest.mark.parametrize("path", ["/item", "/inside"])
async def test_an_item_is_fetched(host: ThreadingHTTPServer, path: str) -> None:
    assert await fetch(at(host, path), NETWORK, param="x") == BYTES


async def test_nothing_is_fetched_unless_allowed(host: ThreadingHTTPServer) -> None:
    host.seen.clear()  # type: ignore[attr-defined]
    closed = FetchPolicy(may_connect=only_first_loopback)
    assert await code_of(at(host, "/item"), closed) == "media_not_allowed"
    assert host.seen == []  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="--allow-media-hosts"):
        await fetch(at(host, "/item"), closed, param="x")
    with pytest.raises(RequestError, match="--media-folder"):
        await fetch("file:///etc/passwd", closed, param="x")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433"])
async def test_the_operators_own_network_is_out_of_reach(
    host: ThreadingHTTPServer, address: str
) -> None:
    host.seen.clear()  # type: ignore[attr-defined]
    policy = FetchPolicy(allow_hosts=True)
    assert await code_of(at(host, "/item", address), policy) == "media_not_allowed"
    assert host.seen == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/elsewhere", "/name", "/disk"])
async def test_a_redirect_is_checked_like_the_first_address(
    host: ThreadingHTTPServer, path: str
) -> None:
    host.seen.clear()  # type: ignore[attr-defined]
    policy = NETWORK
    if path == "/name":  # a name is judged by what it resolves to
        policy = FetchPolicy(True, may_connect=lambda address: not str(address).endswith("1"))
        assert await code_of(at(host, path, "127.0.0.2"), policy) == "media_not_allowed"
    else:
        assert await code_of(at(host, path), policy) == "media_not_allowed"
    assert host.seen == [path]  # type: ignore[attr-defined]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return addresses that the next look-ups of any name return, one entry each."""
    answers: list[list[str]] = []

    async def look_up(loop: object, name: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in answers.pop(0)]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    return answers


async def test_the_address_that_was_checked_is_connected_to(
    host: ThreadingHTTPServer, names: list[list[str]]
) -> None:
    host.seen.clear()  # type: ignore[attr-defined]
    names += [["127.0.0.1"], ["127.0.0.2"]]
    assert await fetch(at(host, "/item", "rebound.test"), NETWORK, param="x") == BYTES
    assert names == [["127.0.0.2"]]
    assert await code_of(at(host, "/item", "rebound.test"), NETWORK) == "media_not_allowed"
    names += [["127.0.0.1"], ["127.0.0.2"]]
    assert await code_of(at(host, "/back", "rebound.test"), NETWORK) == "media_not_allowed"
    assert host.seen == ["/item", "/back"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("addresses", "code"),
    [(["127.0.0.1", "127.0.0.2"], "media_not_allowed"), ([], "media_unavailable")],
)
async def test_a_name_is_judged_by_all_its_addresses(
    host: ThreadingHTTPServer, names: list[list[str]], addresses: list[str], code: str
) -> None:
    host.seen.clear()  # type: ignore[attr-defined]
    names.append(addresses)
    assert await code_of(at(host, "/item", "several.test"), NETWORK) == code
    assert host.seen == []  # type: ignore[attr-defined]


async def test_the_next_address_is_tried_where_one_does_not_answer(
    host: ThreadingHTTPServer, names: list[list[str]]
) -> None:
    policy = FetchPolicy(True, timeout_s=20.0, may_connect=lambda address: address.is_loopback)
    names.append(["::1", "127.0.0.1"])
    assert await fetch(at(host, "/item", "several.test"), policy, param="x") == BYTES
    names.append(["::1"])
    assert await code_of(at(host, "/item", "several.test"), policy) == "media_unavailable"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/large", "media_too_large"),
        ("/zipped", "media_unavailable"),
        ("/round", "media_unavailable"),
        ("/broken", "media_unavailable"),
        ("/nothing", "media_unavailable"),
    ],
)
async def test_what_cannot_be_had_is_refused(
    host: ThreadingHTTPServer, path: str, code: str
) -> None:
    assert await code_of(at(host, path), NETWORK) == code


async def test_what_does_not_end_in_time_is_refused(host: ThreadingHTTPServer) -> None:
    url = at(host, "/endless")
    assert await code_of(url, replace(NETWORK, timeout_s=0.5)) == "media_unavailable"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://u:p@example.com/",
        "http:///x",
        "gopher://x/",
        "x",
        "",
        "http://[x",
        "file://[x",
        "http://x:99999/",
        "http://x:0/",
        "http://ü/",
        "http://127.0.0.1/\n",
    ],
)
async def test_urls_that_make_no_sense_are_refused(url: str) -> None:
    assert (await code_of(url, NETWORK) or "").startswith("media_")


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "fe80::1",
        "fc00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
        "2001:0:1::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


async def test_files_only_below_the_named_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.bin").write_bytes(BYTES)
    (inside / "link").symlink_to(outside / "a b.bin")
    (inside / "near").symlink_to(inside / "a b.bin")
    os.mkfifo(inside / "pipe")
    policy = FetchPolicy(folders=(inside,), max_bytes=len(BYTES))
    for name in ("a%20b.bin", "near"):
        assert await fetch(f"file://{inside}/{name}", policy, param="x") == BYTES
    for path in (outside / "a b.bin", inside / ".." / "out" / "a b.bin", inside / "link", "/etc"):
        assert await code_of(f"file://{path}", policy) == "media_not_allowed"
    for name in ("nothing", "pipe", ""):
        assert await code_of(f"file://{inside}/{name}", policy) == "media_unavailable"
    assert await code_of(f"file://server{inside}/near", policy) == "media_invalid"
    assert await code_of(f"file://{inside}/%00", policy) == "media_invalid"
    small = FetchPolicy(folders=(inside,), max_bytes=len(BYTES) - 1)
    assert await code_of(f"file://{inside}/near", small) == "media_too_large"


async def test_data_urls() -> None:
    policy = FetchPolicy(max_bytes=len(BYTES))
    encoded = base64.b64encode(BYTES).decode()
    url = f"data:image/png;base64,{encoded}"
    for each in (url, url.replace("data", "DATA").replace("base64", "BASE64", 1)):
        assert await fetch(each, policy, param="x") == BYTES
    for written in (f"{encoded[:9]}\r\n {encoded[9:]}\n", f"{encoded[:9]}%0A{encoded[9:]}"):
        assert await fetch(f"data:;base64,{written}", policy, param="x") == BYTES
    for padding in ("", "=", "=="):
        assert await fetch(f"data:;base64,QQ{padding}", policy, param="x") == b"A"
    assert await fetch("data:,a%20b", policy, param="x") == b"a b"
    assert await code_of(url, FetchPolicy(max_bytes=len(BYTES) - 1)) == "media_too_large"
    assert await code_of("data:;base64,a", policy) == "media_invalid"
    assert await code_of("data:;base64,!!!!", policy) == "media_invalid"
    assert await code_of("data:nothing", policy) == "media_invalid"
