"""Adapters as models: chosen by name, listed, and named in answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from quire.core.config import ServerConfig
from quire.core.messages import ChangeAdapter
from quire.demo import MODEL_DIR
from tests.api.conftest import HTTP, Serve
from tests.support.child import quire_serve
from tests.support.waiting import wait_until

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
        latest = {**BODIES[path], "model": f"{name}:latest"}
        answer = HTTP.post(f"{served.url}/v1/{path}", json=latest)
        assert answer.json()["model"] == name, answer.text
        assert served.engine.requests[-1].adapter == adapter
    wrong = HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], "model": "c"})
    assert wrong.status_code == 404


def test_adapters_are_listed(serve: Serve) -> None:
    url = serve(config=ServerConfig(adapters=("a", "b"))).url
    listed = HTTP.get(f"{url}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["quire-demo", "a", "b"]
    assert [each.get("parent") for each in listed] == [None, "quire-demo", "quire-demo"]
    assert HTTP.get(f"{url}/v1/models/b").json()["id"] == "b"


def test_adapters_come_and_go(serve: Serve, tmp_path: Path) -> None:
    served = serve(config=ServerConfig(adapters=("a",), adapter_folder=str(tmp_path)))
    url = served.url

    def post(path: str, **body: str) -> httpx.Response:
        return HTTP.post(f"{url}/v1/{path}", json=body)

    assert post("completions", prompt="x", model="late").status_code == 404
    loaded = post("load_lora_adapter", lora_name="late", lora_path="lora")
    assert loaded.status_code == 200, loaded.text
    assert served.engine.questions == [ChangeAdapter(0, "late", str(tmp_path / "lora"))]
    assert post("completions", prompt="x", model="late").json()["model"] == "late"
    assert served.engine.requests[-1].adapter == "late"
    names = [each["id"] for each in HTTP.get(f"{url}/v1/models").json()["data"]]
    assert names == ["quire-demo", "a", "late"]
    taken = post("load_lora_adapter", lora_name="a", lora_path="lora")
    assert "already the name of a model" in taken.json()["error"]["message"]
    assert post("unload_lora_adapter", lora_name="late").status_code == 200
    assert post("unload_lora_adapter", lora_name="late").status_code == 400
    assert post("completions", prompt="x", model="late").status_code == 404
    for outside in ("..", "../other", "/etc", ".", "a\0b"):
        refused = post("load_lora_adapter", lora_name="x", lora_path=outside)
        assert refused.status_code == 403


def test_adapters_stay_where_the_operator_says_nothing(serve: Serve) -> None:
    answer = HTTP.post(f"{serve().url}/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert answer.status_code == 501
    assert "--adapter-folder" in answer.text


@pytest.mark.slow
def unloads_while_used(url: str, post: Callable[..., httpx.Response]) -> None:
    """Unload the adapter while a stream uses it: from then on nobody else does."""
    asked = {"prompt": "1", "model": "late", "max_tokens": 1}
    endless = {**asked, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with HTTP.stream("POST", f"{url}/v1/completions", json=endless) as answer:
            lines = answer.iter_lines()  # the answer is left when nobody holds this
            assert "text" in next(lines)
            unloading = pool.submit(post, "unload_lora_adapter", lora_name="late")
            wait_until(lambda: post("completions", **asked).status_code == 404)
            assert not unloading.done()
        assert unloading.result().status_code == 200


def test_an_engine_reads_an_adapter_while_it_serves(tmp_path: Path) -> None:
    """The real command: a large body, which a job reads, names an adapter that came later."""
    folder = tmp_path / "adapters" / "lora"
    folder.mkdir(parents=True)
    targets = {"target_modules": ["q_proj"]}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = mx.load(str(MODEL_DIR / "model.safetensors"))
    assert isinstance(weights, dict)
    tensors = {}
    for name, array in weights.items():
        if name.endswith("self_attn.q_proj.weight") and "language_model" in name:
            path = "base_model.model." + name.removesuffix(".weight")
            outputs, inputs = array.shape
            tensors[f"{path}.lora_A.weight"] = mx.random.normal((2, inputs))
            tensors[f"{path}.lora_B.weight"] = mx.random.normal((outputs, 2))
    assert tensors
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    with quire_serve(tmp_path, "--adapter-folder", str(folder.parent)) as server:

        def post(path: str, **body: Any) -> httpx.Response:
            return HTTP.post(f"{server.url}/v1/{path}", json=body)

        asked: dict[str, Any] = {
            "prompt": "1 2 3",
            "max_tokens": 8,
            "logprobs": 1,
            "user": "x" * 20_000,
        }
        plain = post("completions", **asked).json()["choices"][0]["logprobs"]["token_logprobs"]
        answer = post("load_lora_adapter", lora_name="late", lora_path="lora")
        assert answer.status_code == 200, answer.text
        late = post("completions", **asked, model="late").json()
        assert late["model"] == "late"
        assert late["choices"][0]["logprobs"]["token_logprobs"] != plain
        for path in ("nothing", "x" * 5_000):
            missing = post("load_lora_adapter", lora_name="none", lora_path=path)
            assert missing.status_code == 400, missing.text
        unloads_while_used(server.url, post)
        again = post("completions", **asked).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert again == pytest.approx(plain, abs=1e-3)
