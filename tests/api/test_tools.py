"""Tool calls, thoughts and bound answers, in the embedded model's dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from quire.constraints.grammar import GrammarCompiler
from quire.core.request import FinishReason, GrammarSpec
from tests.api.conftest import HTTP, Serve, Served, openai_client
from tests.support.backend import backend_of
from tests.support.scripted_engine import Script
from tests.support.waiting import wait_until

ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


def tool(name: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Any = [tool("get_weather"), tool("get_time")]
CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
OTHER = '<|tool_call>call:get_time{city:<|"|>Rome<|"|>}<tool_call|>'
THOUGHT = "<|channel>thought\nLet me see.<channel|>"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


def create(served: Served, **fields: Any) -> Any:
    sdk = openai_client(served.url)
    fields.setdefault("messages", ASK)
    return sdk.chat.completions.create(model="quire-demo", **fields)


def test_calls_whole_and_streamed(serve: Serve) -> None:
    served = serve(f"{THOUGHT}I look.{CALL}{OTHER}")
    whole = create(served, tools=TOOLS).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
    assert whole.message.reasoning_content.strip() == "Let me see."
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in whole.message.tool_calls]
    assert calls == [("get_weather", {"city": "Oslo"}), ("get_time", {"city": "Rome"})]
    assert len({call.id for call in whole.message.tool_calls}) == 2

    deltas = [chunk.choices[0] for chunk in create(served, tools=TOOLS, stream=True)]
    assert deltas[-1].finish_reason == "tool_calls"
    streamed: dict[int, list[str]] = {}
    for delta in deltas:
        for piece in delta.delta.tool_calls or ():
            call = streamed.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    expected = [[c.function.name, c.function.arguments] for c in whole.message.tool_calls]
    assert [streamed[0], streamed[1]] == expected
    thought = "".join(getattr(d.delta, "reasoning_content", None) or "" for d in deltas)
    assert thought == whole.message.reasoning_content
    assert "".join(d.delta.content or "" for d in deltas) == "I look."


def test_an_answer_of_calls_alone_has_no_content(serve: Serve) -> None:
    message = create(serve(CALL), tools=TOOLS).choices[0].message
    assert message.content is None
    assert message.tool_calls is not None


@pytest.mark.parametrize("stream", [True, False])
def test_one_call_at_a_time(serve: Serve, stream: bool) -> None:
    # All in one output: what follows the call has come with it.
    served = serve(lambda _: Script(served.ids(CALL + OTHER + " and"), group=99, silent=True))
    answer = create(served, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        names = [
            c.function.name for d in chunks for c in d.delta.tool_calls or () if c.function.name
        ]
        reason = chunks[-1].finish_reason
    else:
        names = [call.function.name for call in answer.choices[0].message.tool_calls]
        reason = answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len(served.ids(CALL))
    assert (names, reason) == (["get_weather"], "tool_calls")
    wait_until(lambda: served.engine.tickets[0].aborted is FinishReason.STOP)


def test_a_call_that_is_cut_off_is_no_call(serve: Serve) -> None:
    served = serve(CALL)
    choice = create(served, tools=TOOLS, max_tokens=4).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None


def test_reasoning_tokens_are_counted(serve: Serve) -> None:
    served = serve(f"{THOUGHT}42")
    whole = create(served)
    assert whole.choices[0].message.content == "42"
    assert whole.choices[0].message.reasoning == whole.choices[0].message.reasoning_content
    details = whole.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.completion_tokens


def allows(served: Served, grammar: GrammarSpec | None, text: str) -> bool:
    """Return whether the grammar lets this text through as a whole answer."""
    assert grammar is not None
    tokenizer = served.tokenizer
    compiler = GrammarCompiler(backend_of(tokenizer), tokenizer.vocab_size, tokenizer.eos_ids)
    state = compiler.compile(grammar)
    for token in (*served.ids(text), min(tokenizer.eos_ids)):
        mask = state.mask()
        if mask is not None and not mask[token // 32] >> (token % 32) & 1:
            return False
        state.accept(token)
    return True


def test_forced_calls_are_bound_by_a_grammar(serve: Serve) -> None:
    served = serve(CALL)
    create(served, tools=TOOLS, tool_choice="required")
    create(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "get_time"}}
    create(served, tools=TOOLS, tool_choice=named)
    create(served, tools=TOOLS)
    create(served, tools=TOOLS, tool_choice="none")
    many, one, only, free, none = (request.grammar for request in served.engine.requests)
    assert free is none is None
    assert [allows(served, many, text) for text in (CALL, CALL + OTHER, "Hello")] == [
        True,
        True,
        False,
    ]
    assert [allows(served, one, text) for text in (CALL, CALL + OTHER)] == [True, False]
    assert [allows(served, only, text) for text in (CALL, OTHER)] == [False, True]


def test_a_schema_binds_the_answer(serve: Serve) -> None:
    served = serve('{"n": 4}')
    assert json.loads(create(served, response_format=FORMAT).choices[0].message.content) == {"n": 4}
    create(served, response_format={"type": "json_object"})
    create(served, response_format={"type": "text"})
    schema, json_object, free = (request.grammar for request in served.engine.requests)
    assert free is None
    assert [allows(served, schema, text) for text in ('{"n": 4}', '{"m": 4}')] == [True, False]
    assert [allows(served, json_object, text) for text in ('{"m": [1]}', "[1]")] == [True, False]


def test_with_tools_a_schema_binds_text_outside_of_calls(serve: Serve) -> None:
    served = serve('{"n": 4}')
    create(served, response_format=FORMAT, tools=TOOLS)
    grammar = served.engine.requests[0].grammar
    allowed = [allows(served, grammar, text) for text in ('{"n": 4}', CALL, "Hello", '{"m": 1}')]
    blanks = {n: allows(served, grammar, '{"n":' + " " * n + "4}") for n in (0, 1, 2)}
    assert blanks == {0: True, 1: True, 2: False}
    assert allowed == [True, True, False, False]


def test_a_bound_answer_may_be_thought_about_first(serve: Serve) -> None:
    served = serve('{"n": 4}')
    create(served, response_format=FORMAT, extra_body={"enable_thinking": True})
    create(served, response_format=FORMAT, extra_body={"enable_thinking": False})
    create(served, response_format=FORMAT)
    thinking, plain, default = (request.grammar for request in served.engine.requests)
    assert default == plain  # this template thinks only when asked
    assert allows(served, thinking, THOUGHT + '{"n": 4}')
    assert not allows(served, thinking, THOUGHT + "Hello")
    assert not allows(served, plain, THOUGHT + '{"n": 4}')


LOOSE_CALL = '<|tool_call>call:get_time{town:<|"|>Rome<|"|>}<tool_call|>'


def test_calls_of_strict_tools_are_bound_and_nothing_else(serve: Serve) -> None:
    served = serve(CALL)
    weather = tool("get_weather")["function"] | {"strict": True}
    tools = [{"type": "function", "function": weather}, tool("get_time")]
    create(served, tools=tools)
    create(served, tools=tools, tool_choice="none")
    body = {"model": "quire-demo", "messages": ASK, "max_tokens": 50}
    named = {"name": "get_weather", "input_schema": weather["parameters"], "strict": True}
    loose = {"name": "get_time", "input_schema": weather["parameters"]}
    HTTP.post(f"{served.url}/v1/messages", json={**body, "tools": [named, loose]})
    items = [
        {"type": "function", "name": "get_weather", **weather},
        {"type": "function", **tool("get_time")["function"]},
    ]
    HTTP.post(f"{served.url}/v1/responses", json={"input": "Oslo?", "tools": items})
    grammar, none, *others = (request.grammar for request in served.engine.requests)
    assert none is None
    assert others == [grammar, grammar]
    for text, allowed in (
        ("Sure.", True),
        (f"{THOUGHT}I look.{CALL}\n{OTHER} and", True),
        (LOOSE_CALL, True),
        (CALL.replace("city", "town"), False),
        (f"<|channel>thought\nhm{CALL.replace('city', 'town')}", False),
    ):
        assert allows(served, grammar, text) is allowed, text


def test_a_strict_tool_whose_schema_no_grammar_can_hold_is_named(serve: Serve) -> None:
    bad = tool("f")["function"] | {
        "parameters": {"type": "object", "properties": {"a": {"type": "?"}}}
    }
    served = serve("Hi.")
    create(served, tools=[*TOOLS, {"type": "function", "function": bad}])
    with pytest.raises(BadRequestError) as caught:
        create(served, tools=[*TOOLS, {"type": "function", "function": bad | {"strict": True}}])
    assert caught.value.param == "tools[2].function.parameters"
    listed = bad | {"parameters": {"type": "array"}, "strict": True}
    with pytest.raises(BadRequestError, match="must be of type 'object'"):
        create(served, tools=[{"type": "function", "function": listed}])


def test_a_call_within_a_thought_is_bound_too(serve: Serve) -> None:
    served = serve(CALL)
    create(served, tools=TOOLS, tool_choice="required", extra_body={"enable_thinking": True})
    grammar = served.engine.requests[0].grammar
    assert allows(served, grammar, THOUGHT + CALL)
    assert allows(served, grammar, f"<|channel>thought\nhm{CALL}")
    assert not allows(served, grammar, f"<|channel>thought\nhm{CALL.replace('city', 'town')}")


def test_thinking_is_asked_of_the_template_and_limited_by_the_engine(serve: Serve) -> None:
    served = serve("42")
    create(served)
    create(served, extra_body={"enable_thinking": True, "thinking_budget": 7})
    create(served, reasoning_effort="low", max_tokens=100)
    create(served, reasoning_effort="none")
    create(served, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    prompts = [served.tokenizer.decode(request.prompt) for request in served.engine.requests]
    assert ["<|think|>" in prompt for prompt in prompts] == [False, True, True, False, True]
    budgets = [request.thinking for request in served.engine.requests]
    assert [None if each is None else each.max_tokens for each in budgets] == [
        None,
        7,
        20,
        None,
        None,
    ]
    assert budgets[1] is not None
    assert served.tokenizer.decode(budgets[1].end_ids) == "<channel|>"


def test_a_tool_whose_schema_no_grammar_can_hold_is_named(serve: Serve) -> None:
    bad = tool("f")
    bad["function"]["parameters"] = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    with pytest.raises(BadRequestError) as caught:
        create(serve(), tools=[*TOOLS, bad], tool_choice="required")
    assert caught.value.param == "tools[2].function.parameters"


def test_properties_of_any_value_are_shown_to_templates_that_read_objects(serve: Serve) -> None:
    """Rust's schemars writes `true` for any JSON value; this template reads keys of properties."""
    free = {"type": "object", "properties": {"x": True, "y": {"properties": {"z": False}}}}
    call = "<|tool_call>call:f{x:5}<tool_call|>"
    served = serve(call)
    (made,) = create(
        served, tools=[{"type": "function", "function": {"name": "f", "parameters": free}}]
    ).choices
    assert json.loads(made.message.tool_calls[0].function.arguments) == {"x": 5}
    body = {"messages": ASK, "max_tokens": 50, "tools": [{"name": "f", "input_schema": free}]}
    (block,) = HTTP.post(f"{served.url}/v1/messages", json=body).json()["content"]
    assert block["input"] == {"x": 5}


