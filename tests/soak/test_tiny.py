"""Thousands of tiny requests at every endpoint: what is counted is what was sent, nothing grows."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.child import quire_serve

REQUESTS = 1000
ROUNDS = 4
CONCURRENCY = 32
GROWTH = 24 << 20
"""Bytes that the server's processes may grow by; what a fork shares comes and goes by 13 MiB,
and blocks fill their 6 MB by and by."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EMBEDDING = "/v1/embeddings"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Once", "max_tokens": 2},
    "/v1/messages": {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
    },
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "store": False},
    "/v1/messages/count_tokens": {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
    EMBEDDING: {"input": "Once"},
}
GENERATING = tuple(ASKED)[:4]


@dataclass
class Sent:
    """Requests that were sent, and their answers.

    Attributes:
        responses: by path and status.
        answers, prompt, generated: choices and tokens.
        vectors: embeddings.
    """

    responses: Counter[tuple[str, str]] = field(default_factory=Counter)
    answers: int = 0
    vectors: int = 0
    prompt: int = 0
    generated: int = 0

    async def one(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """A request of a random kind, some of them wrong, some streamed."""
        path = draw.choice(tuple(ASKED))
        body, wrong = dict(ASKED[path]), draw.random() < 0.1
        if wrong:
            body["model"] = 5
        streamed = not wrong and path in GENERATING and draw.random() < 0.3
        if streamed:
            body["stream"] = True
            if "completions" in path:
                body["stream_options"] = {"include_usage": True}
        answer = await client.post(path, json=body)
        self.responses[path, str(answer.status_code)] += 1
        if path not in (*GENERATING, EMBEDDING) or wrong:
            return
        assert answer.status_code == 200, answer.text
        usage = _usage(answer.text) if streamed else answer.json()["usage"]
        self.answers += path in GENERATING
        self.vectors += path == EMBEDDING
        self.prompt += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.prompt += usage.get("cache_read_input_tokens", 0)
        self.prompt += usage.get("cache_creation_input_tokens", 0)
        self.generated += usage.get("completion_tokens", usage.get("output_tokens", 0))


def _usage(stream: str) -> dict[str, int]:
    """Return the usage that a stream ends with."""
    usage: dict[str, int] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            for place in (event, event.get("message") or {}, event.get("response") or {}):
                usage |= place.get("usage") or {}
    return usage


async def round_of(url: str, sent: Sent, seed: int) -> None:
    """`REQUESTS` of them, over connections that are kept and connections of their own."""
    draw, waiting = random.Random(seed), iter(range(REQUESTS))
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=60)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as kept:

        async def worker() -> None:
            for _ in waiting:
                if draw.random() < 0.8:
                    await sent.one(kept, draw)
                else:
                    async with httpx.AsyncClient(base_url=url, timeout=120) as own:
                        await sent.one(own, draw)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))


def counted(metrics: str, name: str) -> int:
    """Return the sum of a counter's samples."""
    return sum(
        int(float(each)) for each in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.M)
    )


def test_what_is_counted_is_what_was_sent_and_nothing_grows(tmp_path: Path) -> None:
    with quire_serve(tmp_path, "--kv-memory", "6MB") as child:
        sent, held = Sent(), []
        for seed in range(ROUNDS):
            asyncio.run(round_of(child.url, sent, seed))
            child.wait_idle()
            held.append(child.held())
        metrics = child.metrics()
        found = re.findall(
            r'^quire_http_responses_total{path="(.*)",status="(.*)"} (\S+)$', metrics, re.M
        )
        responses = {(path, status): int(float(count)) for path, status, count in found}
        beside = [key for key in responses if key[0] in ("/health", "/metrics")]
        assert {key: responses[key] for key in responses if key not in beside} == sent.responses
        assert counted(metrics, "quire_answers_total") == sent.answers
        assert counted(metrics, "quire_sequences_finished_total") == sent.answers + sent.vectors
        assert counted(metrics, "quire_prompt_tokens_total") == sent.prompt
        assert counted(metrics, "quire_generated_tokens_total") == sent.generated
        print(held)
        before, after = held[1], held[-1]  # the first round is for pools and caches to fill
        assert after["processes"] == before["processes"]
        assert after["threads"] <= before["threads"] + 1
        assert after["descriptors"] <= before["descriptors"] + 2
        assert after["memory"] - before["memory"] < GROWTH
