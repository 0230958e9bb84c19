"""The members at the top of a large body, as `json` would read them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.api.shared.members import members

TEXT = st.text(st.sampled_from('ab"\\{}[]:,\n é'), max_size=8)
SCALAR = st.none() | st.booleans() | st.integers(-99, 99) | TEXT
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("model"), inner),
    max_leaves=8,
)
BODY = st.dictionaries(TEXT | st.sampled_from(["model", "stream"]), VALUE, max_size=6)


def found(body: bytes) -> dict[str, Any]:
    return asyncio.run(members(body, ("model", "stream")))


@given(BODY, st.booleans(), st.sampled_from([None, 2]))
def test_it_agrees_with_json(body: dict[str, Any], ascii: bool, indent: int | None) -> None:
    told = found(json.dumps(body, ensure_ascii=ascii, indent=indent).encode())
    for name in ("model", "stream"):
        value = body.get(name)
        if isinstance(value, dict | list):
            continue  # none of either name is one
        assert told.get(name) == value


def test_the_last_duplicate_counts_and_nested_members_do_not() -> None:
    body = b'{"a": {"model": "x"}, "model": "y", "b": ["model", {"model": "z"}], "model" : "w"}'
    assert found(body) == {"model": "w"}


@pytest.mark.parametrize(
    "body", [b"", b'{"model"', b'{"model": "a', b"]]]", b'"', b'{"model":nul}']
)
def test_what_is_no_json_does_no_harm(body: bytes) -> None:
    assert found(body).get("model") is None


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":"' + b'\\"' * 100_000], ids='["')
def test_other_work_goes_on_while_a_large_body_is_looked_through(body: bytes) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> dict[str, Any]:
        counting = asyncio.create_task(count())
        told = await members(body + b'"model":1', ("model",))
        counting.cancel()
        return told

    assert asyncio.run(both()) == {}
    assert turns > 20
