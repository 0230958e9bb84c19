"""Errors and fields that clients act on, by the official SDKs: overflow, defaults, ignored
fields.
"""

from __future__ import annotations

import re

import anthropic
import openai
import pytest

from tests.e2e.client import Client


def test_an_overflow_is_said_in_each_protocols_words(client: Client) -> None:
    url = str(client.http.base_url)
    context = client.http.get("/v1/models").json()["data"][0]["context_length"]
    long = "word " * context
    asked = [{"role": "user", "content": long}]
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(model="quire-demo", messages=asked)  # type: ignore[arg-type]
    assert refused.value.code == "context_length_exceeded"
    assert f"maximum context length is {context} tokens" in refused.value.message
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as other:
        claude.messages.create(model="quire-demo", messages=asked, max_tokens=9)  # type: ignore[arg-type]
    found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", str(other.value))
    assert found is not None
    assert int(found[1]) > int(found[2]) == context - 1


def test_what_passes_and_what_holds_is_said(client: Client) -> None:
    chat = openai.OpenAI(base_url=f"{client.http.base_url}/v1", api_key="none", max_retries=0)
    answer = chat.chat.completions.with_raw_response.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        max_tokens=5,
        extra_body={"mirostat": 2, "top_k": 5, "cache_prompt": True},
    )
    assert answer.headers["x-quire-ignored-fields"] == "mirostat"
    (model,) = client.http.get("/v1/models").json()["data"]
    assert model["sampling_defaults"]["temperature"] == 0  # the demonstration's `do_sample: false`
