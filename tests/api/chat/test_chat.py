"""Chat completions through the official SDK."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError, OpenAI

from quire.core.request import Failure, Request
from tests.api.conftest import HTTP, Serve, Served, openai_client
from tests.support.scripted_engine import Script
from tests.support.server import leaving
from tests.support.waiting import wait_until

TEXT = "The quick brown fox — naïve, 日本語."
ASK: Any = [{"role": "user", "content": "Say something."}]


def client(served: Served) -> OpenAI:
    return openai_client(served.url)


def test_whole_and_streamed_answers_agree(serve: Serve) -> None:
    served = serve(TEXT)
    sdk = client(served)
    whole = sdk.chat.completions.create(model="quire-demo", messages=ASK)
    chunks = list(sdk.chat.completions.create(model="quire-demo", messages=ASK, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == streamed == TEXT
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert whole.usage.completion_tokens == len(served.ids(TEXT)) + 1  # the end token


def test_the_reading_of_a_prompt_is_told_when_asked_for(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6), cached_tokens=3, reads=(5, 9)))
    told: dict[bool, list[Any]] = {}
    for asked in (True, False):
        chunks = client(served).chat.completions.create(
            model="quire-demo",
            messages=ASK,
            stream=True,
            extra_body={"return_progress": asked} if asked else {},
        )
        told[asked] = [getattr(chunk, "prompt_progress", None) for chunk in chunks]
    total = len(served.engine.requests[0].prompt)
    assert [
        each and (each["processed"], each["cache"], each["total"], each["left_ms"])
        for each in told[True][:3]
    ] == [
        (5, 3, total, None),
        (9, 3, total, None),
        None,
    ]
    assert not any(told[False])
    body = {"messages": ASK, "return_progress": True}
    whole = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert whole.headers["x-quire-ignored-fields"] == "return_progress"


def test_usage_comes_last_when_asked_for(serve: Serve) -> None:
    served = serve(
        lambda _: Script((5, 6, 7), cached_tokens=3, reuse="first difference at token 3")
    )
    chunks = list(
        client(served).chat.completions.create(
            model="quire-demo", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (4, 3)
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens + 4


def test_usage_so_far_comes_with_every_chunk(serve: Serve) -> None:
    served = serve(lambda _: Script(served.ids("One two three four"), cached_tokens=3))
    options: Any = {"continuous_usage_stats": True}
    chunks = list(
        client(served).chat.completions.create(
            model="quire-demo", messages=ASK, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    whole = len(served.ids("One two three four")) + 1
    assert 0 < counts[0] <= counts[-1] == whole
    assert counts == sorted(counts)
    assert chunks[-1].choices == []


@pytest.mark.parametrize("stream", [True, False])
def test_headers_report_reused_tokens(serve: Serve, stream: bool) -> None:
    served = serve(lambda _: Script((5, 6), cached_tokens=3, reuse="first difference at token 3"))
    answer = HTTP.post(
        f"{served.url}/v1/chat/completions", json={"messages": ASK, "stream": stream}
    )
    assert answer.headers["x-quire-cached-tokens"] == "3"
    assert answer.headers["x-quire-cache-reuse"] == "first difference at token 3"
    assert len(answer.headers["x-request-id"]) == 32


def test_several_choices_have_their_own_seeds_and_texts(serve: Serve) -> None:
    def script(request: Request) -> Script:
        index = int(request.id.rsplit("-", 1)[1])
        return Script(served.ids(f"choice {index}"), delay_s=0.001 * (3 - index))

    served = serve(script)
    sdk = client(served)
    whole = sdk.chat.completions.create(model="quire-demo", messages=ASK, n=3, seed=11)
    assert [c.message.content for c in whole.choices] == ["choice 0", "choice 1", "choice 2"]
    assert len({request.sampling.seed for request in served.engine.requests}) == 3
    assert served.engine.requests[0].sampling.seed == 11
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    texts = ["", "", ""]
    ends: list[int] = []
    for chunk in sdk.chat.completions.create(
        model="quire-demo", messages=ASK, n=3, seed=11, stream=True
    ):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == ["choice 0", "choice 1", "choice 2"]
    assert sorted(ends) == [0, 1, 2]


def test_without_a_seed_no_two_requests_have_the_same(serve: Serve) -> None:
    served = serve()
    for _ in range(2):
        client(served).chat.completions.create(model="quire-demo", messages=ASK)
    first, second = (request.sampling.seed for request in served.engine.requests)
    assert first != second


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_answer_and_the_engines_work(serve: Serve, stream: bool) -> None:
    served = serve(
        lambda _: Script(served.ids("one two STOP three four five"), delay_s=0.005, silent=True)
    )
    answer = client(served).chat.completions.create(
        model="quire-demo", messages=ASK, stop=["STOP", "never"], stream=stream
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        end = chunks[-1].choices[0]
    else:
        text, end = answer.choices[0].message.content, answer.choices[0]
    assert text == "one two "
    assert (end.finish_reason, end.stop_reason) == ("stop", "STOP")
    wait_until(lambda: served.engine.tickets[0].aborted)


def test_sampling_reaches_the_engine(serve: Serve) -> None:
    served = serve()
    client(served).chat.completions.create(
        model="quire-demo",
        messages=ASK,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"7": 5, "9": -100},
        seed=-1,
        max_completion_tokens=9,
        max_tokens=33,
        logprobs=True,
        top_logprobs=2,
        extra_body={
            "top_k": 12,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "stop_token_ids": [99],
            "ignore_eos": True,
            "cache_salt": "tenant",
        },
    )
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 12)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
    assert sampling.logit_bias == ((7, 5.0), (9, -100.0))
    assert (sampling.seed, sampling.logprobs) == (2**63 - 1, 2)
    assert request.max_tokens == 9
    assert request.stop_token_ids == {99}
    assert request.cache_salt == "tenant"


def test_the_answer_may_fill_the_context_and_no_more(serve: Serve) -> None:
    served = serve(context_length=100)
    sdk = client(served)
    sdk.chat.completions.create(model="quire-demo", messages=ASK)
    sdk.chat.completions.create(model="quire-demo", messages=ASK, max_tokens=131072)
    room = 100 - len(served.engine.requests[0].prompt)
    assert [request.max_tokens for request in served.engine.requests] == [room, room]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_too_long_is_refused_with_both_numbers(serve: Serve, stream: bool) -> None:
    served = serve(context_length=50)
    with pytest.raises(BadRequestError) as caught:
        client(served).chat.completions.create(
            model="quire-demo", messages=[{"role": "user", "content": "word " * 90}], stream=stream
        )
    assert caught.value.code == "context_length_exceeded"
    assert "50" in caught.value.message
    assert served.engine.requests == []


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_every_token(serve: Serve, stream: bool) -> None:
    served = serve(TEXT)
    answer = client(served).chat.completions.create(
        model="quire-demo", messages=ASK, logprobs=True, top_logprobs=2, stream=stream
    )
    pieces = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    entries = [entry for piece in pieces if piece for entry in piece.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == TEXT + "<eos>"
    assert all(entry.logprob == -0.5 for entry in entries)
    assert all([top.logprob for top in entry.top_logprobs] == [-0.5, -1.5] for entry in entries)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_reasoning_have_a_list_of_their_own(serve: Serve, stream: bool) -> None:
    thought = "<|channel>thought\nHm.<channel|>"
    answer = client(serve(f"{thought}Hi")).chat.completions.create(
        model="quire-demo", messages=ASK, logprobs=True, stream=stream
    )
    pieces = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    found = {"content": "", "reasoning_content": ""}
    for piece in pieces:
        for name, entries in piece.model_dump(exclude_none=True).items() if piece else ():
            found[name] += "".join(entry["token"] for entry in entries)
    assert found == {"content": "Hi<eos>", "reasoning_content": thought}


def test_an_unknown_model_is_refused_naming_the_one_served(serve: Serve) -> None:
    with pytest.raises(NotFoundError, match="quire-demo") as caught:
        client(serve()).chat.completions.create(model="gpt-4", messages=ASK)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_keeps_its_status(serve: Serve, stream: bool) -> None:
    failure = Failure("Too much for the KV budget.", 400, "invalid_request_error", "messages", "kv")
    served = serve(lambda _: Script(error=failure))
    with pytest.raises(BadRequestError, match="KV budget") as caught:
        client(served).chat.completions.create(model="quire-demo", messages=ASK, stream=stream)
    assert (caught.value.param, caught.value.code) == ("messages", "kv")


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_are_numbers_whatever_the_model_computes(
    serve: Serve, stream: bool
) -> None:
    served = serve(lambda _: Script(served.ids("Hi"), logprob=float("nan")))
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2, "stream": stream}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert '"logprob":-9999' in answer.text
    assert "NaN" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_engine_died_may_be_sent_again(serve: Serve, stream: bool) -> None:
    failure = Failure("The engine's process ended.", 503, "server_error", code="engine_failure")
    served = serve(lambda _: Script(error=failure))
    answer = HTTP.post(
        f"{served.url}/v1/chat/completions", json={"messages": ASK, "stream": stream}
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_failure_in_mid_stream_is_one_error_and_an_end(serve: Serve) -> None:
    failure = Failure("The sampler failed.", 500, code="sampler")
    served = serve(lambda _: Script(served.ids("half an"), error=failure))
    stream = client(served).chat.completions.create(model="quire-demo", messages=ASK, stream=True)
    pieces: list[str] = []
    with pytest.raises(APIError, match="The sampler failed"):
        pieces.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(pieces) == "half an"
    with HTTP.stream(
        "POST", f"{served.url}/v1/chat/completions", json={"messages": ASK, "stream": True}
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "sampler"
    assert lines[-1] == "data: [DONE]"
    with pytest.raises(InternalServerError):
        client(served).chat.completions.create(model="quire-demo", messages=ASK)


def test_a_choice_that_fails_ends_the_stream_of_all(serve: Serve) -> None:
    failure = Failure("The sampler failed.", 500, code="sampler")
    served = serve(lambda _: Script(served.ids("half an"), error=failure))

    def second_fails(request: Request) -> Script:
        failing = request.id.endswith("-1")
        return Script(served.ids("half an"), error=failure if failing else None, silent=not failing)

    for script in (served.engine.script, second_fails):
        served.engine.reset(script)
        body = {"messages": ASK, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        with HTTP.stream("POST", f"{served.url}/v1/chat/completions", json=body) as raw:
            lines = [line for line in raw.iter_lines() if line]
        assert ['"error"' in line for line in lines].index(True) == len(lines) - 2
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "sampler"
        assert lines[-1] == "data: [DONE]"
        served.settle()
        assert all(ticket.ended or ticket.aborted for ticket in served.engine.tickets)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine(serve: Serve, stream: bool, n: int) -> None:
    served = serve(lambda _: Script((5, 6, 7), delay_s=0.002, silent=True))
    body = {"messages": ASK, "stream": stream, "n": n}
    with leaving(served.url, "/v1/chat/completions", body) as raw:
        wait_until(lambda: len(served.engine.tickets) == n)
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: all(ticket.aborted for ticket in served.engine.tickets))


def test_a_slow_reader_loses_nothing(serve: Serve) -> None:
    tokens = 30_000
    served = serve(lambda _: Script(words), context_length=10**6)
    words = (served.ids("word ") * tokens)[:tokens]
    body = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{served.url}/v1/chat/completions", json=body) as raw:
        wait_until(lambda: all(ticket.ended for ticket in served.engine.tickets))
        events = [line.removeprefix("data: ") for line in raw.iter_lines() if line]
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == served.tokenizer.decode(words)
    assert chunks[-1]["usage"]["completion_tokens"] == tokens + 1
    assert len(chunks) < tokens  # what waited came merged


def test_a_slow_reader_of_several_choices_loses_nothing(serve: Serve) -> None:
    served = serve(lambda r: Script(words[: 9000 + int(r.id[-1])]), context_length=10**6)
    words = (served.ids("word ") * 9002)[:9002]
    body = {"messages": ASK, "stream": True, "n": 2}
    texts = ["", ""]
    with HTTP.stream("POST", f"{served.url}/v1/chat/completions", json=body) as raw:
        wait_until(lambda: all(ticket.ended for ticket in served.engine.tickets))
        for line in raw.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [served.tokenizer.decode(words[: 9000 + index]) for index in range(2)]


@pytest.mark.parametrize("fails", [False, True])
def test_silence_before_the_first_token_is_broken(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr("quire.api.shared.sse.KEEPALIVE_S", 0.02)
    failure, silence = Failure("No room.", 400, code="full"), threading.Event()
    served = serve(
        lambda _: Script(served.ids("Hi."), held=silence, error=failure if fails else None)
    )
    body = {"messages": ASK, "stream": True}
    with HTTP.stream("POST", f"{served.url}/v1/chat/completions", json=body) as raw:
        events = raw.iter_lines()
        assert next(events).startswith(": ")
        silence.set()
        lines = [line for line in events if line]
    assert lines[-1] == "data: [DONE]"
    assert ('"code":"full"' in lines[-2]) is fails


def test_a_failed_engine_refuses_and_health_says_so(serve: Serve) -> None:
    served = serve()
    assert HTTP.get(f"{served.url}/health").status_code == 200
    served.engine.failure = "out of memory"
    with pytest.raises(InternalServerError, match="out of memory"):
        client(served).chat.completions.create(model="quire-demo", messages=ASK)
    health = HTTP.get(f"{served.url}/health")
    assert (health.status_code, health.json()["reason"]) == (503, "out of memory")
