"""Calls under a grammar, end to end: forced ones, and those of strict tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.dialect_cases import Case, script_token, write_model
from tests.support.child import running
from tests.support.everyday import everyday
from tests.support.serve_scripted import NAME
from tests.text.dialects.scripts import TOOLS
from tests.text.dialects.test_families import ASSISTANT

CITY = {"city": "Tokyo"}
THOUGHTS = {
    "harmony": "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant",
    "mistral": "[THINK]Let me see.[/THINK]",
    "gemma4": "<|channel>thought\nLet me see.<channel|>",
}
CALLS = {
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Tokyo"}<|call|>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Tokyo<|"|>}<tool_call|>',
}
PROSE = {
    "harmony": "<|channel|>final<|message|>Four.<|return|>",
    "mistral": "Four.",
    "gemma4": "Four.",
}
WRONG = {dialect: call.replace("city", "town") for dialect, call in CALLS.items()}

Ask = Callable[..., Any]


@pytest.fixture(scope="module", params=everyday(CALLS, lambda dialect: dialect == "gemma4"))
def ask(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Yield `ask(said, **fields)`: it returns the choice of a model that thinks, then says this."""
    dialect = request.param
    folder = tmp_path_factory.mktemp(dialect)
    opening = ASSISTANT if dialect == "harmony" else ""
    said = {"call": CALLS, "prose": PROSE, "wrong": WRONG}
    cases = [
        Case(dialect, THOUGHTS[dialect] + text[dialect], opening=opening) for text in said.values()
    ]
    write_model(folder, dialect, cases)
    with running(folder, "tests.support.serve_scripted", str(folder), dialect) as child:
        sdk = OpenAI(base_url=f"{child.url}/v1", api_key="none", max_retries=0)

        def ask(kind: str, *, strict: bool = False, **fields: Any) -> Any:
            functions = [
                {"name": t.name, "parameters": t.parameters, "strict": strict} for t in TOOLS
            ]
            create: Any = sdk.chat.completions.create
            prompt = f"Play {script_token(list(said).index(kind))}"
            return create(
                model=NAME,
                messages=[{"role": "user", "content": prompt}],
                tools=[{"type": "function", "function": each} for each in functions],
                temperature=0,
                max_tokens=200,
                **fields,
            ).choices[0]

        yield ask


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tool_choice": "required", "extra_body": {"thinking_budget": 100}},
        {"strict": True},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["required", "named", "budget", "strict", "schema"],
)
def test_a_good_call_passes(ask: Ask, fields: dict[str, Any]) -> None:
    answer = ask("call", **fields)
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", CITY)
    assert answer.message.reasoning_content == "Let me see."


def test_strict_tools_leave_prose_alone(ask: Ask) -> None:
    assert ask("prose", strict=True).message.content == "Four."


def test_where_a_call_is_forced_there_is_no_prose(ask: Ask) -> None:
    answer = ask("prose", tool_choice="required")
    assert not answer.message.content
    assert answer.message.tool_calls or answer.finish_reason == "length"


def test_a_call_that_does_not_meet_its_schema_is_made_by_loose_tools_only(ask: Ask) -> None:
    (call,) = ask("wrong").message.tool_calls
    assert "city" not in json.loads(call.function.arguments)
    for call in ask("wrong", strict=True).message.tool_calls or ():
        assert "city" in json.loads(call.function.arguments)


def test_a_spent_budget_goes_on_to_the_call(ask: Ask) -> None:
    answer = ask("call", tool_choice="required", extra_body={"thinking_budget": 2})
    assert not answer.message.content
    assert len(getattr(answer.message, "reasoning_content", "")) < len("Let me see.")
    assert answer.message.tool_calls or answer.finish_reason == "length"
