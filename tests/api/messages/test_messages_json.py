"""Bodies of `/v1/messages` that are nearly JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.shared.lenient_json import parse_lenient
from quire.core.errors import RequestError
from tests.api.conftest import HTTP, Serve
from tests.support.server import JSON_TYPE

MEANT = [
    (rb'"\s+\d"', r"\s+\d"),
    (rb'"\s \\d"', r"\s \d"),
    (rb'"C:\user\data"', r"C:\user\data"),
    (rb'"\u00e9 \u12"', "é \\u12"),
    (rb'"\bword\s\f"', r"\bword\s\f"),
    (rb'"\bx\f"', "\bx\f"),
    (b'"a\tb\nc\rd\x01"', "a\tb\nc\rd\x01"),
    (rb'"\"\s\"\/\n"', '"\\s"/\n'),
    (b'"\\s\xc3\xa9\tx"', "\\sé\tx"),
    (rb'"\ud83d\ude00 \s"', "😀 \\s"),
    (rb'"cut \ud83d"', "cut \N{REPLACEMENT CHARACTER}"),
    (rb'"\ude00\ud83d\ude00\ud83d\u0041"', "\N{REPLACEMENT CHARACTER}😀\N{REPLACEMENT CHARACTER}A"),
    (rb'["\\s", "\\\\", "\s"]', [r"\s", "\\\\", r"\s"]),
    (rb'{"\s": 1, "pattern": "^\d{3}\.\w*$"}', {r"\s": 1, "pattern": r"^\d{3}\.\w*$"}),
]


@pytest.mark.parametrize(("body", "meant"), MEANT)
def test_what_was_meant_is_read(body: bytes, meant: object) -> None:
    assert parse_lenient(body) == meant


BROKEN = [
    (b" ", "The body is empty"),
    (b'{"a": 1,}', "line 1 column 9"),
    (b'{"a": "x",\n "b": }', "line 2 column 7"),
    (b'{"a": "\\s\t\\d\n\n",\n "b": }', "line 4 column 7"),
    (b'{"a": "\\s",  "b": nul }', "line 1 column 22"),
    (b'{"a": "C:\\"}', "line 1 column 12"),
    (b'{"a": "\\s"} x', "line 1 column 13"),
    (b'{"a": "\\s", "b": NaN}', "'b': the number is out of range"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": "\xff"}', "line 1 column"),
]


@pytest.mark.parametrize(("body", "position"), BROKEN)
def test_other_broken_json_is_refused_with_its_position(body: bytes, position: str) -> None:
    with pytest.raises(RequestError, match=position) as raised:
        parse_lenient(body)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * 400_000,
        b"[" + b'"\\s",' * 50_000,
        b"[" + b'"a",' * 400_000,
        b"\n" * 1_000_000,
        b'"\t' * 100_000,
    ],
)
@pytest.mark.timeout(60)
def test_large_bodies_take_linear_time(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_lenient(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(VALUES, st.booleans())
def test_valid_json_is_read_unchanged(value: Any, ascii_only: bool) -> None:
    assert parse_lenient(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(deadline=None)
@given(st.lists(st.sampled_from(['"', "\\", "u", "d", "8", "\n", "a", "{", ":", " ", "é"])))
def test_anything_is_read_or_refused(pieces: list[str]) -> None:
    """Refused bodies are named as such and are not JSON; valid JSON is read unchanged."""
    body = "[" + "".join(pieces) + "]"
    refused = None
    try:
        value = parse_lenient(body.encode())
    except RequestError as error:
        refused = error.code
    try:
        expected = json.loads(body)
    except ValueError:
        assert refused == "invalid_json" or isinstance(value, list)
    else:
        assert refused is None
        assert value == expected


@settings(deadline=None)
@given(st.text(st.sampled_from("\\sdwu. \t\nx1")))
def test_a_text_whose_backslashes_were_not_doubled(text: str) -> None:
    """A text without JSON's escapes is read as it was written."""
    if any(f"\\{escape}" in text for escape in "\\u"):
        return
    if text.endswith("\\"):
        return
    assert parse_lenient(f'"{text}"'.encode()) == text


def test_a_regular_expression_in_a_tools_schema(serve: Serve) -> None:
    served = serve("x")
    body = (
        rb'{"model": "quire-demo", "max_tokens": 8,'
        rb' "messages": [{"role": "user", "content": "Hi"}],'
        rb' "tools": [{"name": "f", "input_schema": {"type": "object", "properties":'
        b' {"id": {"type": "string", "description": "a\tb", "pattern": "^\\d+\\s\\\\w$"}}}}]}'
    )
    answer = HTTP.post(f"{served.url}/v1/messages", content=body, headers=JSON_TYPE)
    assert answer.status_code == 200, answer.text
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert r"^\d+\s\w$" in prompt
    assert "a\tb" in prompt
    chat = HTTP.post(f"{served.url}/v1/chat/completions", content=body, headers=JSON_TYPE)
    assert chat.status_code == 400
    broken = HTTP.post(f"{served.url}/v1/messages", content=body[:-2] + b",]}", headers=JSON_TYPE)
    assert broken.status_code == 400
    assert f"line 1 column {len(body)}" in broken.json()["error"]["message"]
