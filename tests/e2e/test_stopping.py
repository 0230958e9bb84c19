"""Ctrl-C and SIGTERM: what is in flight is told about, may end, and nothing prints a trace."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.api.conftest import HTTP
from tests.e2e.client import COMPLETIONS, Client, Streamed
from tests.support.child import Child, quire_serve
from tests.support.server import leaving
from tests.support.waiting import HANG_S, wait_until

_PROMPT = "Once upon a time there was a"
_TOKENS = 20_000
"""More than are made before a signal arrives."""


@dataclass
class InFlight:
    """An answer that was being streamed when the block started."""

    answer: Streamed


@contextmanager
def streaming(child: Child) -> Iterator[InFlight]:
    """Yield a stream that has started; it has ended when the block is left."""
    started, flight = threading.Event(), InFlight(Streamed())

    def stream() -> None:
        with Client(child.url) as client:
            fields = {"max_tokens": _TOKENS, "ignore_eos": True}
            flight.answer = client.stream(_PROMPT, lambda _: started.set(), **fields)

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(HANG_S)
    yield flight
    thread.join(HANG_S)
    assert not thread.is_alive()


_UNDER_NOHUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(
            signal.SIGHUP,
            marks=[pytest.mark.slow, pytest.mark.skipif(_UNDER_NOHUP, reason="ignored")],
        ),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_an_answer_in_flight_ends_by_itself(tmp_path: Path, number: signal.Signals) -> None:
    body = {"prompt": _PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    said = "quire: stopping: 1 answer has 200 s to finish; press Ctrl-C again to stop now"
    with quire_serve(tmp_path, "--stop-grace", "200") as child:
        engine, answer = child.engine, b""
        engine.suspend()  # nothing ends before the signal
        with leaving(child.url, COMPLETIONS, body) as raw:
            child.process.send_signal(number)
            _wait_for(child.log, said)
            _stopping(child.url)
            engine.resume()
            while piece := raw.recv(1 << 16):
                answer += piece
        assert child.process.wait(HANG_S) == 0
        assert b'"finish_reason":"length"' in answer
        assert b'"error"' not in answer
        assert b"[DONE]" in answer
        assert "Traceback" not in child.log.read_text()


@pytest.mark.slow
def test_a_terminal_may_close_under_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with quire_serve(tmp_path) as child:
            with streaming(child) as flight:
                child.process.send_signal(signal.SIGHUP)
                child.engine.send_signal(signal.SIGHUP)
                child.process.send_signal(signal.SIGTERM)
                _wait_for(child.log, "stopping: 1 answer")
                child.process.send_signal(signal.SIGHUP)  # no second one that ends answers now
                child.process.send_signal(signal.SIGINT)
                assert child.process.wait(HANG_S) == 0
            assert flight.answer.error is not None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.skipif(_UNDER_NOHUP, reason="ignored")
def test_a_closed_terminal_ends_answers_after_their_grace(tmp_path: Path) -> None:
    with quire_serve(tmp_path, "--stop-grace", "0.05") as child:
        with streaming(child) as flight:
            for _ in range(2):  # the shell sends one, the system another
                child.process.send_signal(signal.SIGHUP)
            assert child.process.wait(HANG_S) == 0
        assert flight.answer.error is not None
        assert "1 answer has 0.05 s to finish" in child.log.read_text()


@pytest.mark.slow
def test_a_second_signal_ends_answers_with_an_error(tmp_path: Path) -> None:
    with quire_serve(tmp_path) as child:
        with streaming(child) as flight:
            child.process.send_signal(signal.SIGINT)
            _wait_for(child.log, "stopping: 1 answer")
            child.process.send_signal(signal.SIGINT)
            assert child.process.wait(HANG_S) == 0
        assert flight.answer.error is not None
        assert "shutting down" in flight.answer.error["message"]
        lines = child.log.read_text().splitlines()
    assert "quire: 1 answer did not finish: ended with an error" in lines
    assert len(lines) < 8, lines
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_an_idle_server_says_that_it_stops(tmp_path: Path) -> None:
    with quire_serve(tmp_path) as child:
        before = child.log.read_text()
        assert f"page for browsers at {child.url}\n" in before
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(HANG_S) == 0
        assert child.log.read_text() == before + "quire: stopping\n"


def test_ctrl_c_while_loading(tmp_path: Path) -> None:
    log = tmp_path / "log"
    module = "tests.e2e.serve_loading"
    command = [sys.executable, "-m", module, "serve", "--port", "0", "--log-level", "warning"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, process_group=0)
    server = psutil.Process(process.pid)
    wait_until(server.children, log.read_text)  # the engine's
    engine = server.children()[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 130
    assert log.read_text() == ""
    assert not engine.is_running()


@pytest.mark.slow
def test_ctrl_c_as_soon_as_it_serves(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-level", "warning"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, process_group=0)
    _wait_for(log, "quire serves")  # the web server is about to start
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 0
    assert log.read_text().splitlines()[1:] in ([], ["quire: stopping"])


def test_a_bad_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(said) == 1, said
    assert "mamba9" in said[0]


def _stopping(url: str) -> None:
    """Wait until a server that drains refuses requests and says that it stops."""
    wait_until(lambda: HTTP.get(f"{url}/health").status_code == 503)
    health, ping = HTTP.get(f"{url}/health"), HTTP.get(f"{url}/ping")
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert ping.status_code == 503
    refused = HTTP.post(f"{url}{COMPLETIONS}", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
    assert refused.headers["retry-after"] == "5"


def _wait_for(log: Path, text: str) -> None:
    wait_until(lambda: text in log.read_text(), log.read_text)
