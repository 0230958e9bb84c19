"""Ollama's API: as bytes, and by the official client against a real server."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any, Literal

import httpx
import pytest
from PIL import Image
from pydantic import BaseModel

from quire.core.request import Failure
from tests.api.conftest import HTTP, Serve
from tests.support.child import Child
from tests.support.scripted_engine import Script

HI = [{"role": "user", "content": "Hi."}]
GREEDY = {"temperature": 0, "num_predict": 12}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Wall(BaseModel):
    color: Literal["red", "blue"]
    dry: bool


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{url}{path}", json=body)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_streams_say_what_whole_answers_say(child: Child) -> None:
    parts = lines(post(child.url, "/api/chat", model="quire-demo", messages=HI, options=GREEDY))
    whole = post(child.url, "/api/chat", messages=HI, options=GREEDY, stream=False).json()
    text = "".join(part["message"]["content"] for part in parts)
    assert text == whole["message"]["content"] != ""
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    counts = ("prompt_eval_count", "eval_count", "done_reason")
    assert [parts[-1][name] for name in counts] == [whole[name] for name in counts]
    assert whole["eval_count"] <= 12
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    openai = {"messages": HI, "temperature": 0, "max_tokens": 12}
    served = post(child.url, "/v1/chat/completions", **openai).json()
    assert served["choices"][0]["message"]["content"] == text


def test_generate_goes_through_the_template_unless_raw(child: Child) -> None:
    whole = post(child.url, "/api/generate", prompt="Hi.", options=GREEDY, stream=False).json()
    parts = lines(post(child.url, "/api/generate", prompt="Hi.", options=GREEDY))
    assert "".join(part["response"] for part in parts) == whole["response"]
    said = post(child.url, "/api/chat", messages=HI, options=GREEDY, stream=False).json()
    assert whole["response"] == said["message"]["content"]
    raw = {"prompt": "1 2 3", "raw": True, "options": GREEDY, "stream": False}
    bare = post(child.url, "/v1/completions", prompt="1 2 3", temperature=0, max_tokens=12).json()
    assert post(child.url, "/api/generate", **raw).json()["response"] == bare["choices"][0]["text"]


def test_formats_bind(child: Child) -> None:
    schema = Wall.model_json_schema()
    asked = {"messages": HI, "format": schema, "stream": False, "options": {"num_predict": 200}}
    Wall.model_validate_json(post(child.url, "/api/chat", **asked).json()["message"]["content"])


def test_pictures_are_seen(child: Child) -> None:
    written = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(written, "PNG")
    picture = base64.b64encode(written.getvalue()).decode()
    seeing = [{"role": "user", "content": "What is it?", "images": [picture]}]
    blind = [{"role": "user", "content": "What is it?"}]
    counts = [
        post(child.url, "/api/chat", messages=each, options=GREEDY, stream=False).json()
        for each in (seeing, blind)
    ]
    assert counts[0]["prompt_eval_count"] > counts[1]["prompt_eval_count"] + 4


def test_calls_come_whole_and_go_back(serve: Serve) -> None:
    served = serve("<|tool_call>call:add{a:1}<tool_call|>")
    parts = lines(post(served.url, "/api/chat", messages=HI, tools=[ADD]))
    (call,) = [each for part in parts for each in part["message"].get("tool_calls", ())]
    assert call["function"] == {"name": "add", "arguments": {"a": 1}}
    assert parts[-1]["done_reason"] == "stop"
    back = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]
    served = serve("Two.")
    assert post(served.url, "/api/chat", messages=back, tools=[ADD], stream=False).json()["done"]
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert "call:add" in prompt
    assert "2" in prompt.rpartition("call:add")[2]


def test_options_reach_the_engine_or_are_named(serve: Serve) -> None:
    served = serve("Hello.")
    options = {"top_k": 5, "repeat_penalty": 1.5, "seed": 7, "num_ctx": 99, "stop": ["x"]}
    answer = post(served.url, "/api/chat", messages=HI, options=options, stream=False)
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.top_k, sampling.repetition_penalty, sampling.seed) == (5, 1.5, 7)
    assert answer.headers["x-quire-ignored-fields"] == "options.num_ctx"
    wrong = post(served.url, "/api/chat", messages=HI, options={"temprature": 1})
    assert (wrong.status_code, "options.temprature" in wrong.json()["error"]) == (400, True)
    assert isinstance(
        post(served.url, "/api/generate", prompt="x", suffix="y").json()["error"], str
    )


def test_log_probabilities(serve: Serve) -> None:
    served = serve("Hello there.")
    asked = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = post(served.url, "/api/chat", **asked, stream=False).json()["logprobs"]
    parts = lines(post(served.url, "/api/chat", **asked))
    assert [each for part in parts for each in part.get("logprobs", ())] == whole
    assert len(whole[0]["top_logprobs"]) == 2


def test_errors_are_messages(serve: Serve) -> None:
    served = serve(lambda _: Script(error=Failure("no room", 503)))
    answer = post(served.url, "/api/chat", messages=HI)
    assert (answer.status_code, answer.json()) == (503, {"error": "no room"})
    missing = post(served.url, "/api/show", model="other")
    assert missing.status_code == 404
    assert "'other'" in missing.json()["error"]


def test_what_is_served(child: Child) -> None:
    (listed,) = HTTP.get(f"{child.url}/api/tags").json()["models"]
    assert (listed["name"], listed["details"]["family"]) == ("quire-demo", "gemma4")
    assert listed["details"]["parameter_size"] == "9.4M"
    assert re.fullmatch("[0-9a-f]{64}", listed["digest"])
    assert set(listed["digest"]) != {"0"}
    (running,) = HTTP.get(f"{child.url}/api/ps").json()["models"]
    assert running["context_length"] == 131072
    shown = post(child.url, "/api/show", model="quire-demo").json()
    assert {"completion", "tools", "vision", "thinking", "embedding"} <= set(shown["capabilities"])
    assert shown["model_info"]["gemma4.context_length"] == 131072
    version = HTTP.get(f"{child.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert post(child.url, "/api/pull", model="quire-demo", stream=False).json() == {
        "status": "success"
    }
    assert post(child.url, "/api/pull", model="other").status_code == 404
    loaded = post(child.url, "/api/chat", model="quire-demo", messages=[]).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")


def test_the_requests_of_vs_codes_provider(child: Child) -> None:
    """It lists and inspects models by Ollama's API, and talks to them by OpenAI's."""
    version = HTTP.get(f"{child.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    for listed in HTTP.get(f"{child.url}/api/tags").json()["models"]:
        shown = post(child.url, "/api/show", model=listed["model"]).json()
        about = shown["model_info"]
        assert about["general.basename"] == listed["name"]
        assert about[f"{about['general.architecture']}.context_length"] == 131072
        assert {"tools", "vision"} <= set(shown["capabilities"])
        answer = post(
            child.url,
            "/v1/chat/completions",
            model=listed["model"],
            messages=[{"role": "system", "content": "You help."}, *HI],
            tools=[ADD],
            tool_choice="auto",
            temperature=0.1,
            top_p=1,
            n=1,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert answer.status_code == 200
        assert "x-quire-ignored-fields" not in answer.headers
        *events, usage, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] <= 8
        deltas = [json.loads(each.removeprefix("data: "))["choices"][0]["delta"] for each in events]
        assert "".join(each.get("content") or "" for each in deltas)


def test_the_official_client_runs_unchanged(child: Child) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(child.url)
    whole = client.chat("quire-demo", HI, options=GREEDY)
    parts = list(client.chat("quire-demo", HI, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    text = client.generate("quire-demo", "Hi.", options=GREEDY)
    assert text.response == whole.message.content
    asked = client.chat("quire-demo", HI, format=Wall.model_json_schema())
    Wall.model_validate_json(asked.message.content)
    vectors = client.embed("quire-demo", ["a", "b"]).embeddings
    assert len(vectors) == 2
    assert client.embeddings("quire-demo", "b").embedding == vectors[1]
    assert client.embeddings("quire-demo", "").embedding == []
    assert client.list().models[0].model == "quire-demo"
    assert client.ps().models[0].model == "quire-demo"
    assert "tools" in client.show("quire-demo").capabilities
    assert client.pull("quire-demo").status == "success"
    assert [each.status for each in client.pull("quire-demo", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="not served here"):
        client.pull("other")
    with pytest.raises(ollama.ResponseError, match="not served here") as error:
        client.chat("other", HI)
    assert error.value.status_code == 404


def test_the_official_client_calls_tools(serve: Serve) -> None:
    ollama = pytest.importorskip("ollama")

    def add(a: int) -> int:
        """Add two numbers."""
        return a

    served = serve("<|tool_call>call:add{a:1}<tool_call|>")
    answer = ollama.Client(served.url).chat("quire-demo", HI, tools=[add])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
