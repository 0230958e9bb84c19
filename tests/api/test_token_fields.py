"""Fields about single tokens, in every protocol: which may come, are shown, are kept."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.core.request import Request
from tests.api.conftest import HTTP, Serve, Served, blocks
from tests.api.test_foreign_fields import BODIES, passed, post
from tests.support.scripted_engine import Script


@pytest.mark.parametrize("path", BODIES)
def test_tokens_that_may_come(serve: Serve, path: str) -> None:
    served = serve()
    fields = {"allowed_token_ids": [5, 9], "bad_words": ["fox", " ox"], "min_tokens": 4}
    assert passed(post(served, path, **fields)) == []
    request = served.engine.requests[0]
    assert request.rules.allowed == (5, 9)
    spelled = {served.ids(each) for each in ("fox", " fox", " ox")}
    assert spelled <= set(request.rules.banned)
    assert request.min_tokens == 4
    refused: list[dict[str, Any]] = [
        {"allowed_token_ids": [10**8]},
        {"allowed_token_ids": []},
        {"bad_words": [""]},
    ]
    for wrong in refused:
        assert post(served, path, **wrong).status_code == 400


def _text(path: str, answer: httpx.Response) -> str:
    """Return the text of an answer in any protocol."""
    body = answer.json()
    match path:
        case "chat/completions":
            text = body["choices"][0]["message"]["content"]
        case "completions":
            text = body["choices"][0]["text"]
        case "responses":
            text = body["output"][0]["content"][0]["text"]
        case _:
            text = body["content"][0]["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", [each for each in BODIES if each != "responses"])
def test_the_stop_string_stays_if_asked_for(serve: Serve, path: str) -> None:
    served = serve("one two three")
    name = "stop_sequences" if path == "messages" else "stop"
    limit = {"max_tokens": 50, name: ["two"]}
    assert _text(path, post(served, path, **limit)) == "one "
    answer = post(served, path, **limit, include_stop_str_in_output=True)
    assert _text(path, answer) == "one two"
    assert passed(answer) == []


@pytest.mark.parametrize("path", BODIES)
def test_the_clients_own_stop_token_stays_if_asked_for(serve: Serve, path: str) -> None:
    served = serve()
    *_, last = served.ids("one two")
    served.engine.script = lambda _: Script((*served.ids("one two"), 5))
    fields = {"stop_token_ids": [last], "max_tokens": 50}
    if path == "responses":
        fields["max_output_tokens"] = fields.pop("max_tokens")
    short = _text(path, post(served, path, **fields))
    whole = _text(path, post(served, path, **fields, include_stop_str_in_output=True))
    assert whole == "one two"
    assert short == served.tokenizer.decode(served.ids("one two")[:-1])


@pytest.mark.parametrize("path", BODIES)
def test_special_tokens_are_shown_if_asked_for(serve: Serve, path: str) -> None:
    served = serve()
    special = served.tokenizer.token_id("<bos>")
    assert special is not None
    served.engine.script = lambda _: Script((*served.ids("fox"), special))
    limit = {} if path == "responses" else {"max_tokens": 50}
    assert _text(path, post(served, path, **limit)) == "fox"
    shown = post(served, path, **limit, skip_special_tokens=False)
    assert (_text(path, shown), passed(shown)) == ("fox<bos>", [])


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_cut_to_as_many_tokens(serve: Serve, path: str) -> None:
    served = serve()
    post(served, path)
    whole = served.engine.requests[0].prompt
    cuts: tuple[dict[str, Any], ...] = (
        {},
        {"truncation_side": "left"},
        {"truncation_side": "right"},
    )
    for more in cuts:
        assert passed(post(served, path, truncate_prompt_tokens=1, **more)) == []
    kept = [each.prompt for each in served.engine.requests[1:]]
    assert kept == [whole[-1:], whole[-1:], whole[:1]]


def test_a_long_prompt_is_truncated_to_the_context(serve: Serve) -> None:
    served = serve()
    body = {"prompt": [5] * 9000, "max_tokens": 100}
    assert post(served, "completions", **body).status_code == 400
    assert post(served, "completions", **body, truncate_prompt_tokens=-1).status_code == 200
    (request,) = served.engine.requests
    assert len(request.prompt) == served.engine.info.context_length - 100
    assert request.max_tokens == 100


def _streamed(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODIES[path], **fields, "stream": True}
    events = blocks(f"{served.url}/v1/{path}", body)
    return [json.loads(each.removeprefix("data: ")) for each in events if "[DONE]" not in each]


def test_token_ids_come_with_the_text(serve: Serve) -> None:
    ids: list[tuple[int, ...]] = []

    def script(request: Request) -> Script:
        ids.append(request.prompt)
        return Script(served.ids("one two three"), group=2)

    served = serve()
    served.engine.script = script
    for path in ("completions", "chat/completions"):
        fields = {"return_token_ids": True, "max_tokens": 50, "n": 2}
        body = post(served, path, **fields).json()
        chunks = _streamed(served, path, **fields)
        for index in (0, 1):
            choice = body["choices"][index]
            assert choice["token_ids"][:-1] == list(served.ids("one two three"))
            streamed = [
                token
                for chunk in chunks
                for each in chunk["choices"]
                if each["index"] == index
                for token in each.get("token_ids", ())
            ]
            assert streamed == choice["token_ids"]
        prompt = list(ids.pop())
        if path == "completions":
            assert [each["prompt_token_ids"] for each in body["choices"]] == [prompt, prompt]
            firsts = [c for chunk in chunks for c in chunk["choices"] if "prompt_token_ids" in c]
            assert [each["prompt_token_ids"] for each in firsts] == [prompt, prompt]
        else:
            assert body["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == prompt
            assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert "token_ids" not in HTTP.post(f"{served.url}/v1/completions", json={"prompt": "x"}).text


def test_logprobs_name_tokens_by_their_ids_if_asked(serve: Serve) -> None:
    served = serve("fox")
    number = f"token_id:{served.ids('fox')[0]}"
    asked = {"return_tokens_as_token_ids": True}
    chat = post(served, "chat/completions", logprobs=True, **asked).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == number
    text = post(served, "completions", logprobs=0, **asked).json()
    assert text["choices"][0]["logprobs"]["tokens"][0] == number
    said = post(served, "responses", include=["message.output_text.logprobs"], **asked).json()
    assert said["output"][0]["content"][0]["logprobs"][0]["token"] == number
    assert passed(post(served, "messages", **asked)) == ["return_tokens_as_token_ids"]
