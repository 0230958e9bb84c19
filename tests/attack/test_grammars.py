"""Schemas that end their compiler, or keep it busy: one request's 400, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.api.conftest import HTTP
from tests.attack.harness import Victim

Schema = dict[str, Any]


def chain(links: int, kind: str) -> Schema:
    """Return definitions each of which refers to the next."""

    def link(index: int) -> Schema:
        following = {"$ref": f"#/$defs/a{index + 1}"}
        if kind == "anyOf":
            return {"anyOf": [following, {"type": "integer"}]}
        return {"type": "object", "properties": {"x": following}}

    definitions = {f"a{index}": link(index) for index in range(links)}
    definitions[f"a{links}"] = {"type": "null"}
    return _in_object({"$ref": "#/$defs/a0"}, definitions)


def _in_object(schema: Schema, definitions: Schema | None = None) -> Schema:
    return {"type": "object", "properties": {"x": schema}, "$defs": definitions or {}}


DEADLY = {
    "the lowest integer": _in_object({"enum": [-(2**63)]}),
    "its neighbour": _in_object({"const": -(2**63) + 1}),
    "its other neighbour": _in_object({"enum": [-(2**63) + 2]}),
    "within a constant": _in_object({"const": [{"a": -(2**63)}]}),
    "1,100 references": chain(1100, "anyOf"),
    "1,100 properties within each other": chain(1100, "properties"),
    "a pattern of a million letters": _in_object(
        {"type": "string", "pattern": "^(a{1000}){1000}$"}
    ),
}
SLOW = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "minimum": i} for i in range(16000)},
    "required": [f"p{i}" for i in range(16000)],
}
FINE = _in_object({"type": "null"})


def asked(way: str, schema: Schema) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of a request that has this schema compiled."""
    said = [{"role": "user", "content": "Hello"}]
    tool = {"name": "f", "description": "", "parameters": schema}
    match way:
        case "chat":
            named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            return "chat/completions", {"messages": said, "response_format": named}
        case "forced":
            tools = [{"type": "function", "function": tool}]
            return "chat/completions", {"messages": said, "tools": tools, "tool_choice": "required"}
        case "strict":
            tools = [{"type": "function", "function": {**tool, "strict": True}}]
            return "chat/completions", {"messages": said, "tools": tools}
        case "responses":
            text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
            return "responses", {"input": "Hello", "text": text}
        case _:
            tools = [{"name": "f", "input_schema": schema}]
            choice = {"type": "any"}
            return "messages", {"messages": said, "tools": tools, "tool_choice": choice}


def ask(victim: Victim, way: str, schema: Schema) -> httpx.Response:
    route, body = asked(way, schema)
    limit = "max_output_tokens" if way == "responses" else "max_tokens"
    model = HTTP.get(f"{victim.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, limit: 4} | body
    return HTTP.post(f"{victim.url}/v1/{route}", json=body)


WAYS = ("forced", "strict", "responses", "messages")
EACH = ("the lowest integer", "1,100 references")
"""Faults of the compiler and of recursion."""
DAILY = (*EACH, "within a constant", "a pattern of a million letters")
"""One of each kind, tried one way every day."""


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("chat", DAILY),
        pytest.param("chat", DEADLY, marks=pytest.mark.slow),
        *(
            pytest.param(way, names, marks=pytest.mark.slow)
            for way in WAYS
            for names in (EACH, DEADLY)
        ),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_a_400(
    victim: Victim, way: str, names: Iterable[str]
) -> None:
    with victim.watched() as seen:
        for name in names:
            answer = ask(victim, way, DEADLY[name])
            assert answer.status_code == 400, (name, answer.status_code, answer.text[:300])
            said = answer.json()["error"]["message"]
            refusals = ("compile", "prompt is too long", "maximum context length")
            assert any(each in said for each in refusals), (name, said)
        assert ask(victim, way, FINE).status_code == 200
    seen.check()


def test_a_schema_that_keeps_the_compiler_busy_is_given_up(victim: Victim) -> None:
    with victim.watched() as seen:
        answer = ask(victim, "chat", SLOW)
        assert answer.status_code == 400
        assert "cannot be compiled" in answer.json()["error"]["message"]
        assert ask(victim, "chat", FINE).status_code == 200
    seen.check()
