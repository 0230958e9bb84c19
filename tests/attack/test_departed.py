"""Clients that leave, many at once: what they started ends, and neighbours are answered."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.attack.harness import Victim, attacked
from tests.attack.test_grammars import FINE, SLOW, ask, asked
from tests.attack.test_requests import CHAT, COUNT, calls, user
from tests.support.server import leaving
from tests.support.waiting import HANG_S, wait_until

COUNTED = {"model": "quire-demo", "messages": [user("word " * 3600)]}
"""18 KB, which a job reads."""
_AT_ONCE = 40


def test_a_storm_of_clients_that_leave_costs_no_neighbour_an_answer(victim: Victim) -> None:
    most, over = 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, len(victim.jobs()))

    counter = threading.Thread(target=count)
    counter.start()
    statuses = []
    try:
        for _ in range(5):
            with ExitStack() as stack:
                for _ in range(_AT_ONCE):
                    stack.enter_context(leaving(victim.url, COUNT, COUNTED))
            answer = httpx.post(victim.url + COUNT, json=COUNTED, timeout=HANG_S)
            statuses.append(answer.status_code)
    finally:
        over.set()
        counter.join()
    assert statuses == [200] * 5
    assert 0 < most <= 4, "twice what may run at once: jobs of two kinds"
    wait_until(lambda: not victim.jobs())
    wait_until(lambda: not any(victim.child.live().values()))
    assert "Traceback" not in victim.child.log.read_text()


def test_grammars_end_with_their_clients(victim: Victim) -> None:
    """Each takes 3 s of processor time; none of them is left when the neighbour has its own."""
    route, body = asked("chat", SLOW)
    with ExitStack() as stack:
        for number in range(12):
            named = body["response_format"]["json_schema"]
            each = {**body, "response_format": {**body["response_format"]}}
            each["response_format"]["json_schema"] = {**named, "schema": {**SLOW, "title": number}}
            stack.enter_context(leaving(victim.url, f"/v1/{route}", each))
        wait_until(victim.reads)
    assert ask(victim, "chat", {**FINE, "title": "another"}).status_code == 200
    samples = victim.child.samples()
    assert samples["quire_http_in_flight"] == 0
    wait_until(lambda: not victim.jobs())


def _later(url: str, body: dict[str, Any], answers: list[httpx.Response]) -> threading.Thread:
    """Asks in the background."""

    def run() -> None:
        answers.append(httpx.post(url + CHAT, json=body, timeout=HANG_S))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped twice", "engine killed"])
def test_a_job_that_ends_with_the_server_is_no_fault_of_its_request(
    tmp_path: Path, how: str
) -> None:
    """503, not 400; and the server does not wait for answers that cannot come."""
    with attacked(tmp_path, "--stop-grace", "600", "--restarts", "0") as victim:
        answers: list[httpx.Response] = []
        asking = _later(victim.url, calls(), answers)
        wait_until(victim.jobs)
        for job in victim.jobs():
            job.suspend()  # it takes as long as it may
        processes = psutil.Process(victim.child.process.pid).children(recursive=True)
        if how == "engine killed":
            victim.child.engine.send_signal(signal.SIGKILL)
        else:
            victim.child.process.terminate()
            wait_until(lambda: "1 answer has" in victim.child.log.read_text())
            victim.child.process.terminate()
        asking.join(HANG_S)
        victim.ended, code = True, victim.child.process.wait(HANG_S)
        assert code == (1 if how == "engine killed" else 0)
        assert [each.status_code for each in answers] == [503], answers and answers[0].text
        error = json.loads(answers[0].text)["error"]
        assert error["code"] == "engine_failure"
        assert not psutil.wait_procs(processes, timeout=HANG_S)[1], "a process is left"
