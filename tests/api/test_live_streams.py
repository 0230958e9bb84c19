"""The live view's knowledge of streams and of refused requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.api.shared import live_streams
from quire.api.shared.live_streams import Stream
from quire.api.shared.metrics import CallerMetrics
from quire.core.config import ServerConfig
from quire.core.request import FinishReason
from quire.text.events import Finished, Usage
from tests.api.conftest import HTTP, NAME, Serve, Served

ASK = {"messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"


def test_how_long_a_prompt_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 100.0
    monkeypatch.setattr(live_streams, "time", SimpleNamespace(perf_counter=lambda: told))
    stream = Stream(1000, "quire-demo")
    stream.read(100, 0, "new", 60.0)
    assert stream.view(told + 20)["left_s"] == 40
    assert stream.view(told + 90)["left_s"] == 0
    stream.read(1000, 0, "new")
    assert stream.view(told + 20)["left_s"] is None


def test_an_answer_is_counted_once_also_when_nobody_waits_for_its_end() -> None:
    counted = CallerMetrics(("me",))
    left, answered = (counted.observer("me", 8, "quire-demo") for _ in range(2))
    left.gone()
    answered.ended(Finished(FinishReason.STOP, Usage(8, 1)))
    answered.gone()
    for metrics in (counted.all, counted.of("me")):
        assert metrics.ends == {"abort": 1, "stop": 1}
        ended = metrics.view()["ended"]
        assert [stream["id"] for stream in ended] == [2, 1]
        assert [stream["finish"] for stream in ended] == ["stop", "abort"]


def refused(served: Served, **headers: str) -> list[tuple[str, str | None, int, str, int]]:
    """Return the live view's refusals, newest first."""
    served.settle()
    headers = {"accept": "application/json", **headers}
    view = HTTP.get(f"{served.url}/metrics", headers=headers).json()
    assert all(each["ended_s"] >= 0 for each in view["refused"])
    names = ("path", "model", "status", "message", "count")
    return [tuple(each[name] for name in names) for each in view["refused"]]


def test_refused_requests_are_listed_apart_from_answers(serve: Serve) -> None:
    served = serve(config=ServerConfig(max_body_bytes=2000))
    HTTP.post(served.url + CHAT, json=ASK)
    for body in ({**ASK, "temperature": -9}, {**ASK, "model": "x"}, {**ASK, "user": "x" * 3000}):
        assert HTTP.post(served.url + CHAT, json=body).status_code >= 400
    HTTP.post(served.url + "/v1" + CHAT, json=ASK)
    HTTP.get(f"{served.url}/favicon.ico")
    double, large, unknown, hot = refused(served)
    assert double[:3] == ("/v1" + CHAT, None, 404)
    assert large[:3] == (CHAT, None, 413)
    assert unknown[2] == 404
    assert "'x' is not served here" in unknown[3]
    assert hot[:3] == (CHAT, NAME, 400)
    assert "temperature" in hot[3]


def test_a_client_that_errs_without_end_hides_nobody(serve: Serve) -> None:
    served = serve(config=ServerConfig())
    HTTP.post(served.url + CHAT, json=ASK)
    for _ in range(5):
        HTTP.post(served.url + CHAT, json={**ASK, "temperature": -9})
    for number in range(25):
        HTTP.post(f"{served.url}/v1/x{number}{'x' * 500}", json=ASK)
    assert len(refused(served)) == 20
    HTTP.post(served.url + CHAT, json={**ASK, "n": 0})
    HTTP.post(served.url + CHAT, json={**ASK, "n": 0})
    first, second, *_ = refused(served)
    assert (first[2], first[4], second[4]) == (400, 2, 1)
    assert len(second[0]) == 80
    view = HTTP.get(f"{served.url}/metrics", headers={"accept": "application/json"}).json()
    assert [each["finish"] for each in view["ended"]] == ["stop"]


def test_each_key_sees_its_own_refusals(serve: Serve) -> None:
    served = serve(config=ServerConfig(api_keys=("first", "second"), metrics_key="all"))
    for key in ("first", "second", "wrong"):
        bearer = {"authorization": f"Bearer {key}"}
        HTTP.post(served.url + CHAT, json={**ASK, "temperature": -9}, headers=bearer)
    seen = [
        [(status, count) for _, _, status, _, count in refused(served, authorization=f"Bearer {k}")]
        for k in ("first", "second", "all")
    ]
    assert seen == [[(400, 1)], [(400, 1)], [(401, 1), (400, 2)]]
