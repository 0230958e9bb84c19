"""The socket that a server listens on, and what becomes of a Unix socket's file."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from quire.api.listening import bound, listen, url_of
from quire.core.errors import QuireError
from tests.support.server import serving


def test_clients_reach_a_server_at_a_path(tmp_path: Path) -> None:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{request.url.path} of {request.headers['host']}")

    path = tmp_path / "quire.sock"
    with bound(f"unix:{path}", 0) as listener:
        app = Starlette(routes=[Route("/v1/models", answer)])
        transport = httpx.HTTPTransport(uds=str(path))
        with serving(app, listener) as url, httpx.Client(transport=transport) as client:
            assert url == f"unix:{path}"
            for _ in range(2):  # the second by the same connection
                assert client.get("http://localhost/v1/models").text == "/v1/models of localhost"
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.is_socket()
    with bound(f"unix:{path}", 0), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_another_server_took_over_stays(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    ending = ExitStack()
    ending.enter_context(bound(f"unix:{path}", 0)).close()  # while its models are closed
    with bound(f"unix:{path}", 0), socket.socket(socket.AF_UNIX) as client:
        ending.close()
        client.connect(str(path))
    assert not path.exists()


def test_neither_a_running_servers_socket_nor_another_file_is_replaced(tmp_path: Path) -> None:
    path, file = tmp_path / "quire.sock", tmp_path / "file"
    file.write_text("kept")
    with bound(f"unix:{path}", 0):
        for taken in (path, file):
            with pytest.raises(QuireError, match=f"cannot bind unix:{taken}: a server listens"):
                _bind(taken)
        assert path.is_socket()
    assert file.read_text() == "kept"
    missing = tmp_path / "missing" / "quire.sock"
    with pytest.raises(QuireError, match=f"cannot bind unix:{missing}: No such file"):
        _bind(missing)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_used_is_named(host: str, shown: str) -> None:
    with bound(host, 0) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://{shown}:{port}"
        with bound(host, port) as second:  # which the system allows until one of them listens
            listen(first)
            with pytest.raises(QuireError, match="--port takes another"):
                listen(second)
        with pytest.raises(QuireError, match="--port takes another"), bound(host, port):
            pytest.fail("it was bound")


def _bind(path: Path) -> None:
    with bound(f"unix:{path}", 0):
        pytest.fail("it was bound")
