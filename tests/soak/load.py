"""Ordinary load of mixed kinds: a seeded stream of requests, some cancelled, some malformed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx

from quire.demo import MODEL_DIR
from tests.support.server import JSON_TYPE
from tests.support.tiny_models import llama_config, write_model

WORDS = "the red cat saw one small boat near a green hill and two birds".split()  # noqa: SIM905


def small_model(folder: Path) -> Path:
    """Return a random Llama with the embedded model's tokenizer: the server is what is soaked."""
    size = json.loads((MODEL_DIR / "config.json").read_text())["text_config"]["vocab_size"]
    write_model(folder, llama_config(vocab_size=size, max_position_embeddings=4096))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


class Mix:
    """A seeded stream of requests: (kind, route, body)."""

    MALFORMED: tuple[tuple[dict[str, Any], int], ...] = (
        ({"messages": []}, 400),
        ({"temperature": "hot"}, 400),
        ({"no_such_field": 1}, 400),
        ({"max_tokens": -3}, 400),
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
        """Return a route and a valid body."""
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
    """Read an answer to its end and check it. Return "finished"."""
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
    """Send a request and leave: after the first event, or `wait` seconds into a whole
    answer.
    """
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
