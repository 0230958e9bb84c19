"""Every field is honoured, refused by name, or known to change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.api.chat.endpoint import ChatRequest
from quire.api.completions.endpoint import CompletionRequest
from quire.api.responses.schema import ResponsesRequest
from quire.api.routes import OPERATIONS
from quire.api.shared.schema import Wire, parse
from quire.core.errors import RequestError
from tests.api.conftest import HTTP, Serve
from tests.support.server import JSON_TYPE

ASK = [{"role": "user", "content": "Hi."}]


def post(url: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    if path.endswith("chat/completions"):
        body.setdefault("messages", ASK)
    return HTTP.post(f"{url}{path}", json=body)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("schema", "fields", "said"),
    [
        (ChatRequest, {"messages": [5]}, "'messages[0]': must be an object with a 'role'."),
        (ChatRequest, {"messages": ASK, "stop": 5}, "'stop': must be a string or a list."),
        (
            ChatRequest,
            {"messages": ASK, "response_format": "json"},
            "'response_format': must be an object with a 'type'.",
        ),
        (CompletionRequest, {"prompt": 5}, "'prompt': must be a string or a list."),
        (
            ChatRequest,
            {"messages": ASK, "logit_bias": []},
            "'logit_bias': must be an object, not a list.",
        ),
    ],
)
def test_what_has_the_wrong_type_is_told_all_right_ones(
    schema: type[Wire], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse(schema, fields)
    assert refused.value.message == f"Invalid value for {said}"
    assert refused.value.code == "invalid_type"


@pytest.mark.parametrize(
    ("schema", "fields", "said"),
    [
        (ChatRequest, {"messages": []}, "'messages': must not be empty."),
        (
            ChatRequest,
            {"max_tokens": -5},
            "'max_tokens': must be at least 1, or -1 for no limit, not -5.",
        ),
        (
            CompletionRequest,
            {"max_tokens": -3},
            "'max_tokens': must be at least 0, or -1 for no limit, not -3.",
        ),
        (
            ResponsesRequest,
            {"tools": [{"type": "function", "name": "f", "async": True}]},
            "'tools[0].async': must be false, not true.",
        ),
        (
            ResponsesRequest,
            {"metadata": {str(each): "x" for each in range(17)}},
            "'metadata': must have at most 16 entries.",
        ),
    ],
)
def test_limits_are_told_in_words_of_json(
    schema: type[Wire], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse(schema, fields)
    assert refused.value.message == f"Invalid value for {said}"


@pytest.mark.parametrize("beside", [{}, {"messages": ASK}])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("prompt", "send messages"),
        ("input", "send messages"),
        ("system", "use a message with the role system"),
    ],
)
def test_other_protocols_prompts_are_told_where_to_stand(
    beside: dict[str, Any], name: str, instead: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse(ChatRequest, {**beside, name: "Hi."})
    assert refused.value.message == f"'{name}' is not offered by this server: {instead}."
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
WRONG = [
    ({"messages": []}, "messages", "array_below_min_length"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [*ASK, {"role": "user", "content": [{"type": "smell"}]}]},
        "messages[1].content[0].type",
        "invalid_value",
    ),
    ({"temperature": 4e38}, "temperature", "above_max_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": -0.1}, "top_p", "below_min_value"),
    ({"max_tokens": 0}, "max_tokens", "below_min_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"n": 0}, "n", "below_min_value"),
    ({"seed": 2**70}, "seed", "above_max_value"),
    ({"stop": [""]}, "stop[0]", "string_below_min_length"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "above_max_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "What is it?", "images": ["aGk="]}]},
        "messages[0].images",
        "invalid_value",
    ),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "above_max_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "invalid_value",
    ),
    ({"tools": [{"type": "search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            }
        },
        "response_format",
        "invalid_schema",
    ),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities[0]", "invalid_value"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    ({"verbosity": "shouted"}, "verbosity", "invalid_value"),
    ({"beam_width": 4}, "beam_width", "unknown_parameter"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", None),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", None),
    ({"guided_json": "{"}, "guided_json", None),
    ({"guided_json": "[]"}, "guided_json", "invalid_schema"),
    ({"max_new_tokens": 0}, "max_new_tokens", "below_min_value"),
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].image_url.url",
        "unsupported_content",
    ),
    (
        {"messages": [{"role": "assistant", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "system", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{**IMAGE, "image_url": {"url": ""}}]}]},
        "messages[0].content[0].image_url.url",
        "string_below_min_length",
    ),
    (
        {"messages": [{"role": "user", "content": [{**IMAGE, "image_url": 5}]}]},
        "messages[0].content[0].image_url",
        "invalid_type",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{**IMAGE, "image_url": {"url": "x", "detail": "fine"}}],
                }
            ]
        },
        "messages[0].content[0].image_url.detail",
        "invalid_value",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
                    ],
                }
            ]
        },
        "messages[0].content[0].input_audio.data",
        "unsupported_content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]},
        "messages[0].content[0]",
        "unsupported_content",
    ),
]


def test_what_is_wrong_is_named(serve: Serve) -> None:
    served = serve()
    for body, param, code in WRONG:
        error = error_of(post(served.url, **body))
        assert error["param"] == param, (body, error)
        assert code is None or error["code"] == code, (body, error)
        assert error["type"] == "invalid_request_error"
        assert param in error["message"] or param.split("[")[0] in error["message"]
    assert served.engine.requests == []


def test_a_refused_field_may_be_null(serve: Serve) -> None:
    nothing = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    assert post(serve().url, **nothing).status_code == 200


def test_fields_without_effect_are_accepted(serve: Serve) -> None:
    answer = post(
        serve().url,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        safety_identifier="x",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        verbosity="medium",
        modalities=["text"],
        parallel_tool_calls=True,
        stream_options=None,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b"\xff", b"[" * 9999],
)
def test_a_body_that_is_no_json_object_is_refused(serve: Serve, body: bytes) -> None:
    answer = HTTP.post(f"{serve().url}/v1/chat/completions", content=body, headers=JSON_TYPE)
    assert error_of(answer)["code"] in ("invalid_json", "invalid_type")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize(
    "number", ["1e400", "-1E+999", "9" * 400 + ".0", "9" * 400, "1" * 250 + "e99"]
)
def test_a_number_that_no_float_holds_is_refused(serve: Serve, path: str, number: str) -> None:
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"default": %s}}}'
    body = f'{{"model": "quire-demo", "tools": [{tool % number}]}}'.encode()
    answer = HTTP.post(f"{serve().url}/v1/{path}", content=body, headers=JSON_TYPE)
    assert answer.status_code == 400
    assert "out of range" in answer.text


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_a_number_that_is_not_finite_is_named(serve: Serve, path: str, number: str) -> None:
    body = f'{{"model": "quire-demo", "a": [1, {{}}], "logit_bias": {{"5": {number}}}}}'.encode()
    answer = HTTP.post(f"{serve().url}/v1/{path}", content=body, headers=JSON_TYPE)
    assert answer.status_code == 400
    assert "Invalid value for 'logit_bias.5'" in answer.text
    assert "finite" in answer.text


EDGES = [
    ({"repetition_penalty": 1e-308}, "repetition_penalty", "at least 0.01"),
    ({"repetition_penalty": 0.009}, "repetition_penalty", "at least 0.01"),
    ({"repetition_penalty": 10.1}, "repetition_penalty", "at most 10"),
    ({"stop_token_ids": [5, 9_999_999]}, "stop_token_ids", "3072"),
    ({"stop_token_ids": [5.0]}, "stop_token_ids[0]", "whole number"),
    ({"logit_bias": {"05": 100}}, "logit_bias", "'05'"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias", "'5.0'"),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_what_is_beyond_an_edge_is_refused_by_name(serve: Serve, path: str) -> None:
    served = serve()
    asked = {"messages": ASK, "max_tokens": 5} if path == "messages" else {"messages": ASK}
    asked = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, asked)
    for fields, param, said in EDGES:
        answer = HTTP.post(f"{served.url}/v1/{path}", json=asked | {"model": "quire-demo"} | fields)
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert f"'{param}'" in message
        assert said in message
    assert not served.engine.requests


def test_a_file_that_is_no_pdf_is_told_so(serve: Serve) -> None:
    part = {"type": "input_file", "file_id": "file-1"}
    error = error_of(
        post(serve().url, "/v1/responses", input=[{"role": "user", "content": [part]}])
    )
    assert "by their id, are not read" in error["message"]


def test_no_name_is_suggested_in_its_own_place(serve: Serve) -> None:
    error = error_of(post(serve().url, "/v1/responses", input="x", stop_sequences=["a"]))
    assert error["message"] == "Unknown parameter: 'stop_sequences'."


FORMATS = [
    ({"kv_bits": 4}, "page-4"),
    ({"kv_bits": 8.0}, "page-8"),
    ({"kv_bits": "8/4"}, "page-8/4"),
    ({"kv_bits": "4", "kv_scheme": "page"}, "page-4"),
    ({"kv_bits": 4, "kv_scheme": "uniform"}, "uniform-4-g64"),
    ({"kv_bits": "none"}, "plain"),
    ({"kv_bits": 0}, "plain"),
    ({"kv_scheme": "plain"}, "plain"),
    ({}, None),
]


@pytest.mark.parametrize("as_header", [False, True])
def test_the_kv_format_is_chosen_by_field_or_header(serve: Serve, as_header: bool) -> None:
    served = serve()
    for fields, name in FORMATS:
        headers = {f"x-quire-{k.replace('_', '-')}": str(v) for k, v in fields.items()}
        answer = HTTP.post(
            f"{served.url}/v1/chat/completions",
            json={"messages": ASK, **({} if as_header else fields)},
            headers=headers if as_header else {},
        )
        assert answer.status_code == 200, answer.text
        chosen = served.engine.requests[-1].kv_format
        assert (None if chosen is None else chosen.name) == name


@pytest.mark.parametrize(
    ("fields", "param", "offered"),
    [
        ({"kv_bits": 7}, "kv_bits", "4, 8, 8/4, none"),
        ({"kv_bits": "x"}, "kv_bits", "4, 8, 8/4, none"),
        ({"kv_bits": 8, "kv_scheme": "uniform"}, "kv_bits", "4, none"),
        ({"kv_scheme": "page"}, "kv_bits", "4, 8, 8/4, none"),
        ({"kv_scheme": "zip", "kv_bits": 4}, "kv_scheme", "plain, page, uniform"),
    ],
)
def test_a_kv_format_that_is_not_offered_is_refused(
    serve: Serve, fields: dict[str, Any], param: str, offered: str
) -> None:
    error = error_of(post(serve().url, **fields))
    assert (error["param"], error["code"]) == (param, f"invalid_{param}")
    assert offered in error["message"]
    if param in fields:
        assert f"cannot be {fields[param]!r}" in error["message"]


def test_a_penalty_by_its_other_name(serve: Serve) -> None:
    served = serve()
    assert post(served.url, repeat_penalty=1.5).status_code == 200
    assert served.engine.requests[0].sampling.repetition_penalty == 1.5
    error = error_of(post(served.url, repeat_penalty=1.5, repetition_penalty=1.2))
    assert error["param"] == "repeat_penalty"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": ASK}),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
        ("messages", {"model": "quire-demo", "messages": ASK, "max_tokens": 5}),
    ],
)
def test_a_top_p_of_0_leaves_one_token(serve: Serve, path: str, body: dict[str, Any]) -> None:
    served = serve()
    answer = HTTP.post(f"{served.url}/v1/{path}", json={**body, "top_p": 0})
    assert answer.status_code == 200, answer.text
    (request,) = served.engine.requests
    assert 0 < request.sampling.top_p < 1 / 2**20


def test_messages_reach_the_template(serve: Serve) -> None:
    served = serve()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "Thanks."},
    ]
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    assert post(served.url, messages=messages, tools=[tool]).status_code == 200
    prompt = served.tokenizer.decode(served.engine.requests[0].prompt)
    for piece in (
        "<|turn>system\nBe brief.",
        "declaration:add{",
        "<|turn>user\nOne\ntwo<turn|>",
        "<|tool_call>call:add{a:1}<tool_call|>",
        "response:add{",
    ):
        assert piece in prompt
    assert post(served.url, messages=messages, tools=[tool], tool_choice="none").status_code == 200
    assert "declaration" not in served.tokenizer.decode(served.engine.requests[1].prompt)


def test_the_billing_header_of_an_agent_does_not_reach_the_prompt(serve: Serve) -> None:
    served = serve()
    for stamp in ("cch=36ee5;", "cch=99999;"):
        header = f"x-anthropic-billing-header: cc_version=2.1; {stamp}"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "Be kind."}]
        post(served.url, messages=[{"role": "system", "content": system}, *ASK])
    first, second = (request.prompt for request in served.engine.requests)
    assert first == second


def test_half_a_character_is_read_as_a_replacement(serve: Serve) -> None:
    served = serve()
    content = rb'{"messages": [{"role": "user", "content": "cut \ud83d, \\ud83d, \ud83d\ude00"}]}'
    answer = HTTP.post(f"{served.url}/v1/chat/completions", content=content, headers=JSON_TYPE)
    assert answer.status_code == 200
    prompt = served.tokenizer.decode(served.engine.requests[0].prompt)
    assert "cut \N{REPLACEMENT CHARACTER}, \\ud83d, 😀" in prompt
    broken = HTTP.post(f"{served.url}/v1/chat/completions", content=content[:-1], headers=JSON_TYPE)
    assert f"column {len(content) - 1}" in error_of(broken)["message"]


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", {"prompt_cache_key": "s"}, {}),
        ("/v1/chat/completions", {"prompt_cache_key": "x"}, {"x-session-id": "s"}),
        ("/v1/responses", {"input": "Hi.", "prompt_cache_key": "s"}, {}),
        ("/v1/completions", {"prompt": "Hi."}, {"x-session-id": "s"}),
        (
            "/v1/messages",
            {"messages": ASK, "max_tokens": 5, "metadata": {"user_id": "s"}},
            {},
        ),
    ],
)
def test_the_engine_learns_a_requests_session(
    serve: Serve, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    served = serve()
    if path.endswith("chat/completions"):
        body = {"messages": ASK, **body}
    answer = HTTP.post(f"{served.url}{path}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert served.engine.requests[-1].session.split()[-1] == "s"
    post(served.url)
    assert served.engine.requests[-1].session == ""


def _lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all lists within a core schema."""
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from _lists(each)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for each in schema.values():
            yield from _lists(each)


@pytest.mark.parametrize("model", [each.body for each in OPERATIONS if each.body is not None])
def test_every_list_of_a_body_is_read_up_to_its_first_error(model: type[Wire]) -> None:
    """Lists of nested models are read up to their first error, too."""
    for each in _lists(model.__pydantic_core_schema__):
        assert each["fail_fast"] is True
