"""Answer formats by the fields of other servers; minimum lengths; hidden reasoning."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest

from quire.constraints.grammar import GrammarCompiler
from quire.core.request import GrammarSpec
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served
from tests.api.test_foreign_fields import BODIES, HEADER

PATHS = ["chat/completions", "completions"]
LARK = 'start: "yes" | "no" NUMBER\nNUMBER: /[0-9]+/\n'
GBNF = 'root ::= "yes" | "no" number\nnumber ::= [0-9]+\n'
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def post(served: Served, path: str, **more: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], **more})


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


@cache
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.open(MODEL_DIR)
    return GrammarCompiler(
        MODEL_DIR / "tokenizer.json", tokenizer.vocab_size, frozenset(tokenizer.eos_ids)
    )


def meets(grammar: GrammarSpec, text: str) -> bool:
    """Return whether a whole answer is this text."""
    tokenizer = Tokenizer.open(MODEL_DIR)
    state = compiler().compile(replace(grammar, start_after=(), opened_by=()))
    for token in (*tokenizer.encode(text), min(tokenizer.eos_ids)):
        mask = state.mask()
        if mask is None or not mask[token // 32] >> token % 32 & 1:
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "met", "not_met"),
    [
        ({"guided_regex": "[ab/]{2}"}, "a/", "abc"),
        ({"regex": "[ab]{2}"}, "ab", "c"),
        ({"guided_choice": ['red "1"', "blue"]}, 'red "1"', "red"),
        ({"guided_grammar": LARK}, "no12", "no"),
        ({"grammar": GBNF}, "no12", "no"),
        ({"ebnf": GBNF}, "yes", "12"),
        ({"guided_json": {"type": "array", "items": {"type": "integer"}}}, "[1]", '["a"]'),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
        ({"structured_outputs": {"grammar": GBNF}}, "yes", "maybe"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "12", "a"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"format": "json"}, "{}", "[]"),
        ({"format": {"type": "integer"}}, "12", "a"),
        ({"format": '{"type": "integer"}'}, "12", "a"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_formats_of_other_servers(
    serve: Serve, path: str, fields: dict[str, Any], met: str, not_met: str
) -> None:
    served = serve()
    answer = post(served, path, **fields)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    grammar = served.engine.requests[0].grammar
    assert grammar is not None
    assert meets(grammar, met)
    assert not meets(grammar, not_met)


ONE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "met", "not_met"),
    [
        ({"type": "json_object"}, "{}", "[]"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": ONE}}, '{"a": 1}', "{}"),
        ({"type": "json_object", "schema": ONE}, '{"a": 1}', "{}"),
        ({"type": "json_object", "schema": {"required": ["a"]}}, '{"a": 1}', "1"),
        ({"type": "json_object", "schema": None}, "{}", "1"),
        ({"type": "json_schema", "schema": ONE}, '{"a": 1}', "{}"),
        ({"type": "json_schema", "name": "x", "strict": True, "schema": ONE}, '{"a": 1}', "{}"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_the_format_of_a_response(
    serve: Serve, path: str, fields: dict[str, Any], met: str, not_met: str
) -> None:
    served = serve()
    answer = post(served, path, response_format=fields)
    assert answer.status_code == 200, answer.text
    grammar = served.engine.requests[0].grammar
    assert grammar is not None
    assert meets(grammar, met)
    assert not meets(grammar, not_met)


def test_a_choice_or_a_call(serve: Serve) -> None:
    served = serve()
    answer = post(served, "chat/completions", guided_choice=["a", "b/c"], tools=[CALL])
    assert answer.status_code == 200, answer.text
    grammar = served.engine.requests[0].grammar
    assert grammar is not None
    assert meets(grammar, "b/c")
    assert meets(grammar, "<|tool_call>call:f{}<tool_call|>")
    assert not meets(grammar, "c")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        (
            {"response_format": {"type": "json_object"}, "guided_json": {}},
            "guided_json",
            "invalid_value",
        ),
        ({"guided_regex": "("}, "guided_regex", "invalid_schema"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "invalid_schema"),
        ({"grammar": "root ::= ("}, "grammar", "invalid_schema"),
        ({"structured_outputs": {"json": "x"}}, "structured_outputs.json", "invalid_schema"),
        (
            {"response_format": {"type": "json_schema", "schema": ONE, "strickt": True}},
            "response_format.json_schema.strickt",
            "unknown_parameter",
        ),
        ({"guided_choice": []}, "guided_choice", "array_below_min_length"),
        ({"guided_grammar": LARK, "tools": [CALL]}, "guided_grammar", "unsupported_parameter"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_is_refused(
    serve: Serve, fields: dict[str, Any], param: str, code: str
) -> None:
    served = serve()
    found = error(post(served, "chat/completions", **fields))
    assert (found["param"], found["code"]) == (param, code)
    assert served.engine.requests == []


def test_what_has_no_effect_is_named(serve: Serve) -> None:
    served = serve()
    fields = {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}
    answer = post(served, "completions", **fields)
    assert answer.headers[HEADER] == "structured_outputs.whitespace_pattern"


@pytest.mark.parametrize("name", ["min_tokens", "min_new_tokens"])
def test_a_least_length(serve: Serve, name: str) -> None:
    served = serve()
    answer = post(served, "completions", **{name: 4})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    assert served.engine.requests[0].min_tokens == 4


THOUGHT = "<|channel>thought\nHm.<channel|>Hello."


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, True),
        ({"include_reasoning": True}, True),
        ({"include_reasoning": False}, False),
        ({"reasoning": {"effort": "low", "exclude": True}}, False),
    ],
)
def test_reasoning_that_is_not_shown(serve: Serve, fields: dict[str, Any], shown: bool) -> None:
    served = serve(THOUGHT)
    answer = post(served, "chat/completions", enable_thinking=True, **fields)
    assert HEADER not in answer.headers
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "Hello."
    assert ("reasoning" in message) is shown
    assert ("reasoning_content" in message) is shown
    streamed = post(served, "chat/completions", stream=True, enable_thinking=True, **fields).text
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"]
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello."
    assert any("reasoning" in delta for delta in deltas) is shown
