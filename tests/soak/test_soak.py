"""500 requests of mixed kinds, some cancelled, some malformed: nothing may stay behind."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.soak.load import Mix, cancel, finish, malformed, small_model

REQUESTS = 500
WARM_UP = 150
CONCURRENCY = 16
KV_MEMORY = "24MB"
MIB = 1 << 20
RSS_GROWTH = 24 * MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Child:
    """A `quire serve` of its own."""

    url: str
    process: psutil.Process

    def family(self) -> list[psutil.Process]:
        """The server and the engine."""
        return [self.process, *self.process.children(recursive=True)]

    def held(self) -> dict[str, int]:
        """What the processes hold now, summed."""
        members = self.family()
        return {
            "processes": len(members),
            "threads": sum(member.num_threads() for member in members),
            "descriptors": sum(member.num_fds() for member in members),
            "rss": sum(member.memory_info().rss for member in members),
        }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    model = small_model(tmp_path / "small")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    command = [sys.executable, "-m", "quire", "serve", str(model), "--port", str(port)]
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*command, "--kv-memory", KV_MEMORY, "--log-level", "warning"],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not answers(url):
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Child(url, psutil.Process(child.pid))
        assert child.poll() is None, f"the server died: {log.read_text()}"
    finally:
        child.terminate()
        child.wait(20)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def gauges(url: str) -> dict[str, float]:
    """The samples of /metrics that must fall back to zero."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    names = "quire_http_in_flight|quire_running_sequences|quire_waiting_sequences"
    found = re.findall(rf'^({names}|quire_kv_bytes\{{.*state="live".*\}}) (\S+)$', text, re.M)
    return {name: float(value) for name, value in found}


def wait_idle(url: str) -> None:
    """Until no request and no page is live any more."""
    deadline = time.monotonic() + 30
    while any((now := gauges(url)).values()):
        assert time.monotonic() < deadline, f"still held: {now}"
        time.sleep(0.2)
    assert len(now) >= 4, f"gauges are missing: {now}"


async def soak(url: str, mix: Mix, requests: int) -> Counter[str]:
    """`requests` of them, 10% cancelled, 2% malformed, `CONCURRENCY` at a time."""
    kinds = ["cancel"] * (requests // 10) + ["malformed"] * (requests // 50)
    kinds += ["finish"] * (requests - len(kinds))
    mix.draw.shuffle(kinds)
    waiting = iter(kinds)
    done: Counter[str] = Counter()

    async def worker(client: httpx.AsyncClient) -> None:
        for kind in waiting:
            route, body = mix.request()
            if kind == "cancel":
                wait = mix.draw.uniform(0.0, 0.3)
                done[await cancel(client, route, body, wait)] += 1
            elif kind == "malformed":
                done[await malformed(client, mix)] += 1
            else:
                done[await finish(client, route, body)] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENCY)))
    return done


def known_answer(url: str, model: str) -> str:
    message = {"role": "user", "content": "Repeat this text. red cat green hill"}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 20}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return str(response.json()["choices"][0]["message"]["content"])


def test_nothing_stays_behind(server: Child) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    before_all = known_answer(server.url, model)
    # Thread pools, allocator arenas and the page pools grow to their size first.
    asyncio.run(soak(server.url, Mix(model, seed=1), WARM_UP))
    wait_idle(server.url)
    before = server.held()
    done = asyncio.run(soak(server.url, Mix(model, seed=2), REQUESTS))
    assert done == {"finished": 440, "cancelled": 50, "malformed": 10}
    wait_idle(server.url)
    after = server.held()
    print(f"before {before}, after {after}")
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["rss"] - before["rss"] < RSS_GROWTH
    assert known_answer(server.url, model) == before_all
