"""OpenAI's responses through the official SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI
from pydantic import BaseModel

from quire.core.config import ServerConfig
from quire.core.request import Failure
from tests.api.conftest import Serve, Served, openai_client
from tests.support.scripted_engine import Script

THOUGHT = "<|channel>thought\nI need the weather.<channel|>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client(served: Served) -> OpenAI:
    return openai_client(served.url)


def create(served: Served, **fields: Any) -> Any:
    return client(served).responses.create(**{"model": "quire-demo", "input": "Hi.", **fields})


def streamed(served: Served, **fields: Any) -> Any:
    *_, last = create(served, stream=True, **fields)
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(served.engine.requests[-1].prompt)


def plain(response: Any) -> dict[str, Any]:
    """Return a response without what is made anew each time."""
    body: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        body.pop(name)
    for item in body["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return body


@pytest.mark.parametrize(
    "text", ["Fine — naïve, 日本語.", f"{THOUGHT}Hm.{CALL}{CALL}", THOUGHT, ""]
)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_whole_and_streamed_responses_are_equal(serve: Serve, text: str, summary: Any) -> None:
    served = serve(text)
    fields = {"tools": [TOOL], "reasoning": {"effort": "low", "summary": summary}}
    whole = create(served, **fields)
    assert plain(whole) == plain(streamed(served, **fields))
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == {
        "F": ["message"],
        "<": ["reasoning", "message"],
        "": ["message"],
    }[text[:1]] + (["function_call"] * 2 if CALL in text else [])
    if text.startswith("<"):
        thought = whole.output[0]
        parts, others = thought.content, thought.summary
        if summary:
            parts, others = others, parts
        assert [part.text for part in parts] == ["I need the weather."]
        assert not others
    if CALL in text:
        assert json.loads(whole.output[-1].arguments) == {"city": "Oslo"}


def test_the_sdks_own_fold_agrees(serve: Serve) -> None:
    served = serve(f"{THOUGHT}Hm.{CALL}")
    with client(served).responses.stream(model="quire-demo", input="Hi.", tools=[TOOL]) as stream:
        for _ in stream:
            pass
        folded = stream.get_final_response()
    assert folded.output_text == "Hm."
    assert [item.type for item in folded.output] == ["reasoning", "message", "function_call"]


def test_the_sdks_parsed_answers(serve: Serve) -> None:
    class Number(BaseModel):
        n: int

    served = serve('{"n": 4}')
    fields: Any = {"model": "quire-demo", "input": "Hi.", "text_format": Number}
    assert client(served).responses.parse(**fields).output_parsed == Number(n=4)
    with client(served).responses.stream(**fields) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Number(n=4)


def test_usage(serve: Serve) -> None:
    tokens = serve().ids(f"{THOUGHT}Yes.")
    served = serve(lambda _: Script(tokens, cached_tokens=5))
    for response in (create(served), streamed(served)):
        usage = response.usage
        assert usage.input_tokens == len(served.engine.requests[-1].prompt)
        assert usage.input_tokens_details.cached_tokens == 5
        assert usage.output_tokens == len(tokens) + 1  # and the end of the turn
        assert 0 < usage.output_tokens_details.reasoning_tokens < len(tokens)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_response_repeats_its_request(serve: Serve) -> None:
    response = create(
        serve("x"),
        instructions="Be brief.",
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=99,
        metadata={"a": "b"},
        reasoning={"effort": "high"},
        text={"format": {"type": "text"}},
        truncation="disabled",
        user="u",
    )
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 99)
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    assert response.tools[0].to_dict() == TOOL
    assert response.parallel_tool_calls is False
    assert response.metadata == {"a": "b"}
    assert response.reasoning.effort == "high"
    assert response.model == "quire-demo"


def test_sampling_reaches_the_engine(serve: Serve) -> None:
    served = serve("x")
    create(served, temperature=0.5, top_p=0.25, max_output_tokens=9, extra_body={"kv_bits": 4})
    request = served.engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.25)
    assert request.max_tokens == 9
    assert request.kv_format is not None
    assert request.kv_format.name == "page-4"


def test_effort_limits_thoughts(serve: Serve) -> None:
    served = serve("x")
    create(served, reasoning={"effort": "low"}, max_output_tokens=100)
    assert served.engine.requests[-1].thinking.max_tokens == 20  # type: ignore[union-attr]
    assert "<|think|>" in prompt_of(served)
    create(served, reasoning={"effort": "none"})
    assert "<|think|>" not in prompt_of(served)


def test_a_tool_loop_by_id_and_by_value(serve: Serve) -> None:
    served = serve(f"{THOUGHT}I look.{CALL}")
    first = create(served, tools=[TOOL], instructions="Be kind.")
    output = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": [{"type": "input_text", "text": "4 degrees"}],
    }
    create(served, tools=[TOOL], previous_response_id=first.id, input=[output])
    by_id = prompt_of(served)
    conversation = [{"role": "user", "content": "Hi."}, *first.output, output]
    create(served, tools=[TOOL], input=conversation, store=False)
    assert prompt_of(served) == by_id
    dumped = [item.model_dump() for item in first.output]
    create(served, tools=[TOOL], input=[conversation[0], *dumped, output])
    assert prompt_of(served) == by_id
    assert "thought\nI need the weather." in by_id
    assert "I look." in by_id
    assert 'response:get_weather{value:<|"|>4 degrees<|"|>}' in by_id
    assert "Be kind." not in by_id  # instructions are each request's own
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    create(served, tools=[TOOL], input=[conversation[0], *references, output])
    assert prompt_of(served) == by_id


def test_a_chain_outlives_its_links(serve: Serve) -> None:
    served = serve("Hello.")
    first = create(served, input="One.")
    second = create(served, input="Two.", previous_response_id=first.id)
    client(served).responses.delete(first.id)
    create(served, input="Three.", previous_response_id=second.id)
    prompt = prompt_of(served)
    assert [prompt.count(word) for word in ("One.", "Two.", "Three.", "Hello.")] == [1, 1, 1, 2]


def test_stored_responses_are_got_and_deleted(serve: Serve) -> None:
    served = serve("Hello.")
    responses = client(served).responses
    for response in (create(served), streamed(served)):
        assert responses.retrieve(response.id).to_dict() == response.to_dict()
        responses.delete(response.id)
        with pytest.raises(NotFoundError):
            responses.retrieve(response.id)
        with pytest.raises(NotFoundError):
            responses.delete(response.id)
        with pytest.raises(BadRequestError, match="previous_response_id"):
            create(served, previous_response_id=response.id)
    unstored = create(served, store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(NotFoundError):
        responses.retrieve(unstored.id)


def test_the_store_is_bounded(serve: Serve) -> None:
    served = serve("Hello.", ServerConfig(stored_responses=2))
    ids = [create(served).id for _ in range(3)]
    responses = client(served).responses
    with pytest.raises(NotFoundError):
        responses.retrieve(ids[0])
    for kept in ids[1:]:
        assert responses.retrieve(kept).id == kept


def test_sealed_thoughts_come_back(serve: Serve) -> None:
    served = serve(THOUGHT + CALL)
    fields: Any = {
        "tools": [TOOL],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
    }
    first = create(served, **fields)
    thought, call = first.output
    signed = thought.encrypted_content
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}

    def back(**changes: Any) -> Any:
        item = {**thought.to_dict(), "summary": [], **changes}
        conversation = [{"role": "user", "content": "Hi."}, item, call, output]
        return create(served, **fields, input=conversation)

    response = back(encrypted_content=signed)
    assert "thought\nI need the weather." in prompt_of(served)
    assert "input_transformations" not in response.to_dict()
    response = back(encrypted_content="gAAAAABo" + signed)
    assert "I need the weather." not in prompt_of(served)
    (removed,) = response.to_dict()["input_transformations"]
    assert (removed["id"], removed["action"]) == (thought.id, "removed")
    assert "encrypted_content" not in create(served, tools=[TOOL]).output[0].to_dict()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_off(serve: Serve, stream: bool) -> None:
    served = serve("one two three four five six")
    response = (streamed if stream else create)(served, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_is_read_into_the_cache_and_not_answered(serve: Serve, stream: bool) -> None:
    served = serve("one two three")
    options = {"prewarm": True, "mode": "implicit"}
    response = (streamed if stream else create)(served, prompt_cache_options=options)
    assert (response.status, response.output, response.incomplete_details) == (
        "completed",
        [],
        None,
    )
    assert response.usage.output_tokens == 0
    after = create(served, input="Go on.", previous_response_id=response.id)
    assert after.output_text == "one two three"
    answered = create(served, prompt_cache_options={**options, "prewarm": False})
    assert answered.output_text == "one two three"


def test_an_answer_that_must_meet_a_schema(serve: Serve) -> None:
    served = serve('{"n": 4}')
    schema = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    response = create(served, text={"format": wanted})
    assert json.loads(response.output_text) == {"n": 4}
    assert response.text.format.to_dict() == wanted
    grammar = served.engine.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema | {"additionalProperties": False}
    create(served, text={"format": {"type": "json_object"}})
    assert served.engine.requests[-1].grammar is not None


def test_tool_choices(serve: Serve) -> None:
    served = serve(CALL)
    loose = {**TOOL, "strict": False}
    tools = [loose, {**loose, "name": "get_time"}]

    def grammar(choice: Any) -> str:
        create(served, tools=tools, tool_choice=choice)
        bound = served.engine.requests[-1].grammar
        return "" if bound is None else bound.source

    assert grammar("auto") == ""
    assert "get_time" in grammar("required")
    assert "get_time" not in grammar({"type": "function", "name": "get_weather"})
    one = [{"type": "function", "name": "get_weather"}]
    assert "get_time" not in grammar({"type": "allowed_tools", "mode": "required", "tools": one})
    assert grammar({"type": "allowed_tools", "mode": "auto", "tools": one}) == ""
    assert "get_time" not in prompt_of(served)
    assert grammar("none") == ""
    assert "get_weather" not in prompt_of(served)


def test_one_call_at_a_time_if_so_asked(serve: Serve) -> None:
    response = create(serve(CALL + CALL), tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(serve: Serve, stream: bool) -> None:
    served = serve("Yes.")
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = (streamed if stream else create)(served, **fields)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith("Yes.")
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)


def test_system_messages_at_the_start_are_one(serve: Serve) -> None:
    served = serve("x")
    items = [
        {"type": "message", "role": "developer", "content": [_text("Be polite.")]},
        {"type": "message", "role": "user", "content": [_text("The time is 4.")]},
        {"type": "message", "role": "user", "content": [_text("Hello.")]},
        {"type": "message", "role": "assistant", "content": [_text("Yes?", "output_text")]},
        {"role": "system", "content": "Be rude."},
        {"role": "user", "content": "Bye."},
    ]
    create(served, instructions="Be brief.", input=items)
    prompt = prompt_of(served)
    assert "<|turn>system\nBe brief.\nBe polite.<turn|>" in prompt
    assert "<|turn>user\nThe time is 4.\nHello.<turn|>" in prompt
    assert prompt.index("Yes?") < prompt.index("<|turn>system\nBe rude.<turn|>")


def _text(text: str, kind: str = "input_text") -> dict[str, str]:
    return {"type": kind, "text": text}


def test_truncation_cuts_the_oldest_turns(serve: Serve) -> None:
    served = serve("x", context_length=256)
    items = [{"role": "user", "content": f"Question {n}: " + "word " * 20} for n in range(12)]
    turns = [each for item in items for each in (item, {"role": "assistant", "content": "Hm."})]
    fields: Any = {"input": turns[:-1], "instructions": "Be brief."}
    with pytest.raises(BadRequestError, match="context"):
        create(served, **fields)
    create(served, truncation="auto", **fields)
    prompt = prompt_of(served)
    assert "Be brief." in prompt
    assert "Question 11:" in prompt
    assert "Question 0:" not in prompt
    assert 100 < len(served.engine.requests[-1].prompt) <= 256 - 32


@pytest.mark.parametrize("stream", [True, False])
def test_an_engines_error_keeps_its_kind(serve: Serve, stream: bool) -> None:
    failure = Failure("Too long.", 400, "invalid_request_error", code="context_length_exceeded")
    served = serve(lambda _: Script(error=failure))
    with pytest.raises(BadRequestError) as raised:
        create(served, stream=stream)
    assert raised.value.code == "context_length_exceeded"


def test_a_stream_that_breaks_says_so(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6), error=Failure("It broke.")))
    *_, last = create(served, stream=True)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.message) == ("failed", "It broke.")
    with pytest.raises(NotFoundError):
        client(served).responses.retrieve(last.response.id)
    with pytest.raises(InternalServerError, match="It broke"):
        create(served)
