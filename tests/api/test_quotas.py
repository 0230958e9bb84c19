"""Priorities of requests, and limits of API keys."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.shared.auth import callers
from quire.api.shared.quotas import Bucket, Quotas
from quire.core.config import KeyLimits, ServerConfig
from quire.core.errors import Overloaded
from tests.api.conftest import HTTP, Serve

ASK = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"model": "quire-demo", "messages": ASK, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_requests_carry_their_priority(serve: Serve, path: str) -> None:
    served = serve()

    def priority(header: str | None = None, **fields: int) -> int:
        headers = {} if header is None else {"x-quire-priority": header}
        answer = HTTP.post(
            f"{served.url}/v1/{path}", json={**BODIES[path], **fields}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        assert "x-quire-ignored-fields" not in answer.headers
        return served.engine.requests[-1].priority

    assert priority() == 0
    assert priority(priority=-3) == -3
    assert priority("2") == 2
    assert priority("2", priority=-3) == 2
    assert priority("2", priority=7) == 7


def test_a_header_that_is_no_priority_is_refused(serve: Serve) -> None:
    for value in ("soon", "1.5", str(2**40)):
        answer = HTTP.post(
            f"{serve().url}/v1/completions",
            json={"prompt": "x"},
            headers={"x-quire-priority": value},
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-quire-priority"


def test_a_key_has_its_own_limits_and_share(serve: Serve) -> None:
    config = ServerConfig(
        api_keys=("one", "two"),
        key_limits={"one": KeyLimits(requests_per_minute=1, share=3)},
    )
    served = serve(config=config)

    def ask(key: str) -> Any:
        return HTTP.post(
            f"{served.url}/v1/chat/completions",
            json={"messages": ASK},
            headers={"authorization": f"Bearer {key}"},
        )

    assert ask("one").status_code == 200
    assert served.engine.requests[-1].share == 3
    refused = ask("one")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert "1 requests a minute" in error["message"]
    assert ask("two").status_code == 200
    assert served.engine.requests[-1].share == 1


def test_answers_use_up_tokens(serve: Serve) -> None:
    served = serve("one two three four five", ServerConfig(default_limits=KeyLimits(None, 40)))
    url, statuses = f"{served.url}/v1/completions", []
    for _ in range(4):
        statuses.append(HTTP.post(url, json={"prompt": [5] * 30}).status_code)
        served.settle()
    assert statuses[0] == 200
    assert statuses[-1] == 429


def test_a_bucket_refills_evenly() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    assert bucket.wait_s(60) == 0
    bucket.take(90)
    assert bucket.wait_s(1) == 31
    now[0] = 31
    assert bucket.wait_s(1) == 0
    now[0] = 1000
    assert bucket.wait_s(60) == 0
    assert bucket.wait_s(61) == 1
    assert Bucket(None, lambda: now[0]).wait_s(1e9) == 0


def test_tokens_of_answers_count() -> None:
    quotas = Quotas(("a", "b"), {"a": KeyLimits(tokens_per_minute=60)}, clock=lambda: 0.0)
    caller, other = callers(("a", "b"))
    quota = quotas.of(caller)
    quota.enter(50)
    quota.enter(5)
    quota.generated(10)
    with pytest.raises(Overloaded, match="60 tokens a minute") as refused:
        quota.enter(1)
    assert refused.value.retry_after_s == 6
    quotas.of(other).enter(1000)
