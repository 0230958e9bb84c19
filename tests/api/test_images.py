"""Images in requests: what the service gets of each protocol, and what a text model refuses."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from anthropic import Anthropic, BadRequestError
from openai import BadRequestError as OpenAIBadRequestError
from openai.types.responses.image_detail import ImageDetail

from quire.api.responses.schema import MessageItem
from quire.api.responses.store import ResponseStore
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.entries import Entries
from quire.media.kinds import inputs
from quire.media.source import MediaSource, not_taken
from quire.serving.generation import Generation
from quire.serving.prompts import Prompts
from quire.serving.service import Service
from tests.api.conftest import HTTP, Serve, Served, openai_client

PNG = b"\x89PNG\r\n\x1a\n"
ENCODED = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{ENCODED}"
WEB_URL = "https://example.com/cat.png"
COUNTDOWN = "<total_tokens>14999841 tokens left</total_tokens>"

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
CALL_ITEM: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def image(url: str, param: str, kind: str, detail: Any = "auto") -> dict[str, Any]:
    """Return an image part as the service gets it."""
    return {"type": "image", "source": MediaSource(url, param, kind, detail)}


def _without_images(spec: Generation) -> Generation:
    """Replace images by text, so that a model without an encoder can be asked the same."""

    def seen(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [text("[image]") if part["type"] == "image" else part for part in content]

    messages = tuple({**each, "content": seen(each["content"])} for each in spec.messages)
    return replace(spec, messages=messages)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Return requests that reached the service, which answers as if the images were words."""
    heard: list[Generation] = []
    prepare, tokens = Prompts.prepare, Prompts.tokens

    async def spy_prepare(self: Prompts, spec: Generation, *, light: bool) -> Any:
        heard.append(spec)
        return await prepare(self, _without_images(spec), light=light)

    async def spy_tokens(self: Prompts, spec: Generation, *, light: bool) -> Any:
        if _without_images(spec) != spec:
            heard.append(spec)
        return await tokens(self, _without_images(spec), light=light)

    monkeypatch.setattr(Prompts, "prepare", spy_prepare)
    monkeypatch.setattr(Prompts, "tokens", spy_tokens)
    monkeypatch.setattr(Service, "modalities", ("text", "image"))
    return heard


def contents(spec: Generation) -> list[Any]:
    return [message["content"] for message in spec.messages]


def ask_chat(served: Served, messages: Any) -> Any:
    return openai_client(served.url).chat.completions.create(model="quire-demo", messages=messages)


def ask_messages(served: Served, messages: Any) -> Any:
    sdk = Anthropic(base_url=served.url, api_key="none", max_retries=0)
    return sdk.messages.create(model="quire-demo", max_tokens=8, messages=messages)


def ask_responses(served: Served, items: Any, **more: Any) -> Any:
    return openai_client(served.url).responses.create(model="quire-demo", input=items, **more)


class TestChat:
    def test_of_users(self, serve: Serve, heard: list[Generation]) -> None:
        parts = [
            text("What is"),
            {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
            text("beside"),
            {
                "type": "image_url",
                "image_url": {"url": WEB_URL},
                "prompt_cache_breakpoint": {"mode": "explicit"},
            },
        ]
        answer = ask_chat(serve("A cat."), [{"role": "user", "content": parts}])
        assert answer.choices[0].message.content == "A cat."
        (spec,) = heard
        assert contents(spec) == [
            [
                text("What is"),
                image(DATA_URL, "messages[0].content[1].image_url.url", "image_url", "low"),
                text("beside"),
                image(WEB_URL, "messages[0].content[3].image_url.url", "image_url"),
            ]
        ]

    def test_of_mistrals_clients(self, serve: Serve, heard: list[Generation]) -> None:
        part = {"type": "image_url", "image_url": WEB_URL}
        ask_chat(serve(), [{"role": "user", "content": [part]}])
        where = "messages[0].content[0].image_url.url"
        assert contents(heard[0]) == [[image(WEB_URL, where, "image_url")]]

    @pytest.mark.parametrize("detail", ["high", "original"])
    def test_of_tools(self, serve: Serve, heard: list[Generation], detail: str) -> None:
        seen = {"type": "image_url", "image_url": {"url": "file:///a.png", "detail": detail}}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [seen, text("Seen.")]},
        ]
        ask_chat(serve(), messages)
        (spec,) = heard
        assert contents(spec)[2] == [
            image("file:///a.png", "messages[2].content[0].image_url.url", "image_url", "high"),
            text("Seen."),
        ]

    def test_are_tokenized(self, serve: Serve, heard: list[Generation]) -> None:
        served = serve()
        message = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": WEB_URL}}],
        }
        answer = HTTP.post(f"{served.url}/tokenize", json={"messages": [message]})
        assert answer.status_code == 200, answer.text
        (spec,) = heard
        name = "messages[0].content[0].image_url.url"
        assert contents(spec) == [[image(WEB_URL, name, "image_url")]]


