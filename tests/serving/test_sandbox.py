"""The process that makes grammars: what it accepts, refuses, leaves to the model, and dies of."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.core.errors import EngineFailure, RequestError
from quire.core.request import NO_BEGINNING
from quire.demo import MODEL_DIR
from quire.serving.answer_grammar import AnswerFormat, GrammarRequest
from quire.serving.model_files import check_unchanged, stamp_of
from quire.serving.sandbox import BuilderOpening, GrammarSandbox
from quire.text.dialects import Tool
from tests.support.waiting import wait_until

SLOW = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "minimum": i} for i in range(16000)},
    "required": [f"p{i}" for i in range(16000)],
}


def wanted(
    schema: object = None, *tools: Tool, forced: bool = False, strict: str = ""
) -> GrammarRequest:
    text = None if schema is None else json.dumps(schema)
    names = frozenset({strict} - {""})
    format = None if text is None else AnswerFormat("json_schema", text, "response_format")
    return GrammarRequest(format, tools, names, forced, "", True, "function.parameters")


@asynccontextmanager
async def opened(dialect: str = "gemma4") -> AsyncIterator[GrammarSandbox]:
    made = GrammarSandbox(BuilderOpening(MODEL_DIR, dialect, 3072))
    try:
        yield made
    finally:
        await made.close()


def run(play: Callable[[GrammarSandbox], Any]) -> None:
    async def within() -> None:
        async with opened() as made:
            await play(made)

    asyncio.run(within())


def test_a_schema_that_is_too_slow_ends_the_process_and_not_the_next_request() -> None:
    async def play(made: GrammarSandbox) -> None:
        with pytest.raises(RequestError, match="cannot be compiled") as caught:
            await made.build(wanted(SLOW))
        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_schema")
        assert (await made.build(wanted({"type": "null"}))).grammar is not None

    run(play)


def test_whoever_leaves_takes_the_work_along() -> None:
    async def play(made: GrammarSandbox) -> None:
        before = set(psutil.Process().children())
        await made.build(wanted({"type": "null"}))
        (first,) = set(psutil.Process().children()) - before
        slow = asyncio.create_task(made.build(wanted(SLOW)))
        waiting = asyncio.create_task(made.build(wanted({"type": "boolean"})))
        await asyncio.to_thread(wait_until, first.children)  # a job's
        slow.cancel()
        assert (await waiting).grammar is not None
        with pytest.raises(asyncio.CancelledError):
            await slow

    run(play)


def test_the_same_request_is_compiled_once() -> None:
    async def play(made: GrammarSandbox) -> None:
        first = await made.build(wanted({"type": "null"}))
        assert await made.build(wanted({"type": "null"})) is first

    run(play)


@pytest.mark.parametrize("dialect", ["gemma4", "harmony"])
@pytest.mark.parametrize("tools", [(), (Tool("f"),)])
def test_a_start_is_read_as_the_grammar_would_write_it(
    dialect: str, tools: tuple[Tool, ...]
) -> None:
    async def build() -> None:
        number = {"type": "object", "properties": {"a  b": {"type": "integer"}}}
        async with opened(dialect) as made:
            started = replace(wanted(number, *tools), bare=True, started='\n{\n\t"a  b"  :\r\n')
            grammar = (await made.build(started)).grammar
            assert grammar is not None
            assert grammar.started == '{ "a  b" : '
            for wrong in ("x", '{"b', '{"a  b": "'):
                with pytest.raises(RequestError, match="'response_format'") as refused:
                    await made.build(replace(started, started=wrong))
                assert refused.value.code == NO_BEGINNING

    asyncio.run(build())


def test_what_the_grammar_cannot_enforce_is_named() -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "price": {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"},
            "secret": {"type": "string", "format": "password"},
            "map": {"type": "object", "propertyNames": {"minLength": 2}},
            "link": {"type": "string", "format": "iri"},
            "count": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "other": {"$ref": "#/$defs/other"},
            "kind": {"oneOf": [{"const": "a"}, {"const": "b"}]},  # no text is both
            "either": {
                "properties": {"a": {}, "b": {}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
        },
        "$defs": {
            "uniqueItems": {"type": "null"},
            "other": {"oneOf": [{"type": "string"}, {"pattern": "^a"}]},
        },
    }
    said = (
        *("$defs.other: oneOf", "tags: uniqueItems", "price: pattern", "map: propertyNames"),
        *("link: format", "count: oneOf", "either: oneOf"),
    )

    dumped = json.dumps(schema)

    async def play(made: GrammarSandbox) -> None:
        assert (await made.build(wanted(schema))).unenforced == said
        tool = Tool("f", schema)
        in_tool = tuple(f"f: {each}" for each in said)
        assert (await made.build(wanted(None, tool, forced=True))).unenforced == in_tool
        for strict in (
            wanted(None, tool, strict="f"),
            replace(wanted(schema), format=AnswerFormat("json_schema", dumped, "x", strict=True)),
        ):
            with pytest.raises(RequestError, match=r"is strict, but .* tags: uniqueItems") as error:
                await made.build(strict)
            assert error.value.code == "invalid_schema"

    run(play)


REFUSED: list[tuple[object, str]] = [
    ({"enum": [-(2**63)]}, "too small"),
    ({"const": {"a": [-(2**63) + 512]}}, "too small"),
    ({"enum": [-(2**63) + 513, 2**63]}, "cannot be represented exactly"),
    ({"type": "strin"}, "strin"),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too many"),
    ([], "object"),
]
"""Schemas that cannot be compiled, and what the error says."""


def test_what_is_refused() -> None:
    async def play(made: GrammarSandbox) -> None:
        for schema, why in REFUSED:
            with pytest.raises(RequestError, match=why):
                await made.build(wanted(schema))

    run(play)


def test_a_process_that_does_not_start_is_no_fault_of_the_schema(tmp_path: Path) -> None:
    async def play() -> None:
        made = GrammarSandbox(BuilderOpening(tmp_path, "gemma4", 3072))
        with pytest.raises(EngineFailure, match=r"cannot be started: .* has no tokenizer\.json"):
            await made.build(wanted({"type": "null"}))
        await made.close()

    asyncio.run(play())


def test_files_that_were_exchanged_under_the_server_are_named(tmp_path: Path) -> None:
    """Another tokenizer than the engine's would make grammars of other tokens."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL_DIR, folder)
    stamp = stamp_of(folder)
    check_unchanged(folder, stamp)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")

    async def play() -> None:
        made = GrammarSandbox(BuilderOpening(folder, "gemma4", 3072, stamp))
        with pytest.raises(EngineFailure, match=r"tokenizer\.json changed since .*; unload it"):
            await made.build(wanted({"type": "null"}))
        await made.close()

    asyncio.run(play())