def test_a_message_can_be_gone_on_with(serve: Serve) -> None:
    served = serve(" was a fox")
    messages = [*ASK, {"role": "assistant", "content": "There"}]
    body = {"messages": messages, "continue_final_message": True}
    assert HTTP.post(f"{served.url}/v1/chat/completions", json=body).status_code == 200
    assert served.tokenizer.decode(served.engine.requests[0].prompt).endswith("There")


LONG_CALL = f'<|tool_call>call:get_weather{{city:<|"|>{"a long name, " * 20}<|"|>}}<tool_call|>'


def test_arguments_are_streamed_as_they_are_written(serve: Serve) -> None:
    served = serve(LONG_CALL)
    chunks = [chunk.choices[0].delta for chunk in create(served, tools=TOOLS, stream=True)]
    pieces = [c.function.arguments for d in chunks for c in d.tool_calls or () if c.function]
    assert json.loads("".join(filter(None, pieces))) == {"city": "a long name, " * 20}
    assert len(pieces) > 20


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_a_call_that_is_cut_off_harms_no_answer(serve: Serve, route: str) -> None:
    served = serve(LONG_CALL)
    function = TOOLS[0]["function"]
    asked: dict[str, Any] = {
        "chat/completions": {"messages": ASK, "tools": TOOLS, "max_tokens": 30},
        "responses": {
            "input": "Hello",
            "tools": [{"type": "function", "strict": False, **function}],
            "max_output_tokens": 30,
        },
        "messages": {
            "messages": ASK,
            "tools": [{"name": "get_weather", "input_schema": function["parameters"]}],
            "max_tokens": 30,
        },
    }[route]
    url = f"{served.url}/v1/{route}"
    whole = HTTP.post(url, json={"model": "quire-demo", **asked}).json()
    streamed = HTTP.post(url, json={"model": "quire-demo", "stream": True, **asked})
    assert streamed.status_code == 200
    assert "get_weather" in streamed.text
    match route:
        case "chat/completions":
            assert whole["choices"][0]["finish_reason"] == "length"
            (call,) = whole["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "get_weather"
        case "responses":
            assert [item["status"] for item in whole["output"]] == ["incomplete"]
        case "messages":
            (block,) = whole["content"]
            assert (whole["stop_reason"], block["type"]) == ("max_tokens", "tool_use")


def test_what_no_grammar_enforces_is_said(serve: Serve) -> None:
    served = serve('{"tags": []}')
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags, "é": {"not": {"type": "null"}}}}
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    fields = {"model": "quire-demo", "messages": ASK, "response_format": named}
    for stream in (False, True):
        url = f"{served.url}/v1/chat/completions"
        answer = HTTP.post(url, json={**fields, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["x-quire-unenforced"] == "tags: uniqueItems; \\u00e9: not"


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses", "ollama"])
def test_two_tools_of_one_name_are_refused_by_name(serve: Serve, path: str) -> None:
    function = tool("get_weather")["function"]
    one: Any = tool("get_weather")
    if path == "messages":
        one = {"name": function["name"], "input_schema": function["parameters"]}
    elif path == "responses":
        one = {"type": "function", **function}
    asked: Any = {"input": "Hi."} if path == "responses" else {"messages": ASK}
    asked |= {"max_tokens": 3} if path == "messages" else {}
    url = "/api/chat" if path == "ollama" else f"/v1/{path}"
    answer = HTTP.post(f"{serve('Hi.').url}{url}", json={**asked, "tools": [one, one]})
    assert answer.status_code == 400
    said = "'tools[1]' holds 'get_weather', which is also the name of an earlier tool."
    assert said in answer.text
