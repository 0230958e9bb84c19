"""500 requests of mixed kinds, some cancelled, some malformed: nothing may stay behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.soak.load import Mix, cancel, finish, malformed, small_model
from tests.support.child import Child, quire_serve

REQUESTS = 500
WARM_UP = 150
CONCURRENCY = 16
KV_MEMORY = "24MB"
MIB = 1 << 20
MEMORY = 24 * MIB
"""Bytes that the processes may have grown by."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    model = small_model(tmp_path / "small")
    with quire_serve(tmp_path, str(model), "--kv-memory", KV_MEMORY) as child:
        yield child
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"


async def soak(url: str, mix: Mix, requests: int) -> Counter[str]:
    """Send `requests` requests, 10% cancelled, 2% malformed, `CONCURRENCY` at a time."""
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


def await_jobs(url: str) -> None:
    """Returns when the process of jobs is open, which goes on behind the first answers."""
    response = httpx.post(f"{url}/tokenize", json={"prompt": "red " * 10_000}, timeout=300)
    assert response.status_code == 200, response.text


def known_answer(url: str, model: str) -> str:
    message = {"role": "user", "content": "Repeat this text. red cat green hill"}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 20}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return str(response.json()["choices"][0]["message"]["content"])


def test_nothing_stays_behind(server: Child) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    before_all = known_answer(server.url, model)
    await_jobs(server.url)
    # Thread pools, allocator arenas and the page pools grow to their size first.
    asyncio.run(soak(server.url, Mix(model, seed=1), WARM_UP))
    server.wait_idle()
    before = server.held()
    done = asyncio.run(soak(server.url, Mix(model, seed=2), REQUESTS))
    assert done == {"finished": 440, "cancelled": 50, "malformed": 10}
    server.wait_idle()
    after = server.held()
    print(f"before {before}, after {after}")
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["memory"] - before["memory"] < MEMORY
    assert known_answer(server.url, model) == before_all
