"""Adapters as models: chosen by name, listed, and named in answers."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve

ASK = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": ASK, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_model_name_chooses_an_adapter(serve: Serve, path: str) -> None:
    served = serve(config=ServerConfig(adapters=("a", "b")))
    for name, adapter in (("a", "a"), ("b", "b"), ("quire-demo", "")):
        answer = HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], "model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        assert served.engine.requests[-1].adapter == adapter
    wrong = HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], "model": "c"})
    assert wrong.status_code == 404


def test_adapters_are_listed(serve: Serve) -> None:
    url = serve(config=ServerConfig(adapters=("a", "b"))).url
    listed = HTTP.get(f"{url}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["quire-demo", "a", "b"]
    assert [each.get("parent") for each in listed] == [None, "quire-demo", "quire-demo"]
    assert HTTP.get(f"{url}/v1/models/b").json()["id"] == "b"
