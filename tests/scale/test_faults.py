"""Replicas that die, come and go under load: who notices, and how."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.core.errors import ModelError
from quire.serving.engine_client import refuse
from tests.e2e.client import Client
from tests.scale.applications import Load, application
from tests.support.child import Child, quire_serve
from tests.support.waiting import wait_until

pytest.importorskip("ray")
from quire.scale.deployments import Scaling
from quire.scale.local import local_opener

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 16
TOKENS = 300
ACTOR = "ray::ServeReplica:quire:replicas"
ENGINE = "quire.engine.worker"


@dataclass
class Heard:
    """Events that one client receives.

    Attributes:
        ended: whether the stream said that it is over.
    """

    text: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Yield two replicas that run two sequences each, so that most requests wait."""
    arguments = ("--replicas", "2", "--max-sequences", "2", "--kv-memory", "64MB")
    with quire_serve(tmp_path_factory.mktemp("faults"), *arguments) as child:
        yield child


@pytest.fixture(scope="module")
def budget_of_both(served: Child) -> float:
    return budget(served)


def processes(child: Child, name: str) -> list[psutil.Process]:
    """Return the server's processes with this in their command line."""
    found = []
    for each in psutil.Process(child.process.pid).children(recursive=True):
        try:
            if name in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue
    return found


def budget(child: Child) -> float:
    """Return the KV memory of the replicas that take requests."""
    samples = child.samples()
    return sum(value for name, value in samples.items() if name.startswith("quire_kv_budget_bytes"))


@pytest.fixture
def both(served: Child, budget_of_both: float) -> Child:
    """Return the server once both replicas take requests: a new one runs seconds before."""
    wait_until(
        lambda: budget(served) == budget_of_both and len(processes(served, ENGINE)) == 2,
        lambda: "two replicas",
    )
    return served


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"{number} and then",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def running(heard: Heard) -> bool:
    return bool(heard.text) and not heard.ended


def listen(url: str, number: int, heard: Heard) -> Heard:
    """Stream a completion to its end."""
    ask = {**body(number), "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=300) as answer:
        if answer.status_code != 200:
            answer.read()
            heard.errors.append(answer.json()["error"])
            heard.ended = True
            return heard
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                heard.ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    heard.errors.append(event["error"])
                else:
                    heard.text += "".join(each["text"] for each in event["choices"])
    return heard


@pytest.mark.parametrize("name", [ACTOR, ENGINE])
def test_a_replica_that_is_killed_costs_the_answers_it_had_started(
    both: Child, child: Child, name: str
) -> None:
    heard = [Heard() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        ends = [pool.submit(listen, both.url, n, each) for n, each in enumerate(heard)]
        wait_until(lambda: sum(map(running, heard)) >= 3, lambda: str(heard))
        processes(both, name)[0].send_signal(signal.SIGKILL)
        for end in ends:
            end.result()

    failed = [each for each in heard if each.errors]
    whole = [number for number, each in enumerate(heard) if not each.errors]
    assert 1 <= len(failed) <= 3, heard
    assert all(len(each.errors) == 1 and each.text for each in failed)
    assert all(each.errors[0]["code"] == "engine_failure" for each in failed)
    assert all(heard[number].ended for number in whole)
    with Client(child.url) as one:
        for number in whole:
            same = one.complete(**body(number))["choices"][0]["text"]
            assert heard[number].text == same


def test_a_dead_replica_is_replaced(both: Child) -> None:
    with Client(both.url) as client:
        assert client.complete("2 and then", max_tokens=4)["choices"][0]["text"]
    both.wait_idle()


def test_a_ray_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr("ray.init", late)
    opener = local_opener(Scaling(2))
    config = ModelConfig(EngineConfig("quire-demo"), ServerConfig())
    with pytest.raises(ModelError, match="Ray did not start the replicas: The current node timed"):
        asyncio.run(opener(config, lambda _: None, refuse))


def test_replicas_come_and_go_without_a_lost_request(child: Child) -> None:
    with application(18732, replicas=1) as running:
        load = Load(running.url, 4)
        try:
            for replicas in (3, 1):
                before = len(load.answers)
                running.deploy(replicas=replicas)
                wait_until(
                    lambda before=before: len(load.answers) > before + 8,  # type: ignore[misc]
                    lambda: str(len(load.answers)),
                )
        finally:
            load.stop()
    load.assert_same_as(child)
