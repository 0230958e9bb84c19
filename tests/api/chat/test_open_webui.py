"""Bodies that Open WebUI 0.12.4 sent, as recorded between it and a server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve, Served
from tests.api.test_foreign_fields import passed

ASKED = {"role": "user", "content": "Count from 1 to 30."}
BEGUN = {"role": "assistant", "content": "1 2 3 4"}
USAGE = {"stream_options": {"include_usage": True}}
CONTROLS: dict[str, Any] = {
    "seed": 0,
    "temperature": 0.8,
    "reasoning_effort": "medium",
    "logit_bias": "",
    "max_tokens": 128,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0,
    "frequency_penalty": 1.1,
    "presence_penalty": 0,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "repeat_last_n": 64,
    "tfs_z": 1,
    "repeat_penalty": 1.1,
    "use_mmap": False,
    "use_mlock": False,
    "think": True,
    "format": "json",
    "num_keep": 24,
    "num_ctx": 2048,
    "num_batch": 512,
    "num_thread": 2,
    "num_gpu": 0,
    "keep_alive": "5m",
}
"""All controls of a chat, each at what one click sets it to."""
WITHOUT_EFFECT = {
    *("mirostat_eta", "mirostat_tau", "repeat_last_n", "use_mmap", "use_mlock"),
    *("num_keep", "num_ctx", "num_batch", "num_thread", "num_gpu"),
}


def ask(served: Served, *messages: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"stream": True, "model": "quire-demo", "messages": list(messages), **USAGE, **more}
    return HTTP.post(f"{served.url}/v1/chat/completions", json=body)


def prompt(served: Served) -> str:
    """Return the last prompt that the engine got."""
    return served.tokenizer.decode(served.engine.requests[-1].prompt)


def test_all_controls_of_a_chat_at_once(serve: Serve) -> None:
    served = serve("{}")
    assert set(passed(ask(served, ASKED, **CONTROLS))) == WITHOUT_EFFECT
    (request,) = served.engine.requests
    drawn = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0,
        "frequency_penalty": 1.1,
        "presence_penalty": 0,
        "repetition_penalty": 1.1,
        "seed": 0,
    }
    assert {name: getattr(request.sampling, name) for name in drawn} == drawn
    assert (request.max_tokens, request.grammar is None) == (128, False)
    assert "<|think|>" in prompt(served)


@pytest.mark.parametrize("field", ["logit_bias", "reasoning_effort", "format", "keep_alive"])
def test_a_control_that_nobody_filled_in_asks_for_nothing(serve: Serve, field: str) -> None:
    served = serve()
    plain, empty = (ask(served, ASKED, seed=1, **more) for more in ({}, {field: ""}))
    assert passed(plain) == passed(empty) == []
    one, other = served.engine.requests
    assert (one.sampling, one.prompt, one.grammar) == (other.sampling, other.prompt, other.grammar)


@pytest.mark.parametrize(
    "field", ["max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict"]
)
@pytest.mark.parametrize("limit", [-1, -2])
def test_a_limit_below_0_is_the_contexts(serve: Serve, field: str, limit: int) -> None:
    served = serve()
    assert ask(served, ASKED, **{field: limit}).status_code == 200
    (request,) = served.engine.requests
    assert request.max_tokens == served.engine.info.context_length - len(request.prompt)
    refused = ask(served, ASKED, **{field: -3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_text_that_is_no_format_is_passed_over(serve: Serve) -> None:
    served = serve()
    assert passed(ask(served, ASKED, format="xml")) == ["format"]
    assert ask(served, ASKED, format='{"type": ').json()["error"]["param"] == "format"


@pytest.mark.parametrize(
    "more", [{}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_continue_response(serve: Serve, more: dict[str, Any]) -> None:
    """Open WebUI asks for it in two forms; the second is for connections to llama.cpp."""
    served = serve(" 5 6")
    assert passed(ask(served, ASKED, BEGUN, **more)) == []
    assert prompt(served).endswith(BEGUN["content"])
    counted = HTTP.post(f"{served.url}/tokenize", json={"messages": [ASKED, BEGUN]}).json()
    assert tuple(counted["tokens"]) == served.engine.requests[-1].prompt


CALL = {
    "role": "assistant",
    "content": "Wait.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    ],
}


@pytest.mark.parametrize(
    ("last", "more"),
    [
        (BEGUN, {"continue_final_message": False}),
        (BEGUN, {"add_generation_prompt": True}),
        ({"role": "assistant", "content": "", "reasoning_content": "Hm."}, {}),
    ],
)
def test_what_is_answered_anew(serve: Serve, last: dict[str, Any], more: dict[str, Any]) -> None:
    served = serve()
    assert passed(ask(served, ASKED, last, **more)) == []
    assert prompt(served).endswith("<|turn>model\n")


def test_a_call_is_no_start_of_an_answer(serve: Serve) -> None:
    served = serve()
    assert passed(ask(served, ASKED, CALL)) == []
    assert prompt(served).endswith("<tool_call|>")


def test_no_answer_starts_without_its_opening(serve: Serve) -> None:
    assert passed(ask(serve(), ASKED, add_generation_prompt=False)) == ["add_generation_prompt"]


def test_of_two_fields_that_contradict_each_other_one_is_named(serve: Serve) -> None:
    served = serve()
    more = {"continue_final_message": True, "add_generation_prompt": True}
    assert passed(ask(served, ASKED, BEGUN, **more)) == ["add_generation_prompt"]
    assert prompt(served).endswith(BEGUN["content"])


def test_a_models_state_in_llama_cpps_words(serve: Serve) -> None:
    url = serve(config=ServerConfig()).url  # its own: it is unloaded
    listed = HTTP.get(f"{url}/models").json()
    assert listed == HTTP.get(f"{url}/v1/models").json()
    states = [listed["data"][0]["status"]]
    for verb in ("unload", "load"):
        answer = HTTP.post(f"{url}/models/{verb}", json={"model": "quire-demo"})
        states.append(answer.json()["status"])
    assert [state["value"] for state in states] == ["loaded", "unloaded", "loaded"]
    assert not any(state["failed"] for state in states)


def test_the_effort_of_a_connection_that_is_of_responses(serve: Serve) -> None:
    served = serve()
    said = {"type": "input_text", "text": "What is 27 plus 45?"}
    body = {
        "model": "quire-demo",
        "input": [{"type": "message", "role": "user", "content": [said]}],
    }
    for asked in ({"reasoning_effort": "medium"}, {"reasoning": {"effort": "medium"}}):
        answer = HTTP.post(f"{served.url}/v1/responses", json=body | asked)
        assert passed(answer) == []
        assert answer.json()["reasoning"]["effort"] == "medium"
        assert "<|think|>" in prompt(served)
