"""Constraints on an answer: its grammar, and the limit on its reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from quire.core.errors import RequestError
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.constraints import AnswerConstraints
from quire.serving.generation import Generation, Thinking, ToolChoice
from quire.serving.service import Service
from quire.text.tokenizer import Tokenizer
from tests.serving.conftest import assembled, scripted

ASK: Any = {"role": "user", "content": "Hi."}
SPEC = Generation(messages=(ASK,))
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NUMBER = AnswerFormat("json_schema", '{"type": "integer"}', "response_format")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tokenizer: Tokenizer) -> AsyncIterator[Service]:
    """Yield one service for the file, since the process that compiles grammars takes long to
    start.
    """
    made = assembled(scripted(tokenizer))
    yield made
    await made.close()


async def constraints_of(
    service: Service, spec: Generation, max_tokens: int = 100
) -> AnswerConstraints:
    """Return the constraints on the answer to the generation's only prompt."""
    prepared = await service.prepare(spec)
    built = await service.constraints.build(prepared)
    return service.constraints.for_prompt(
        prepared, prepared.prompts[0].tokens, built.grammar, max_tokens
    )


async def test_nothing_holds_a_free_answer(service: Service) -> None:
    assert await constraints_of(service, SPEC) == AnswerConstraints(None, None)


async def test_a_format_binds_at_once_where_no_reasoning_comes(service: Service) -> None:
    found = await constraints_of(service, replace(SPEC, format=NUMBER))
    assert found.grammar is not None
    assert found.grammar.kind == "json_schema"
    assert found.grammar.start_after == ()


async def test_a_format_binds_after_the_reasoning(service: Service) -> None:
    spec = replace(SPEC, format=NUMBER, thinking=Thinking(enabled=True))
    found = await constraints_of(service, spec)
    assert found.grammar is not None
    assert service.tokenizer.decode(found.grammar.start_after) == "<channel|>"
    assert found.grammar.opened_by


@pytest.mark.parametrize(
    ("content", "free"),
    [("4", False), ("<|channel>thought\nHm.<channel|>", False), ("<|channel>thought\nHm.", True)],
)
async def test_an_answer_that_was_started_opens_no_reasoning(
    service: Service, content: str, free: bool
) -> None:
    last = {"role": "assistant", "content": content}
    spec = replace(SPEC, format=NUMBER, thinking=Thinking(enabled=True), continue_final=True)
    found = (await constraints_of(service, replace(spec, messages=(ASK, last)))).grammar
    assert found is not None
    assert (bool(found.start_after), found.opened_by) == (free, ())


async def test_bare_prompts_have_no_reasoning_to_wait_for(service: Service) -> None:
    spec = Generation(prompts=("x",), format=NUMBER, thinking=Thinking(enabled=True, budget=5))
    found = await constraints_of(service, spec)
    assert found.grammar is not None
    assert found.grammar.start_after == ()
    assert found.thinking is None


async def test_forced_calls_are_a_grammar(service: Service) -> None:
    spec = replace(SPEC, tools=(TOOL,), tool_choice=ToolChoice("named", "f"))
    found = await constraints_of(service, spec)
    assert found.grammar is not None
    assert found.grammar.kind == "lark"
    assert found.grammar.opener is not None


async def test_forced_calls_follow_references_from_the_root(service: Service) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    parameters = {
        "type": "object",
        "properties": {"inner": {"$ref": "/$defs/Inner"}},
        "$defs": {"Inner": inner},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = replace(SPEC, tools=(tool,), tool_choice=ToolChoice("named", "f"))
    assert (await constraints_of(service, spec)).grammar is not None


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        (Thinking(enabled=True), None),
        (Thinking(enabled=True, budget=7), 7),
        (Thinking(effort="low"), 20),
        (Thinking(effort="high"), 80),
        (Thinking(effort="high", budget=3), 3),
        (Thinking(enabled=False), None),
    ],
)
async def test_budgets(service: Service, thinking: Thinking, budget: int | None) -> None:
    found = (await constraints_of(service, replace(SPEC, thinking=thinking))).thinking
    assert (found.max_tokens if found is not None else None) == budget


async def test_what_no_grammar_enforces_is_named(service: Service) -> None:
    unique = '{"type": "array", "uniqueItems": true}'
    format = AnswerFormat("json_schema", unique, "response_format")
    prepared = await service.prepare(replace(SPEC, format=format))
    assert "uniqueItems" in (await service.constraints.build(prepared)).unenforced[0]


async def test_an_answer_has_no_properties_that_its_schema_does_not_name(service: Service) -> None:
    named = '{"type": "object", "properties": {"answer": {"type": "integer"}}}'
    format = AnswerFormat("json_schema", named, "response_format")
    prepared = await service.prepare(replace(SPEC, format=format))
    grammar = (await service.constraints.build(prepared)).grammar
    assert grammar is not None
    assert '"additionalProperties": false' in grammar.source


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "numbr"}'),
        ("regex", "("),
        ("grammar", "start: missing"),
        ("grammar", "root ::= ("),
    ],
)
async def test_what_cannot_be_compiled_names_its_field(
    service: Service, kind: Any, source: str
) -> None:
    with pytest.raises(RequestError) as refused:
        await constraints_of(service, replace(SPEC, format=AnswerFormat(kind, source, "the field")))
    assert (refused.value.param, refused.value.code) == ("the field", "invalid_schema")
