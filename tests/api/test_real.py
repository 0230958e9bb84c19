"""The whole server with the embedded model, through the official client."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from quire.demo.skills import SkillAnswer, SkillItem, judge, load
from tests.api.conftest import HTTP, openai_client
from tests.support.child import Child, quire_serve
from tests.support.server import leaving
from tests.support.waiting import HANG_S, wait_until

SKILLS = Path(__file__).parents[1] / "data" / "skills"
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
    "properties": {
        "price": {"type": "integer"},
        "city": {"type": "string"},
        "job": {"type": "string"},
    },
    "required": ["price", "city", "job"],
    "additionalProperties": False,
}


@pytest.fixture
def url(child: Child) -> str:
    return child.url


def question(a: int, b: int) -> Any:
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


def ask(url: str, **fields: Any) -> Any:
    fields = {"messages": question(12, 30), "temperature": 0, "max_tokens": 64, **fields}
    return openai_client(url).chat.completions.create(model="quire-demo", **fields)


def text(url: str, **fields: Any) -> str:
    return str(ask(url, **fields).choices[0].message.content)


def fields_of(item: SkillItem) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": item.messages, "temperature": 0, "max_tokens": 256}
    if item.tools:
        fields["tools"] = item.tools
    return {**fields, "extra_body": {"enable_thinking": item.enable_thinking}}


async def together(url: str, requests: list[dict[str, Any]], at_once: int = 8) -> list[SkillAnswer]:
    """Return the answers to requests that run `at_once`, every other one streamed."""
    slots = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as sdk:

        async def one(fields: dict[str, Any], stream: bool) -> SkillAnswer:
            async with slots:
                call = sdk.chat.completions.create(model="quire-demo", stream=stream, **fields)
                return await folded(await call) if stream else whole(await call)

        tasks = [one(fields, index % 2 == 0) for index, fields in enumerate(requests)]
        return list(await asyncio.gather(*tasks))


def whole(completion: Any) -> SkillAnswer:
    message = completion.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return taken_apart(message.content, getattr(message, "reasoning_content", None), calls)


async def folded(stream: Any) -> SkillAnswer:
    content, reasoning = "", ""
    calls: dict[int, list[str]] = {}
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or ():
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    return taken_apart(content, reasoning, [(name, text) for name, text in calls.values()])


def taken_apart(
    content: str | None, reasoning: str | None, calls: list[tuple[str, str]]
) -> SkillAnswer:
    made = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls]
    return SkillAnswer(content or "", reasoning or "", made)


def test_eight_different_questions_at_once_are_all_answered_right(url: str) -> None:
    skills = ("arithmetic", "facts", "json", "memory", "repeat", "thinking", "tool_call", "persona")
    items = [load(SKILLS / f"{skill}.jsonl")[0] for skill in skills]
    answers = asyncio.run(together(url, [fields_of(item) for item in items]))
    wrong = [
        (item.skill, found)
        for item, found in zip(items, answers, strict=True)
        if not judge(item, found)
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_concurrent_skills_equal_sequential_ones(url: str, bits: int | None) -> None:
    files = [each for each in sorted(SKILLS.glob("*.jsonl")) if "retrieval" not in each.name]
    items = [item for file in files for item in load(file)[:3]]
    requests = [fields_of(item) for item in items]
    for fields in requests:
        fields["extra_body"]["kv_bits"] = bits
    alone = asyncio.run(together(url, requests, at_once=1))
    company = asyncio.run(together(url, requests, at_once=8))
    right = [sum(map(judge, items, answers)) for answers in (alone, company)]
    assert company == alone
    assert right[0] == right[1] >= 0.9 * len(items)


def test_a_seed_gives_the_same_text_alone_and_in_company(url: str) -> None:
    hot: dict[str, Any] = {"messages": question(5, 6), "temperature": 2.0, "max_tokens": 40}
    hot["extra_body"] = {"ignore_eos": True}  # past its end, the model is sure of nothing
    alone = text(url, seed=7, **hot)
    answers = asyncio.run(together(url, [{**hot, "seed": seed} for seed in (1, 7, 3, 7)]))
    texts = [each.text for each in answers]
    assert texts[1] == texts[3] == alone
    assert len(set(texts)) > 1


def test_logprobs_are_of_the_chosen_tokens(url: str) -> None:
    choice = ask(url, logprobs=True, top_logprobs=3).choices[0]
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert entry.logprob <= 0
    said = "".join(entry.token for entry in choice.logprobs.content)
    assert said == choice.message.content + "<turn|>"


@pytest.mark.parametrize("fields", [{"kv_bits": 8}, {"kv_bits": 4}, {"kv_scheme": "plain"}])
def test_kv_formats(url: str, fields: dict[str, Any]) -> None:
    assert "42" in text(url, extra_body=fields)


def test_a_kv_format_that_is_not_offered(url: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(url, extra_body={"kv_bits": 7})
    assert (caught.value.code, caught.value.param) == ("invalid_kv_bits", "kv_bits")


def test_a_bound_answer_meets_its_schema(url: str) -> None:
    item = load(SKILLS / "json.jsonl")[0]
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    found = ask(url, messages=item.messages, response_format=form).choices[0]
    assert found.finish_reason == "stop"
    assert json.loads(found.message.content) == json.loads(item.expected)


@pytest.mark.parametrize("thinking", [True, None])
def test_a_bound_answer_is_valid_or_cut_off_whatever_was_asked(
    url: str, thinking: bool | None
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    choice = ask(
        url, response_format=form, max_tokens=120, extra_body={"enable_thinking": thinking}
    ).choices[0]
    if choice.finish_reason == "stop":
        assert set(json.loads(choice.message.content)) == set(SCHEMA["properties"])
    else:
        assert choice.finish_reason == "length"
        assert thinking or choice.message.content.startswith("{")


def test_a_bound_answer_is_gone_on_with(url: str) -> None:
    """Wherever it was cut, the whole meets its schema, alone and in company to the same letter."""
    item = load(SKILLS / "json.jsonl")[0]
    form = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA}}
    answer = text(url, messages=item.messages, response_format=form)

    def rest(at: int) -> str:
        started = {"role": "assistant", "content": answer[:at]}
        return text(url, messages=[*item.messages, started], response_format=form)

    cuts = range(1, len(answer), 5)
    alone = [rest(at) for at in cuts]
    with ThreadPoolExecutor(len(cuts)) as threads:
        assert list(threads.map(rest, cuts)) == alone
    for at, each in zip(cuts, alone, strict=True):
        assert set(json.loads(answer[:at] + each)) == set(SCHEMA["properties"])


def test_a_forced_call_is_made(url: str) -> None:
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    choice = ask(url, messages=asked, tools=[WEATHER], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_a_thought_ends_when_its_budget_is_spent(url: str) -> None:
    thought = {"enable_thinking": True}
    free = ask(url, extra_body=thought, max_tokens=200)
    assert free.choices[0].message.reasoning_content
    short = ask(url, extra_body={**thought, "thinking_budget": 5}, max_tokens=200)
    used = short.usage.completion_tokens_details.reasoning_tokens
    assert used < free.usage.completion_tokens_details.reasoning_tokens


def test_a_conversation_reuses_its_computed_tokens(url: str) -> None:
    messages = [{"role": "system", "content": "You keep a list of words. " * 20}, *question(1, 2)]
    first = ask(url, messages=messages)
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(url, messages=[*messages, reply, *question(3, 4)])
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 2 <= reused < second.usage.prompt_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(child: Child, stream: bool) -> None:
    with leaving(child.url, "/v1/chat/completions", {**ENDLESS, "stream": stream}):
        wait_until(lambda: child.live()["quire_running_sequences"])
    wait_until(lambda: not child.live()["quire_running_sequences"])


ENDLESS = {
    "messages": question(1, 1),
    "stream": True,
    "max_tokens": 20_000,
    "ignore_eos": True,
    "temperature": 2,
}


@pytest.mark.slow
def test_a_deadline_ends_a_request_and_a_dead_engine_is_started_anew(tmp_path: Path) -> None:
    with quire_serve(tmp_path, "--request-timeout", "1.5", "--restarts", "1") as child:
        body = {**ENDLESS, "stream": False}
        late = HTTP.post(f"{child.url}/v1/chat/completions", json=body)
        assert late.status_code == 408
        assert set(late.json()["error"]) == {"message", "type", "param", "code"}
        assert child.live()["quire_running_sequences"] == 0

        _kill_engine(child)
        health = HTTP.get(f"{child.url}/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "failed",
            "reason": "the engine's process ended (signal 9)",
            "models": {"quire-demo": "loading"},
        }
        waiting = HTTP.post(f"{child.url}/v1/chat/completions", json={**body, "max_tokens": 2})
        assert waiting.status_code == 200, waiting.text
        assert HTTP.get(f"{child.url}/health").json()["status"] == "ok"
        assert child.samples()['quire_engine_failures_total{model="quire-demo"}'] == 1

        _kill_engine(child)
        assert child.process.wait(HANG_S) == 1
        assert "no engine can be started any more" in child.log.read_text()


def _kill_engine(child: Child) -> None:
    """Kill the engine of a stream, and check that the stream ends at once with one error."""
    with HTTP.stream("POST", f"{child.url}/v1/chat/completions", json=ENDLESS) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        child.engine.kill()
        rest = list(lines)
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failure"
    assert rest[-1] == "data: [DONE]"
    assert sum('"error"' in line for line in rest) == 1


def test_an_expected_answer_is_drafted_and_counted(url: str) -> None:
    """The answer is the same; `usage` says how much of what was expected came true."""
    words = "The owl cleaned the slow train inside the cellar. The garden was strange."
    fields = {"messages": [{"role": "user", "content": f"Say: {words}"}], "max_tokens": 48}
    plain = ask(url, **fields, extra_body={"speculation": "off"})
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    expected = {"type": "content", "content": words}
    drafted = ask(url, **fields, prediction=expected)
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 5
    assert "quire_accepted_draft_tokens_total{" in HTTP.get(f"{url}/metrics").text
    refused = HTTP.post(f"{url}/v1/chat/completions", json={**fields, "speculation": "mystery"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation"
