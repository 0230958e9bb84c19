"""Quire as an application of Ray Serve, as `serve run quire.scale.ray:app` starts it."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_application_answers_behind_rays_proxy() -> None:
    import ray
    from ray import serve

    from quire.scale.arguments import Arguments
    from quire.scale.ray import app

    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18731})
        serve.run(app(Arguments(replicas=1)), name="application", route_prefix="/")
        base = "http://127.0.0.1:18731"
        body = {"messages": [{"role": "user", "content": "What is 27 plus 45?"}], "temperature": 0}
        whole = httpx.post(f"{base}/v1/chat/completions", json=body).json()
        with httpx.stream(
            "POST", f"{base}/v1/chat/completions", json={**body, "stream": True}
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        refused = httpx.post(f"{base}/v1/messages", json={"messages": []})
        page = httpx.get(base, headers={"accept": "text/html"})
    finally:
        serve.shutdown()
        ray.shutdown()
    assert whole["choices"][0]["message"]["content"] == "72"
    assert lines[-1] == "data: [DONE]"
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert page.text.startswith("<!doctype html>")
