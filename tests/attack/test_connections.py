"""Connections that are silent, slow or many: they end, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.api.connections import ConnectionLimits, LimitedProtocol, _warn_of_descriptors
from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve, Served
from tests.support.child import quire_serve
from tests.support.scripted_engine import Script
from tests.support.waiting import HANG_S, wait_until

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "x"}]}
BODY = json.dumps({**ASK, "stream": True}).encode()
HEAD = (
    f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    f"content-length: {len(BODY)}\r\n\r\n"
).encode()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that waits a moment."""
    short = ConnectionLimits(
        head_s=0.4, body_s=0.4, body_rate=1 << 10, write_s=0.8, idle_s=0.4, unfinished=16
    )
    monkeypatch.setattr(LimitedProtocol, "limits", short)


def connect(served: Served, data: bytes = b"") -> socket.socket:
    url = httpx.URL(served.url)
    client = socket.create_connection((url.host, url.port or 80), timeout=HANG_S)
    client.sendall(data)
    return client


def ends(client: socket.socket) -> bool:
    """Return whether the server ends a connection; the hang guard's time is the socket's."""
    with client:
        try:
            while client.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("data", [b"", HEAD[:20], HEAD, HEAD + BODY[:5]])
@pytest.mark.usefixtures("impatient")
def test_what_is_not_sent_is_not_waited_for(serve: Serve, data: bytes) -> None:
    served = serve("Hello.", config=ServerConfig())
    assert ends(connect(served, data))


@pytest.mark.usefixtures("impatient")
def test_the_next_request_is_not_waited_for_without_end(serve: Serve) -> None:
    served = serve("Hello.", config=ServerConfig())
    assert ends(connect(served, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"))


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_was_never_used_ends_without_an_answer(serve: Serve) -> None:
    """An answer would be taken for that of the request that its client sends meanwhile."""
    with connect(serve("Hello.", config=ServerConfig())) as unused:
        assert unused.recv(1) == b""


def test_connections_in_reserve_wait_as_long_as_used_ones(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(head_s=0.4))
    served = serve("Hello.", config=ServerConfig())
    with connect(served) as reserve:
        assert ends(connect(served, HEAD[:20]))  # although it came later
        reserve.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert reserve.recv(12) == b"HTTP/1.1 200"


def test_clients_close_what_they_do_not_use_before_the_server_does(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Loop:
        def call_later(self, seconds: float, *_: object) -> None:
            waits.append(seconds)

    def arm(protocol: LimitedProtocol) -> None:
        loop, protocol.loop = protocol.loop, Loop()  # type: ignore[assignment]
        HttpToolsProtocol.on_response_complete(protocol)
        protocol.loop = loop

    monkeypatch.setattr(LimitedProtocol, "on_response_complete", arm)
    served = serve("Hello.", config=ServerConfig())
    assert httpx.get(f"{served.url}/health", timeout=HANG_S).status_code == 200
    served.settle()
    assert min(waits) > 90  # as long as Go's clients


@pytest.mark.usefixtures("impatient")
def test_a_body_in_drops_is_not_waited_for(serve: Serve) -> None:
    served = serve("Hello.", config=ServerConfig())
    client = connect(served, HEAD)
    with client, pytest.raises(ConnectionError):
        _drip(client)


def _drip(client: socket.socket) -> None:
    for byte in BODY * 100:
        client.sendall(bytes([byte]))
        time.sleep(0.02)


def test_half_sent_requests_hold_no_slots(serve: Serve) -> None:
    served = serve("Hello.", config=ServerConfig(max_concurrent=2))
    held = [connect(served, HEAD) for _ in range(8)]
    answer = httpx.post(served.url + CHAT, json=ASK, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    for client in held:
        client.close()


def test_one_address_holds_a_bounded_number(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ConnectionLimits(HANG_S, HANG_S, write_s=HANG_S, unfinished=16)
    monkeypatch.setattr(LimitedProtocol, "limits", limits)
    served = serve("Hello.", config=ServerConfig())
    held = [connect(served, HEAD[:20]) for _ in range(64)]
    answer = httpx.post(served.url + CHAT, json=ASK, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    # A burst may be more; the next connection after it ends one of them, without an answer.
    monkeypatch.setattr(LimitedProtocol, "limits", replace(limits, head_s=0.0))
    newest = connect(served)
    (ended, *_), _, _ = select.select(held, [], [], HANG_S)
    assert ended.recv(1) == b""
    for client in (*held, newest):
        client.close()


def test_idle_connections_make_room_before_files_run_out(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_descriptors.cache_clear()
    served = serve("Hello.", config=ServerConfig())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(served))]
        allowed = held[0].fileno() + 64  # both ends of each connection are files of this process
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while not (closed := select.select(held, [], [], 0)[0]):
            held.append(stack.enter_context(connect(served)))
            held[-1].sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert held[-1].recv(12) == b"HTTP/1.1 200"
            held[-1].recv(1 << 16)
        assert closed == held[: len(closed)]
        assert held[0].recv(1) == b""
    (warning,) = [each.getMessage() for each in caplog.records]
    assert f"the limit of {allowed} open files" in warning


def test_a_stream_that_nobody_reads_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "limits", ConnectionLimits(write_s=0.8))
    words = serve().ids("word " * 8000)
    served = serve(
        lambda _: Script(words, group=20, delay_s=0.001),
        config=ServerConfig(),
        context_length=1 << 20,
    )
    body = BODY[:-1] + b', "logprobs": true, "top_logprobs": 20}'  # fills any buffer
    head = HEAD.replace(str(len(BODY)).encode(), str(len(body)).encode())
    client = connect(served, head + body)
    wait_until(lambda: served.engine.tickets)
    metrics = f"{served.url}/metrics"
    wait_until(
        lambda: "quire_http_in_flight 0" in HTTP.get(metrics).text,
        lambda: "the stream holds its slot",
    )
    client.settimeout(HANG_S)
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            received = (received + piece)[-100:]
    assert b"[DONE]" not in received, "the buffers held it all"
    client.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_several_requests_under_way_is_noticed(
    serve: Serve, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(lambda _: Script(silent=True), config=ServerConfig())
    body = json.dumps({**ASK, "stream": stream}).encode()
    head = HEAD.replace(str(len(BODY)).encode(), str(len(body)).encode())
    client = connect(served, 3 * (head + body))
    wait_until(lambda: served.engine.tickets)
    client.close()
    wait_until(lambda: served.engine.tickets[0].aborted)
    served.settle()
    assert len(served.engine.tickets) == 1, "nobody waits for the others"
    assert not caplog.records


@pytest.mark.slow
def test_more_connections_than_a_process_starts_with(tmp_path: Path) -> None:
    """A shell's limit on open files is none of the server's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            child = stack.enter_context(quire_serve(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        url = httpx.URL(child.url)
        held = [socket.create_connection((url.host, url.port or 80), HANG_S) for _ in range(100)]
        for each in held:
            each.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in held)
        for each in held:
            each.close()
