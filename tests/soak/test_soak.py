"""500 requests of mixed kinds, some cancelled, some malformed: nothing may stay behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.demo import MODEL_DIR
from tests.support.server import JSON_TYPE
from tests.support.tiny_models import llama_config, write_model

REQUESTS = 500
WARM_UP = 150
CONCURRENCY = 16
KV_MEMORY = "24MB"
MIB = 1 << 20
RSS_GROWTH = 24 * MIB
WORDS = "the red cat saw one small boat near a green hill and two birds".split()  # noqa: SIM905

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


def small_model(folder: Path) -> Path:
    """A random Llama with the embedded model's tokenizer: the server is what is soaked."""
    size = json.loads((MODEL_DIR / "config.json").read_text())["text_config"]["vocab_size"]
    write_model(folder, llama_config(vocab_size=size, max_position_embeddings=4096))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


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


class Mix:
    """A seeded stream of requests: (kind, route, body)."""

    MALFORMED: tuple[tuple[dict[str, Any], int], ...] = (
        ({"messages": []}, 400),
        ({"temperature": "hot"}, 400),
        ({"no_such_field": 1}, 400),
        ({"max_tokens": -1}, 400),
        ({"model": "other"}, 404),
    )

    def __init__(self, model: str, seed: int) -> None:
        self.model = model
        self.draw = random.Random(seed)

    def prompt(self) -> str:
        length = self.draw.choice((5, 5, 30, 30, 120, 500))
        head = "Repeat this text. " if self.draw.random() < 0.5 else ""
        return head + " ".join(self.draw.choices(WORDS, k=length))

    def request(self) -> tuple[str, dict[str, Any]]:
        """A route and a valid body."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.draw.randint(1, 16)}
        body |= self.draw.choice(
            (
                {"temperature": 0},
                {"temperature": 1.5, "seed": 7, "top_p": 0.9},
                {"n": 2, "temperature": 0.7},
                {"stop": ["a", "the cat"]},
                {"presence_penalty": 0.5, "frequency_penalty": 0.5},
                {"logit_bias": {"300": 5}},
            )
        )
        if self.draw.random() < 0.6:
            body["stream"] = True
        if self.draw.random() < 0.25:
            return "/v1/completions", body | {"prompt": self.prompt()}
        if self.draw.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        messages = [{"role": "user", "content": self.prompt()}]
        if self.draw.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "You are a pirate."})
        return "/v1/chat/completions", body | {"messages": messages}


async def finish(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> str:
    """A request that is read to its end."""
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.text.rstrip().endswith("data: [DONE]"), response.text[-300:]
        assert '"error"' not in response.text
    else:
        choices = response.json()["choices"]
        assert len(choices) == body.get("n", 1)
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
    return "finished"


async def cancel(client: httpx.AsyncClient, route: str, body: dict[str, Any], wait: float) -> str:
    """A client that goes away: after the first event, or `wait` seconds into a whole answer."""
    body = body | {"max_tokens": 400}
    try:
        async with asyncio.timeout(wait + 5 * bool(body.get("stream"))):
            async with client.stream("POST", route, json=body) as response:
                async for _ in response.aiter_lines():
                    break
    except TimeoutError:
        pass
    return "cancelled"


async def malformed(client: httpx.AsyncClient, mix: Mix) -> str:
    fault, status = mix.draw.choice(mix.MALFORMED)
    body = {"model": mix.model, "messages": [{"role": "user", "content": "Hello"}]} | fault
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    broken = await client.post(
        "/v1/chat/completions", content=b'{"model": "x", ', headers=JSON_TYPE
    )
    assert broken.status_code == 400
    return "malformed"


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