class TestMessages:
    def test_of_users(self, serve: Serve, heard: list[Generation]) -> None:
        pixels = {"type": "base64", "media_type": "image/png", "data": io.BytesIO(PNG)}
        blocks = [
            {"type": "image", "source": pixels, "cache_control": {"type": "ephemeral"}},
            text("and"),
            {"type": "image", "source": {"type": "url", "url": WEB_URL}, "transformations": {}},
        ]
        answer = ask_messages(serve("A cat."), [{"role": "user", "content": blocks}])
        assert answer.content[0].text == "A cat."
        (spec,) = heard
        assert contents(spec) == [
            [
                image(DATA_URL, "messages[0].content[0].source", "image"),
                text("and"),
                image(WEB_URL, "messages[0].content[2].source", "image"),
            ]
        ]

    def test_of_tools_beside_the_users(self, serve: Serve, heard: list[Generation]) -> None:
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [text("Here:"), _block()],
        }
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result, _block(), text("Well?")]},
        ]
        ask_messages(serve(), messages)
        (spec,) = heard
        assert [each["role"] for each in spec.messages] == ["user", "assistant", "tool", "user"]
        assert contents(spec)[2:] == [
            [text("Here:"), image(DATA_URL, "messages[2].content[0].content[1].source", "image")],
            [image(DATA_URL, "messages[2].content[1].source", "image"), text("Well?")],
        ]

    def test_of_neighbouring_messages_are_one_turn(
        self, serve: Serve, heard: list[Generation]
    ) -> None:
        messages = [
            {"role": "user", "content": [_block()]},
            {"role": "user", "content": "Again:"},
            {"role": "user", "content": [_block()]},
        ]
        ask_messages(serve(), messages)
        (spec,) = heard
        assert contents(spec) == [
            [
                image(DATA_URL, "messages[0].content[0].source", "image"),
                text("Again:"),
                image(DATA_URL, "messages[2].content[0].source", "image"),
            ]
        ]

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            ([], ["Error:"]),
            (["No such window."], ["Error:", "No such window."]),
            (["An error: no window."], ["An error: no window."]),
        ],
    )
    def test_of_a_tool_that_failed(
        self, serve: Serve, heard: list[Generation], said: list[str], told: Sequence[str]
    ) -> None:
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": [_block(), *(text(each) for each in said)],
            "is_error": True,
        }
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result]},
        ]
        ask_messages(serve(), messages)
        (spec,) = heard
        shown = contents(spec)[2]
        assert image(DATA_URL, "messages[2].content[0].content[0].source", "image") in shown
        assert [part["text"] for part in shown if part["type"] == "text"] == told

    def test_are_counted(self, serve: Serve, heard: list[Generation]) -> None:
        served = serve()
        sdk = Anthropic(base_url=served.url, api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": [_block(), text("What?")]}]
        counted = sdk.messages.count_tokens(model="quire-demo", messages=messages)
        assert contents(heard[0])[0][0] == image(DATA_URL, "messages[0].content[0].source", "image")
        answer = sdk.messages.create(model="quire-demo", max_tokens=8, messages=messages)
        assert counted.input_tokens == answer.usage.input_tokens

    def test_stay_when_a_countdown_behind_them_is_cut(
        self, serve: Serve, heard: list[Generation]
    ) -> None:
        served = serve()
        ask_messages(served, [{"role": "user", "content": [_block(), text(COUNTDOWN)]}])
        prompt = served.tokenizer.decode(served.engine.requests[0].prompt)
        assert "tokens left" not in prompt
        assert "[image]" in prompt


def _block() -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
    return {"type": "image", "source": source}


class TestResponses:
    def test_of_messages(self, serve: Serve, heard: list[Generation]) -> None:
        parts = [
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "image_url": DATA_URL, "detail": "low", "file_id": None},
        ]
        items = [
            {"role": "developer", "content": [{"type": "input_image", "image_url": WEB_URL}]},
            {"role": "user", "content": parts},
        ]
        assert ask_responses(serve("A cat."), items).output_text == "A cat."
        (spec,) = heard
        assert contents(spec) == [
            [image(WEB_URL, "input[0].content[0].image_url", "input_image")],
            [
                text("What?"),
                image(DATA_URL, "input[1].content[1].image_url", "input_image", "low"),
            ],
        ]

    @pytest.mark.parametrize("custom", [True, False])
    @pytest.mark.parametrize("detail", get_args(ImageDetail))
    def test_of_tools(
        self, serve: Serve, heard: list[Generation], custom: bool, detail: str
    ) -> None:
        call, output = CALL_ITEM, "function_call_output"
        if custom:
            call = {"type": "custom_tool_call", "call_id": "c1", "name": "look", "input": "up"}
            output = "custom_tool_call_output"
        seen = [{"type": "input_image", "image_url": DATA_URL, "detail": detail}]
        read = "high" if detail == "original" else detail
        items = [
            {"role": "user", "content": "Look."},
            call,
            {"type": output, "call_id": "c1", "output": seen},
        ]
        ask_responses(serve(), items)
        (spec,) = heard
        assert contents(spec)[2] == [
            image(DATA_URL, "input[2].output[0].image_url", "input_image", read)
        ]

    def test_are_kept_with_the_conversation(self, serve: Serve, heard: list[Generation]) -> None:
        served = serve()
        part = {"type": "input_image", "image_url": DATA_URL}
        first = ask_responses(served, [{"role": "user", "content": [part]}])
        ask_responses(served, "And now?", previous_response_id=first.id)
        before = contents(heard[1])[0][0]["source"]
        assert (before.url, before.named) == (DATA_URL, "input_image")

    def test_count_in_the_store(self) -> None:
        part = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 3000}
        item = MessageItem.model_validate({"role": "user", "content": [part]})
        entries = Entries(max_count=100, max_bytes=5000)
        store = ResponseStore(entries)
        for number in range(2):
            store.add(f"resp_{number}", (b"{}",), (StoredItem.of(item),), ())
        assert len(entries) == 1
        assert 3000 < entries.size <= 5000


