"""A prompt that is too long is refused in the words on which clients compact a conversation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.core.errors import ContextOverflow
from quire.core.request import Failure
from tests.api.conftest import HTTP, Serve
from tests.support.scripted_engine import Script

LONG = [{"role": "user", "content": "word " * 90}]
OPENAI = [
    ("chat/completions", {"messages": LONG, "max_tokens": 4000}),
    ("completions", {"prompt": "word " * 90, "max_tokens": 4000}),
    ("responses", {"input": LONG}),
]
ENGINE = Failure.of(ContextOverflow(90, 50, param="prompt", because="It holds no more."))


def refused(serve: Serve, path: str, body: dict[str, Any], *, by_engine: bool) -> dict[str, Any]:
    served = serve(lambda _: Script(error=ENGINE)) if by_engine else serve(context_length=50)
    answer = HTTP.post(f"{served.url}/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_in_openais_words(
    serve: Serve, path: str, body: dict[str, Any], stream: bool, by_engine: bool
) -> None:
    error = refused(serve, path, {**body, "stream": stream}, by_engine=by_engine)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 50 tokens" in error["message"]
    assert "prompt is too long" in error["message"]
    assert re.search(r"resulted in (at least )?\d+ tokens", error["message"])


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_in_anthropics_words(serve: Serve, stream: bool, by_engine: bool) -> None:
    body = {"model": "quire-demo", "messages": LONG, "max_tokens": 4000, "stream": stream}
    error = refused(serve, "messages", body, by_engine=by_engine)
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found is not None, error
    assert int(found[1]) > int(found[2]) == 49
    assert error["details"] == {"error_code": "context_length_exceeded"}
