"""Quire as an application of Ray Serve, as `serve run quire.scale.ray:app` starts it."""

from __future__ import annotations

import httpx
import pytest

from tests.scale.applications import application

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_application_answers_behind_rays_proxy() -> None:
    with application(18731, replicas=1) as running:
        body = {"messages": [{"role": "user", "content": "What is 27 plus 45?"}], "temperature": 0}
        whole = httpx.post(f"{running.url}/v1/chat/completions", json=body).json()
        with httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json={**body, "stream": True}
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        refused = httpx.post(f"{running.url}/v1/messages", json={"messages": []})
        page = httpx.get(running.url, headers={"accept": "text/html"})
    assert whole["choices"][0]["message"]["content"] == "72"
    assert lines[-1] == "data: [DONE]"
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert page.text.startswith("<!doctype html>")