class TestTextModels:
    """Refusals of images by a text model, as each SDK reads them."""

    def test_chat(self, serve: Serve) -> None:
        part = {"type": "image_url", "image_url": {"url": DATA_URL}}
        with pytest.raises(OpenAIBadRequestError) as raised:
            ask_chat(serve(), [{"role": "user", "content": [text("What?"), part]}])
        _check(raised.value, "image_url", "messages[0].content[1].image_url.url")

    def test_responses(self, serve: Serve) -> None:
        part = {"type": "input_image", "image_url": DATA_URL}
        with pytest.raises(OpenAIBadRequestError) as raised:
            ask_responses(serve(), [{"role": "user", "content": [part]}])
        _check(raised.value, "input_image", "input[0].content[0].image_url")

    def test_messages(self, serve: Serve) -> None:
        served = serve()
        said = str(not_taken(MediaSource("", "messages[0].content[0].source", "image")))
        with pytest.raises(BadRequestError) as raised:
            ask_messages(served, [{"role": "user", "content": [_block()]}])
        assert said in str(raised.value)
        body = {"model": "quire-demo", "messages": [{"role": "user", "content": [_block()]}]}
        answer = HTTP.post(f"{served.url}/v1/messages/count_tokens", json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)

    def test_tokenize(self, serve: Serve) -> None:
        part = {"type": "image_url", "image_url": {"url": DATA_URL}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = HTTP.post(f"{serve().url}/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content")

    def test_history_continues_without_earlier_images(self, serve: Serve) -> None:
        served = serve("Fine.")
        shown = {"type": "image_url", "image_url": {"url": DATA_URL}}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        asked = [
            {"role": "user", "content": [text("What?"), shown]},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [shown]},
        ]
        _goes_on(
            served,
            "chat/completions",
            {"messages": asked},
            "messages[0].content[1].image_url.url, messages[3].content[0].image_url.url",
        )
        item = {"type": "input_image", "image_url": DATA_URL}
        items = [{"role": "user", "content": [item]}, {"role": "user", "content": "Look."}]
        first = _goes_on(
            served, "responses", {"input": items}, "input[0].content[0].image_url", times=1
        )
        more = {"previous_response_id": first["id"], "input": "And?"}
        _goes_on(served, "responses", more, "input[-3].content[0].image_url", times=1)
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [_block()]}
        blocks = [
            {"role": "user", "content": [_block(), {"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        _goes_on(
            served,
            "messages",
            {"model": "quire-demo", "max_tokens": 9, "messages": blocks},
            "messages[0].content[0].source, messages[2].content[0].content[0].source",
        )
        body = {"model": "quire-demo", "messages": blocks}
        counted = HTTP.post(f"{served.url}/v1/messages/count_tokens", json=body)
        assert counted.status_code == 200, counted.text

    def test_history_goes_on_without_files(self, serve: Serve) -> None:
        served, later = serve("Fine."), {"role": "user", "content": "Look."}
        file = {"type": "file", "file": {"file_id": "file-1"}}
        asked = {"messages": [{"role": "user", "content": [text("What?"), file]}, later]}
        at = "messages[0].content[1]"
        _goes_on(served, "chat/completions", asked, at, 1, "file")
        item = {"type": "input_file", "file_id": "file-1"}
        items = {"input": [{"role": "user", "content": [item]}, later]}
        _goes_on(served, "responses", items, "input[0].content[0]", 1, "file")
        source = {"type": "base64", "media_type": "application/msword", "data": "AA=="}
        block = {"type": "document", "source": source}
        blocks = {"messages": [{"role": "user", "content": [block]}, later]}
        body = {"model": "quire-demo", "max_tokens": 9} | blocks
        _goes_on(served, "messages", body, "messages[0].content[0].source", 1, "file")
        for path, refused, said in (
            ("chat/completions", {"messages": asked["messages"][:1]}, "'file'"),
            ("responses", {"input": items["input"][:1]}, "'input_file'"),
            ("messages", body | {"messages": blocks["messages"][:1]}, "'document'"),
        ):
            answer = HTTP.post(f"{served.url}/v1/{path}", json=refused)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]

    def test_the_newest_question_is_refused_beside_older_ones(self, serve: Serve) -> None:
        blocks = [
            {"role": "user", "content": "Look."},
            {"role": "user", "content": [_block(), {"type": "text", "text": "What?"}]},
        ]
        with pytest.raises(BadRequestError, match=r"messages\[1\].content\[0\].source"):
            ask_messages(serve(), blocks)


def _goes_on(
    served: Served,
    path: str,
    body: dict[str, Any],
    told: str,
    times: int = 2,
    kind: str = "image",
) -> dict[str, Any]:
    """Return a text model's answer to a history that holds media."""
    answer = HTTP.post(f"{served.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-quire-ignored-fields"] == told
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert prompt.count(inputs()[kind].left_out) == times
    whole: dict[str, Any] = answer.json()
    return whole


def _check(error: OpenAIBadRequestError, kind: str, param: str) -> None:
    assert (error.code, error.param) == ("unsupported_content", param)
    assert str(not_taken(MediaSource("", param, kind))) in str(error)
