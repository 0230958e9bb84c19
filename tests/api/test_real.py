"""The whole server with the embedded model, through the official client."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.support.child_server import quire_serve

SUMS = [(12, 30), (41, 17), (25, 25), (73, 14), (60, 38), (15, 82), (33, 44), (50, 19)]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with quire_serve() as child:
        yield child.url


def question(a: int, b: int) -> Any:
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


def ask(url: str, **fields: Any) -> Any:
    fields = {"messages": question(12, 30), "temperature": 0, "max_tokens": 64, **fields}
    sdk = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return sdk.chat.completions.create(model="quire-demo", **fields)


def answer(url: str, **fields: Any) -> str:
    return str(ask(url, **fields).choices[0].message.content)


async def together(url: str, requests: list[dict[str, Any]]) -> list[str]:
    """The answers to requests that run at once, every other one streamed."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as sdk:

        async def one(fields: dict[str, Any], stream: bool) -> str:
            call = await sdk.chat.completions.create(model="quire-demo", stream=stream, **fields)
            if not stream:
                return str(call.choices[0].message.content)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in call])

        tasks = [one(fields, index % 2 == 0) for index, fields in enumerate(requests)]
        return list(await asyncio.gather(*tasks))


def test_eight_at_once_answer_as_they_do_alone(url: str) -> None:
    requests = [{"messages": question(a, b), "temperature": 0, "max_tokens": 32} for a, b in SUMS]
    alone = [answer(url, **request) for request in requests]
    assert asyncio.run(together(url, requests)) == alone
    right = sum(str(a + b) in text for (a, b), text in zip(SUMS, alone, strict=True))
    assert right >= 6


def test_a_seed_gives_the_same_text_alone_and_in_company(url: str) -> None:
    hot: dict[str, Any] = {"messages": question(5, 6), "temperature": 1.8, "max_tokens": 24}
    alone = answer(url, seed=7, **hot)
    texts = asyncio.run(together(url, [{**hot, "seed": seed} for seed in (1, 7, 3, 7)]))
    assert texts[1] == texts[3] == alone
    assert len(set(texts)) > 1


def test_logprobs_are_of_the_chosen_tokens(url: str) -> None:
    choice = ask(url, logprobs=True, top_logprobs=3).choices[0]
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert entry.logprob <= 0
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize("fields", [{"kv_bits": 8}, {"kv_bits": 4}, {"kv_scheme": "plain"}])
def test_kv_formats(url: str, fields: dict[str, Any]) -> None:
    assert "42" in answer(url, extra_body=fields)


def test_a_kv_format_that_is_not_offered(url: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(url, extra_body={"kv_bits": 7})
    assert (caught.value.code, caught.value.param) == ("invalid_kv_bits", "kv_bits")


def test_a_bound_answer_meets_its_schema(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    found = json.loads(answer(url, response_format=form))
    assert set(found) == {"n"}
    assert isinstance(found["n"], int)


def test_a_forced_call_is_made(url: str) -> None:
    choice = ask(
        url, tools=[WEATHER], tool_choice="required", extra_body={"enable_thinking": False}
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_a_thought_ends_when_its_budget_is_spent(url: str) -> None:
    thought = {"enable_thinking": True}
    free = ask(url, extra_body=thought, max_tokens=200)
    assert free.choices[0].message.reasoning_content
    short = ask(url, extra_body={**thought, "thinking_budget": 5}, max_tokens=200)
    used = short.usage.completion_tokens_details.reasoning_tokens
    assert used < free.usage.completion_tokens_details.reasoning_tokens


def test_a_conversation_goes_on_from_what_was_computed(url: str) -> None:
    messages = [{"role": "system", "content": "You keep a list of words. " * 20}, *question(1, 2)]
    first = ask(url, messages=messages)
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(url, messages=[*messages, reply, *question(3, 4)])
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 2 <= reused < second.usage.prompt_tokens


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(url: str, stream: bool) -> None:
    body = {**ENDLESS, "stream": stream}
    content = json.dumps(body)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80)) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}"
        raw.sendall(f"{head}\r\n\r\n{content}".encode())
        deadline = time.monotonic() + 10
        while not gauge(url, "quire_running_sequences"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    deadline = time.monotonic() + 5
    while gauge(url, "quire_running_sequences"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDLESS = {
    "messages": question(1, 1),
    "stream": True,
    "max_tokens": 20_000,
    "ignore_eos": True,
    "temperature": 2,
}


def test_an_engine_that_dies_ends_every_stream_and_the_server() -> None:
    with quire_serve() as child:
        (engine,) = psutil.Process(child.process.pid).children()
        with httpx.stream("POST", f"{child.url}/v1/chat/completions", json=ENDLESS) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            engine.kill()
            rest = list(lines)
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failure"
        assert rest[-1] == "data: [DONE]"
        assert sum('"error"' in line for line in rest) == 1
        assert httpx.get(f"{child.url}/health").status_code == 503
        assert child.process.wait(10) == 1


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with quire_serve("--request-timeout", "0.5") as child:
        body = {**ENDLESS, "stream": False}
        answer = httpx.post(f"{child.url}/v1/chat/completions", json=body, timeout=20)
        assert answer.status_code >= 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert gauge(child.url, "quire_running_sequences") == 0
