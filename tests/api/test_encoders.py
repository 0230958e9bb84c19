"""Models that embed and generate nothing, behind every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from quire.core.config import ServerConfig
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start

MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/api/chat", {"model": "quire-demo", "messages": MESSAGES}),
    ("/api/generate", {"model": "quire-demo", "prompt": "Hello"}),
]


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Iterator[Served]:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig())
        served.engine.info = replace(served.engine.info, model_type="bert", generates=False)
        yield served


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_text_is_refused_with_what_to_do(
    encoder: Served, path: str, body: dict[str, object]
) -> None:
    answer = HTTP.post(f"{encoder.url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert "This model (bert) is an encoder" in answer.text
    assert "/v1/embeddings" in answer.text


def test_ollama_is_told_what_the_model_can_do(encoder: Served) -> None:
    shown = HTTP.post(f"{encoder.url}/api/show", json={"model": "quire-demo"}).json()
    assert "embedding" in shown["capabilities"]
    assert "completion" not in shown["capabilities"]
