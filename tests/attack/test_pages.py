"""Requests that a hostile web page can send have no effect; see also `test_browser`."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from quire.api.shared.auth import ApiKeys
from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, NAME, Serve
from tests.support.waiting import HANG_S

BODY = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5}
POSTS = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"prompt": "Hi."},
    "/v1/messages": {"model": NAME, **BODY},
    "/v1/messages/count_tokens": {"model": NAME, "messages": BODY["messages"]},
    "/v1/responses": {"input": "Hi."},
    "/tokenize": {"prompt": "Hi."},
    "/detokenize": {"tokens": [5]},
}
OLLAMA = {"model": NAME, "messages": BODY["messages"]}
EVIL = "http://evil.example:8000"


def code_of(answer: httpx.Response) -> Any:
    error = answer.json()["error"]
    return error.get("code") or error["details"]["error_code"]


@pytest.mark.parametrize("path", POSTS)
def test_only_json_is_read(serve: Serve, path: str) -> None:
    served = serve()
    body = json.dumps(POSTS[path]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", "", None):
        headers = {} if kind is None else {"content-type": kind}
        for content in (body, iter([body])):
            answer = HTTP.post(served.url + path, content=content, headers=headers)
            assert (answer.status_code, code_of(answer)) == (415, "unsupported_media_type")
    assert not served.engine.requests
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        answer = HTTP.post(served.url + path, content=body, headers={"content-type": kind})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_bodies_of_ollamas_clients_need_no_type_but_those_of_pages_do(
    serve: Serve, kind: str | None
) -> None:
    """LiteLLM sends none, and curl as in Ollama's documentation that of a form."""
    served = serve()
    url, body = served.url + "/api/chat", json.dumps({**OLLAMA, "stream": False}).encode()
    headers = {} if kind is None else {"content-type": kind}
    assert HTTP.post(url, content=body, headers=headers).status_code == 200
    asked = len(served.engine.requests)
    for page in ({"origin": served.url}, {"sec-fetch-site": "cross-site"}):
        answer = HTTP.post(url, content=body, headers=headers | page)
        assert answer.status_code == 415
    for page in ({"origin": EVIL}, {"origin": "null"}):
        assert HTTP.post(url, content=body, headers=headers | page).status_code == 403
    assert len(served.engine.requests) == asked


@pytest.mark.parametrize("path", [*POSTS, "/health", "/metrics", "/v1/models", "/openapi.json"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": "evil.example:8000", "origin": EVIL},  # the page's name, rebound to this machine
        {"host": "localhost.evil.example"},
        {"host": "127.0.0.1.nip.io"},
        {"host": "evil@localhost:8000"},
        {"host": "localhost/evil.example"},
        {"host": "localhost evil.example"},
        {"host": "[::1"},
        {"host": ""},
    ],
    ids=str,
)
def test_a_name_that_is_not_this_servers_is_refused(
    serve: Serve, path: str, headers: dict[str, str]
) -> None:
    served = serve()
    method = "POST" if path in POSTS else "GET"
    answer = HTTP.request(method, served.url + path, headers=headers, json=POSTS.get(path))
    assert (answer.status_code, code_of(answer)) == (403, "host_not_allowed")
    assert not served.engine.requests


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.4"]
)
def test_its_own_names_and_addresses_pass(serve: Serve, host: str) -> None:
    answer = HTTP.post(f"{serve().url}/tokenize", json={"prompt": "Hi."}, headers={"host": host})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [*POSTS, "/metrics", "/v1/models"])
@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:1", "file://", "chrome://x"])
def test_a_page_of_another_origin_is_refused(serve: Serve, path: str, origin: str) -> None:
    served = serve()
    method = "POST" if path in POSTS else "GET"
    sent = {"headers": {"origin": origin}, "json": POSTS.get(path)}
    answer = HTTP.request(method, served.url + path, **sent)
    assert (answer.status_code, code_of(answer)) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers
    assert not served.engine.requests


def test_what_the_operator_names_may_ask(serve: Serve) -> None:
    config = ServerConfig(
        cors_origins=("https://a.example",), allowed_hosts=("Quire.lan",), served_name=NAME
    )
    served = serve(config=config)

    def status(**headers: str) -> int:
        return HTTP.post(
            f"{served.url}/tokenize", json={"prompt": "x"}, headers=headers
        ).status_code

    assert status(origin="https://a.example") == 200
    assert status(origin="http://a.example") == 403
    assert status(host="quire.lan:8000") == 200
    assert status(host="quire.lan:8000", origin="http://quire.lan:8000") == 200
    assert status(host="quire.lan:8000", origin="http://quire.lan:9") == 403
    assert status(host="a.example") == 403
    anybody = serve(config=ServerConfig(cors_origins=("*",), allowed_hosts=("*",)))
    headers = {"host": "x.example", "origin": EVIL}
    answer = HTTP.post(f"{anybody.url}/tokenize", json={"prompt": "x"}, headers=headers)
    assert answer.status_code == 200


def raw(url: str, head: str) -> bytes:
    """Return the start of the answer to a request that is sent as it is."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as sent:
        sent.sendall(head.encode("latin-1"))
        return sent.recv(4096)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/models HTTP/1.1\r\n\r\n", 400),
        ("GET /health HTTP/1.1\r\n\r\n", 400),
        ("GET /v1/models HTTP/1.0\r\n\r\n", 200),
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    ],
)
def test_http_1_1_names_its_host(serve: Serve, head: str, status: int) -> None:
    assert raw(serve().url, head).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize(
    "host", ["x/metrics?", "x/metrics#", "/metrics?", "x\\metrics", "x y", "?"]
)
def test_no_host_header_bends_the_path_that_is_asked_for(serve: Serve, host: str) -> None:
    config = ServerConfig(api_keys=("key",), metrics_key="key-m", allowed_hosts=("*",))
    served = serve(config=config)
    for path in ("/v1/models", "/models/unload", "/v1/completions"):
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer key-m\r\n\r\n"
        assert raw(served.url, head).startswith(b"HTTP/1.1 403")
    scope = {
        "type": "http",
        "path": "/v1/models",
        "headers": [(b"host", host.encode()), (b"x-api-key", b"key-m")],
    }
    assert ApiKeys(_nobody, ("key",), "key-m")._caller(Request(scope)) is None
    assert ApiKeys(_nobody, ("key",), "key-m")._caller(Request({**scope, "path": "/metrics"})) == ""


async def _nobody(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nobody comes through")


def test_two_hosts_are_none(serve: Serve) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert raw(serve().url, head).startswith(b"HTTP/1.1 400")
