"""An engine that does not answer any more: requests fail in time, and go on when it does."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.attack.harness import attacked
from tests.e2e.client import Client, Streamed
from tests.support.waiting import HANG_S, wait_until


@pytest.mark.slow
def test_a_stopped_engine_is_told_of(tmp_path: Path) -> None:
    with attacked(tmp_path, "--engine-timeout", "2") as victim, Client(victim.url) as client:
        expected = client.text("Once upon a time")
        started, streamed = threading.Event(), list[Streamed]()
        neighbour = threading.Thread(
            target=lambda: streamed.append(
                client.stream("Once", lambda _: started.set(), max_tokens=20_000, ignore_eos=True)
            )
        )
        neighbour.start()
        assert started.wait(HANG_S)
        engine = victim.child.engine
        engine.send_signal(signal.SIGSTOP)
        try:
            neighbour.join(HANG_S)
            assert streamed, "the stream hangs"
            assert streamed[0].error is not None
            assert streamed[0].error["code"] == "engine_failure"
            answer = client.http.get("/health")
            assert answer.status_code == 503
            assert "has not answered" in answer.json()["reason"]
            answer = client.post("/v1/completions", prompt="x")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failure")
            assert client.http.get("/metrics").status_code == 503
        finally:
            engine.send_signal(signal.SIGCONT)
        wait_until(lambda: client.http.get("/health").status_code == 200)
        assert client.text("Once upon a time") == expected
        victim.child.wait_idle()
