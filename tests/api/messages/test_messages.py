"""Anthropic's messages through the official SDK."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError, InternalServerError, beta_tool
from pydantic import BaseModel

from quire.core.config import ServerConfig
from quire.core.request import Failure
from tests.api.conftest import HTTP, Serve, Served
from tests.support.scripted_engine import Script

ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
THOUGHT = "<|channel>thought\nI need the weather.<channel|>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
THINK: Any = {"type": "enabled", "budget_tokens": 64}


def client(served: Served, **options: Any) -> Anthropic:
    return _client(served.url, **(options or {"api_key": "none"}))


@cache
def _client(url: str, **options: Any) -> Anthropic:
    """Return a cached client, because making one reads every certificate of the machine."""
    return Anthropic(base_url=url, max_retries=0, **options)


def create(served: Served, **fields: Any) -> Any:
    fields = {"model": "quire-demo", "max_tokens": 256, "messages": ASK, **fields}
    return client(served).messages.create(**fields)


def streamed(served: Served, **fields: Any) -> Any:
    fields = {"model": "quire-demo", "max_tokens": 256, "messages": ASK, **fields}
    with client(served).messages.stream(**fields) as stream:
        return stream.get_final_message()


def prompt_of(served: Served, number: int = -1) -> str:
    return served.tokenizer.decode(served.engine.requests[number].prompt)


def plain(message: Any) -> dict[str, Any]:
    """Return a message without what is made anew each time."""
    body: dict[str, Any] = message.to_dict()
    body.pop("id")
    for block in body["content"]:
        if block["type"] == "tool_use":
            block.pop("id")
        block.pop("parsed_output", None)
    return body


@pytest.mark.parametrize(
    "text", ["Fine — naïve, 日本語.", f"{THOUGHT}Hm.{CALL}{CALL}", THOUGHT, ""]
)
@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_whole_and_streamed_messages_are_equal(serve: Serve, text: str, display: Any) -> None:
    served = serve(text)
    thinking = {**THINK, "display": display} if display else THINK
    whole = create(served, tools=[TOOL], thinking=thinking)
    assert plain(whole) == plain(streamed(served, tools=[TOOL], thinking=thinking))
    kinds = [block.type for block in whole.content]
    if text == f"{THOUGHT}Hm.{CALL}{CALL}":
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.content[0].thinking == ("" if display == "omitted" else "I need the weather.")
        assert whole.content[2].input == {"city": "Oslo", "days": 2}
        assert whole.stop_reason == "tool_use"
    else:
        assert whole.stop_reason == "end_turn"


def test_usage_counts_cached_tokens(serve: Serve) -> None:
    tokens = serve().ids(f"{THOUGHT}Yes.")
    served = serve(lambda _: Script(tokens, cached_tokens=5))
    for message in (create(served), streamed(served)):
        prompt = len(served.engine.requests[-1].prompt)
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 5, 5)
        assert usage.cache_creation_input_tokens == 0
        assert usage.output_tokens == len(tokens) + 1  # and the end of the turn
        assert 0 < usage.output_tokens_details.thinking_tokens < len(tokens)


def test_the_opening_of_a_stream_has_the_prompts_usage(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6), cached_tokens=5))
    fields: Any = {"model": "quire-demo", "max_tokens": 9, "messages": ASK, "stream": True}
    first = next(iter(client(served).messages.create(**fields)))
    assert first.type == "message_start"
    assert first.message.usage.cache_read_input_tokens == 5
    prompt = len(served.engine.requests[-1].prompt)
    assert first.message.usage.input_tokens == prompt - 5


def test_count_tokens_is_exact(serve: Serve) -> None:
    served = serve(THOUGHT)
    conversation: Any = [
        *ASK,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", **_use()}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4°"}],
        },
    ]
    for fields in (
        {"messages": ASK},
        {"messages": conversation, "tools": [TOOL], "system": "Be brief.", "thinking": THINK},
        {"messages": conversation, "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [*ASK, {"role": "assistant", "content": "It is"}]},
    ):
        counted = client(served).messages.count_tokens(model="quire-demo", **fields)
        message = create(served, **fields)
        assert counted.input_tokens == message.usage.input_tokens
        assert counted.input_tokens == len(served.engine.requests[-1].prompt)


def _use() -> dict[str, Any]:
    return {"name": "get_weather", "input": {"city": "Oslo"}}


def test_a_tool_loop_goes_round(serve: Serve) -> None:
    served = serve(f"{THOUGHT}I look.{CALL}")
    first = create(served, tools=[TOOL], thinking=THINK)
    call = first.content[2]
    back: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "4 degrees"}],
                },
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    create(served, messages=back, tools=[TOOL], thinking=THINK)
    prompt = prompt_of(served)
    assert '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>' in prompt
    assert 'response:get_weather{value:<|"|>4 degrees<|"|>}' in prompt
    assert prompt.index("4 degrees") < prompt.index("<|turn>user\nWell?")


def _answered(served: Served, asked: Any, **changes: str) -> list[Any]:
    """Return a conversation whose last answer thought, then called, and got its result."""
    first = create(served, tools=[TOOL], thinking=asked)
    blocks = [block.to_dict() for block in first.content]
    for block in blocks:
        if block["type"] in ("thinking", "redacted_thinking"):
            block.update(changes)
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "4 degrees"}
    return [
        *ASK,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize(
    ("thinking", "kind"),
    [
        (THINK, "thinking"),
        ({"type": "adaptive", "display": "omitted"}, "thinking"),
        ({"type": "adaptive", "display": "updates"}, "thinking"),
        ({"type": "disabled"}, "redacted_thinking"),
        ({"type": "between_tools"}, "redacted_thinking"),
    ],
)
def test_thoughts_come_back(serve: Serve, thinking: Any, kind: str) -> None:
    served = serve(THOUGHT + CALL)
    messages = _answered(served, thinking)
    assert messages[1]["content"][0]["type"] == kind
    assert ("I need" in json.dumps(messages)) == (thinking is THINK)
    message = create(served, messages=messages, tools=[TOOL], thinking=thinking)
    assert "thought\nI need the weather." in prompt_of(served)
    assert "input_transformations" not in message.to_dict()


@pytest.mark.parametrize(
    ("thinking", "changes"),
    [
        (THINK, {"thinking": "I hate the weather."}),
        (THINK, {"signature": "q1.AAAA"}),
        (THINK, {"signature": "naïve"}),
        (THINK, {"signature": ""}),
        ({"type": "adaptive", "display": "omitted"}, {"signature": "EqQBCgIYAhIM.abc"}),
        ({"type": "disabled"}, {"data": "q1.x.eJw"}),
    ],
)
def test_thoughts_that_do_not_verify_are_left_out_and_named(
    serve: Serve, thinking: Any, changes: dict[str, str]
) -> None:
    served = serve(THOUGHT + CALL)
    messages = _answered(served, thinking, **changes)
    for message in (
        create(served, messages=messages, tools=[TOOL]),
        streamed(served, messages=messages, tools=[TOOL]),
    ):
        assert "weather." not in prompt_of(served).split("<|turn>model")[1]
        (dropped,) = message.to_dict()["input_transformations"]
        assert (dropped["type"], dropped["path"]) == ("thinking_dropped", "messages.1.content.0")
    if thinking["type"] != "disabled":
        with pytest.raises(BadRequestError, match=r"messages\[1\].content\[0\]"):
            create(
                served,
                messages=messages,
                tools=[TOOL],
                thinking={**thinking, "block_binding": {"prefix_mismatch_behavior": "error"}},
            )


def test_thoughts_of_a_server_that_signs_none_are_left_out(serve: Serve) -> None:
    served = serve(THOUGHT + CALL)
    messages = _answered(served, THINK)
    del messages[1]["content"][0]["signature"]
    message = create(served, messages=messages, tools=[TOOL])
    assert "weather." not in prompt_of(served).split("<|turn>model")[1]
    (dropped,) = message.to_dict()["input_transformations"]
    assert (dropped["type"], dropped["path"]) == ("thinking_dropped", "messages.1.content.0")


def test_a_conversation_that_searched_the_web_elsewhere_goes_on(serve: Serve) -> None:
    served = serve("Yes.")
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    text = {"type": "text", "text": "Found it."}
    body = {"model": "quire-demo", "max_tokens": 9}
    asked = [
        {**body, "messages": [*ASK, {"role": "assistant", "content": content}, *ASK]}
        for content in ([search, found, text], [text])
    ]
    url = f"{served.url}/v1/messages"
    elsewhere, plain = (HTTP.post(url, json=each) for each in asked)
    assert elsewhere.status_code == 200, elsewhere.text
    left_out = "messages[1].content[0], messages[1].content[1]"
    assert elsewhere.headers["x-quire-ignored-fields"] == left_out
    assert "x-quire-ignored-fields" not in plain.headers
    assert prompt_of(served, 0) == prompt_of(served, 1)


def test_a_signing_key_outlives_the_server(serve: Serve) -> None:
    first = serve(THOUGHT + CALL, ServerConfig(signing_key="k"))
    messages = _answered(first, THINK)
    second = serve(THOUGHT + CALL, ServerConfig(signing_key="k"))
    create(second, messages=messages, tools=[TOOL], thinking=THINK)
    assert "thought\nI need the weather." in prompt_of(second)
    other = serve(THOUGHT + CALL, ServerConfig())
    create(other, messages=messages, tools=[TOOL], thinking=THINK)
    assert "I need the weather." not in prompt_of(other)


def test_clearing_reasoning_keeps_the_last_turns(serve: Serve) -> None:
    served = serve(THOUGHT + CALL)
    messages = _answered(served, THINK)
    again = _answered(serve("<|channel>thought\nOnce more.<channel|>" + CALL), THINK)
    for keep, kept in (({"type": "thinking_turns", "value": 1}, False), ("all", True)):
        edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
        message = client(served).beta.messages.create(
            model="quire-demo",
            max_tokens=99,
            messages=[*messages, *again[1:]],
            tools=[TOOL],
            thinking=THINK,
            context_management=edits,
        )
        prompt = prompt_of(served)
        assert "Once more." in prompt
        assert ("I need the weather." in prompt) == kept
        assert message.context_management is not None
        assert message.context_management.applied_edits == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_sequence_is_named(serve: Serve, stream: bool) -> None:
    served = serve("one two STOP three")
    message = (streamed if stream else create)(served, stop_sequences=["never", "STOP"])
    assert message.content[0].text == "one two "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


@pytest.mark.parametrize("stream", [True, False])
def test_why_an_answer_was_cut_off(serve: Serve, stream: bool) -> None:
    answer = streamed if stream else create
    text = "one two three four five six seven"
    assert answer(serve(text), max_tokens=3).stop_reason == "max_tokens"
    length = len(serve().ids(prompt_of(_asked(serve)))) + 2
    message = answer(serve(text, context_length=length), max_tokens=200)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["one two", "", THOUGHT])
def test_a_prompt_is_read_into_the_cache_and_not_answered(
    serve: Serve, stream: bool, text: str
) -> None:
    served = serve(text)
    message = (streamed if stream else create)(served, max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    assert message.usage.input_tokens == len(served.engine.requests[0].prompt)
    served.settle()
    assert served.engine.tickets[0].over


def test_an_error_of_a_prompt_that_is_only_read(serve: Serve) -> None:
    served = serve(lambda _: Script(error=Failure("No memory.", 503, "server_error")))
    with pytest.raises(InternalServerError, match="No memory"):
        create(served, max_tokens=0)


def _asked(serve: Serve) -> Served:
    served = serve()
    create(served)
    return served


def test_a_budget_leaves_tokens_for_the_answer(serve: Serve) -> None:
    served = serve("x")
    create(served, thinking=THINK)
    assert served.engine.requests[-1].thinking.max_tokens == 64  # type: ignore[union-attr]
    create(served, thinking={"type": "adaptive"}, max_tokens=100)
    assert served.engine.requests[-1].thinking.max_tokens == 80  # type: ignore[union-attr]
    create(served, thinking={"type": "adaptive"}, output_config={"effort": "low"}, max_tokens=100)
    assert served.engine.requests[-1].thinking.max_tokens == 20  # type: ignore[union-attr]
    create(served)
    assert served.engine.requests[-1].thinking is None
    with pytest.raises(BadRequestError, match=r"thinking\.budget_tokens"):
        create(served, thinking=THINK, max_tokens=64)


def test_a_tool_choice_binds_the_answer(serve: Serve) -> None:
    served = serve(CALL)
    other = {**TOOL, "name": "get_time"}
    create(served, tools=[TOOL, other])
    assert served.engine.requests[-1].grammar is None
    create(served, tools=[TOOL, other], tool_choice={"type": "any"})
    grammar = served.engine.requests[-1].grammar
    assert grammar is not None
    assert "get_time" in grammar.source
    create(served, tools=[TOOL, other], tool_choice={"type": "tool", "name": "get_weather"})
    grammar = served.engine.requests[-1].grammar
    assert grammar is not None
    assert "get_time" not in grammar.source
    create(served, tools=[TOOL, other], tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(served)


def test_one_call_at_a_time_if_so_asked(serve: Serve) -> None:
    served = serve(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = create(served, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_an_answer_that_must_meet_a_schema(serve: Serve) -> None:
    served = serve('{"n": 4}')
    schema = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
    message = create(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message.content[0].text) == {"n": 4}
    grammar = served.engine.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema | {"additionalProperties": False}


def test_an_answer_goes_on_from_its_start(serve: Serve) -> None:
    served = serve(" four.")
    create(served, messages=[*ASK, {"role": "assistant", "content": "It is "}])
    assert prompt_of(served).endswith("<|turn>model\nIt is ")


def test_sampling_reaches_the_engine(serve: Serve) -> None:
    served = serve()
    extra = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "kv_bits": 4}
    create(served, extra_body=extra, metadata={"user_id": "u"}, service_tier="auto")
    request = served.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert request.kv_format is not None
    assert request.kv_format.name == "page-4"
    assert request.max_tokens == 256


@pytest.mark.parametrize("stream", [True, False])
def test_an_engines_error_keeps_its_kind(serve: Serve, stream: bool) -> None:
    failure = Failure("Too long.", 400, "invalid_request_error", code="context_length_exceeded")
    served = serve(lambda _: Script(error=failure))
    with pytest.raises(BadRequestError) as raised:
        (streamed if stream else create)(served)
    assert raised.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "Too long.",
            "details": {"error_code": "context_length_exceeded"},
        },
    }


def test_a_stream_that_breaks_says_so(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6), error=Failure("It broke.")))
    with pytest.raises(Exception, match="It broke"):
        streamed(served)
    with pytest.raises(InternalServerError, match="It broke"):
        create(served)


def test_both_kinds_of_keys_open(serve: Serve) -> None:
    served = serve(config=ServerConfig(api_keys=("secret",)))
    fields: Any = {"model": "quire-demo", "max_tokens": 9, "messages": ASK}
    client(served, api_key="secret").messages.create(**fields)
    client(served, auth_token="secret", api_key=None).messages.create(**fields)
    refused = HTTP.post(f"{served.url}/v1/messages", json=fields)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"


def test_the_sdks_tool_runner(serve: Serve) -> None:
    """The SDK's runner asks for a thread first, and goes on without if the server has none."""

    @beta_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return f"Rain in {city}."

    served = serve()
    call, end = served.ids(CALL.replace(",days:2", "")), served.ids("Take an umbrella.")
    served.engine.reset(lambda _: Script(end if len(served.engine.requests) > 1 else call))
    runner = client(served).beta.messages.tool_runner(
        model="quire-demo", max_tokens=99, messages=ASK, tools=[get_weather]
    )
    last = runner.until_done().content[-1]
    assert last.type == "text"
    assert last.text == "Take an umbrella."
    assert "Rain in Oslo." in prompt_of(served)


def test_the_sdks_parsed_answers(serve: Serve) -> None:
    class Number(BaseModel):
        n: int

    served = serve('{"n": 4}')
    fields: Any = {"model": "quire-demo", "max_tokens": 99, "messages": ASK}
    parsed = client(served).messages.parse(**fields, output_format=Number)
    assert parsed.parsed_output == Number(n=4)
    with client(served).messages.stream(**fields, output_format=Number) as stream:
        assert stream.get_final_message().parsed_output == Number(n=4)


def test_models_are_listed_for_this_client_too(serve: Serve) -> None:
    served = serve()
    (model,) = client(served).models.list()
    assert (model.id, model.type, model.display_name) == ("quire-demo", "model", "quire-demo")
    assert client(served).models.retrieve("quire-demo").id == "quire-demo"


def test_a_message_knows_its_request(serve: Serve) -> None:
    assert len(create(serve("x"))._request_id) == 32
