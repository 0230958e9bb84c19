"""The head of a stream is sent when the request is accepted, not with its first token."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from quire.core.request import Failure
from tests.api.conftest import HTTP, Serve
from tests.api.test_foreign_fields import BODIES
from tests.support.scripted_engine import Script


@pytest.mark.parametrize("path", BODIES)
def test_the_head_of_an_accepted_stream_waits_for_no_token(serve: Serve, path: str) -> None:
    first = threading.Event()
    served = serve()
    served.engine.script = lambda _: Script(served.ids("fox"), held=first)
    body = {**BODIES[path], "stream": True}
    with HTTP.stream("POST", f"{served.url}/v1/{path}", json=body) as answer:
        assert answer.status_code == 200
        assert "x-quire-cache-reuse" not in answer.headers
        first.set()
        assert "data: " in "".join(answer.iter_text())


def test_the_head_reports_cached_tokens_if_they_are_known(serve: Serve) -> None:
    first = threading.Event()
    served = serve()
    served.engine.script = lambda _: Script(
        served.ids("fox"), held=first, held_at=0, cached_tokens=3, reuse="", reads=(4,)
    )
    body = {**BODIES["completions"], "stream": True}
    first.set()
    with HTTP.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
        assert answer.headers["x-quire-cached-tokens"] == "3"
        assert answer.read()


def test_a_refusal_of_the_engine_keeps_its_status(serve: Serve) -> None:
    served = serve()
    failure = Failure("No room.", 429, "rate_limit_error", code="no_room")
    served.engine.script = lambda _: Script(error=failure)
    body = {**BODIES["completions"], "stream": True}
    answer: httpx.Response = HTTP.post(f"{served.url}/v1/completions", json=body)
    assert (answer.status_code, json.loads(answer.text)["error"]["code"]) == (429, "no_room")
