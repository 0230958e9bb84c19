"""Sound, video, documents over HTTP: through every protocol, placed, reused, bounded, refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from quire.demo.skills import judge, load
from tests.e2e.asking import SKILLS, ask
from tests.e2e.client import CHAT, Client, at_once
from tests.media.files import encoded_sound, greys, pdf, tone, video, wav
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S

MODEL = "quire-demo"
MARKS = {"audio": "<|audio|>", "video": "<|video|>"}
ROWS = 25
"""Rows of a second of sound."""


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    root = tmp_path_factory.mktemp("hearing")
    (root / "sounds").mkdir()
    (root / "sounds" / "tone.wav").write_bytes(wav(tone(1)))
    options = ("--max-audios", "2", "--max-video-seconds", "5", "--max-video-frames", "4")
    with quire_serve(root, *options, "--media-folder", str(root / "sounds")) as child:
        yield child
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"


@pytest.fixture
def client(hearing: Child) -> Iterator[Client]:
    with Client(hearing.url) as client:
        yield client


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def heard(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": format}}


def watched(data: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{encoded(data)}"
    return {"type": "video_url", "video_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def asked(client: Client, *parts: Any) -> httpx.Response:
    return client.post(CHAT, model=MODEL, messages=user(*parts), max_tokens=4, temperature=0)


def test_the_model_says_what_it_takes(hearing: Child) -> None:
    (model,) = httpx.get(f"{hearing.url}/v1/models", timeout=HANG_S).json()["data"]
    assert set(model["modalities"]) == {"text", "image", "video", "audio"}


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_all_protocols_read_the_same(hearing: Child, client: Client, kind: str) -> None:
    data = wav(tone(1)) if kind == "audio" else video(greys(8, (112, 160)))
    part = heard(data) if kind == "audio" else watched(data)
    source = {"type": "base64", "media_type": f"{kind}/x", "data": encoded(data)}
    openai: Any = OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0)
    anthropic: Any = Anthropic(base_url=hearing.url, api_key="none", max_retries=0)
    said = text("What is it?")

    chat = openai.chat.completions.create(model=MODEL, messages=user(part, said), max_tokens=4)
    item = {"type": "input_text", "text": "What is it?"}
    response = openai.responses.create(
        model=MODEL, input=[{"role": "user", "content": [part, item]}], max_output_tokens=4
    )
    block = {"type": kind, "source": source}
    message = anthropic.messages.create(model=MODEL, messages=user(block, said), max_tokens=4)
    without = openai.chat.completions.create(model=MODEL, messages=user(said), max_tokens=4)

    count = chat.usage.prompt_tokens
    assert count == response.usage.input_tokens
    usage = message.usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    body = {"prompt": MARKS[kind], "add_special_tokens": False}
    (mark,) = client.post("/tokenize", **body).json()["tokens"]
    tokens = client.post("/tokenize", messages=user(part, said)).json()["tokens"]
    rows = ROWS if kind == "audio" else 4 * 70
    assert tokens.count(mark) == rows
    assert len(tokens) == count > without.usage.prompt_tokens + rows


def test_a_sound_from_a_folder_is_the_same_sound(hearing: Child, client: Client) -> None:
    path = hearing.log.parent / "sounds" / "tone.wav"
    named = {"type": "audio_url", "audio_url": {"url": f"file://{path}"}}
    first = asked(client, named, text("What is it?")).json()
    second = asked(client, heard(wav(tone(1))), text("What is it, then?")).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > ROWS
    third = asked(client, heard(wav(tone(1, 880.0))), text("What is it?")).json()
    assert third["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] < ROWS


@pytest.mark.parametrize("skill", ["sound_digits", "sound_pitch", "sound_compare"])
def test_what_is_heard_is_understood(client: Client, skill: str) -> None:
    items = load(SKILLS / f"{skill}.jsonl")[:6]
    answers = at_once(partial(ask, client, item) for item in items)
    right = [judge(item, answer) for item, answer in zip(items, answers, strict=True)]
    assert sum(right) >= 5, answers


def test_other_formats_are_heard(client: Client) -> None:
    for kind, codec in (("mp3", "libmp3lame"), ("flac", "flac")):
        answer = asked(client, heard(encoded_sound(tone(1), kind, codec), kind), text("What?"))
        assert answer.status_code == 200, answer.text


BAD: dict[str, tuple[Any, str]] = {
    "cut short": (heard(wav(tone(1))[:-9]), "media_invalid"),
    "too long": (heard(wav(tone(31))), "media_too_large"),
    "no sound": (heard(b"#EXTM3U\nfile:///etc/passwd"), "media_invalid"),
    "damaged": (heard(encoded_sound(tone(1), "mov", "aac")[:700]), "media_invalid"),
    "a video that is too long": (watched(video(greys(12), fps=2)), "media_too_large"),
    "no video": (watched(wav(tone(1))), "media_invalid"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_named(client: Client, name: str) -> None:
    part, code = BAD[name]
    answer = asked(client, text("What?"), part)
    error = answer.json()["error"]
    field = "input_audio.data" if part["type"] == "input_audio" else "video_url.url"
    assert (answer.status_code, error["code"]) == (400, code)
    assert error["param"] == f"messages[0].content[1].{field}"
    assert asked(client, text("What is 1 plus 1?")).status_code == 200


def test_the_sound_of_a_video_is_asked_for_in_each_protocol(client: Client) -> None:
    """The model takes sounds only as files of their own, and the answer names the ignored field."""
    data = encoded(video(greys(4), sound=tone(0.4)))
    url = {"url": f"data:video/mp4;base64,{data}", "use_audio_in_video": True}
    source = {"type": "base64", "media_type": "video/mp4", "data": data}
    block = {"type": "video", "source": source, "use_audio_in_video": True}
    watched = {"type": "video_url", "video_url": url}
    for path, body in (
        ("/v1/chat/completions", {"messages": user(watched)}),
        ("/v1/responses", {"input": user(watched)}),
        ("/v1/messages", {"messages": user(block), "max_tokens": 4}),
    ):
        answer = client.post(path, model=MODEL, **body)
        assert answer.status_code == 400
        assert "'use_audio_in_video'" in answer.json()["error"]["message"], answer.text


def test_documents_are_read_and_seen(hearing: Child, client: Client) -> None:
    data = encoded(pdf("Hello", "world"))
    said, mark = text("What is it?"), "<|image|>"
    shown = {"type": "file", "file": {"file_data": data, "filename": "a.pdf"}}
    tokens = client.post("/tokenize", messages=user(shown, said)).json()["tokens"]
    prompt = client.post("/detokenize", tokens=tokens).json()["prompt"]
    places = [prompt.index(each) for each in ("a.pdf", "[Page 1]", "Hello", mark, "[Page 2]")]
    assert places == sorted(places)
    assert prompt.count(mark) > 70

    url = f"data:application/pdf;base64,{data}"
    item = {"type": "input_file", "file_data": url, "filename": "a.pdf"}
    input_text = {"type": "input_text", "text": "What is it?"}
    openai: Any = OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0)
    response = openai.responses.create(
        model=MODEL, input=[{"role": "user", "content": [item, input_text]}], max_output_tokens=4
    )
    assert response.usage.input_tokens == len(tokens)
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    block = {"type": "document", "source": source, "title": "a.pdf"}
    anthropic: Any = Anthropic(base_url=hearing.url, api_key="none", max_retries=0)
    counted = anthropic.messages.count_tokens(model=MODEL, messages=user(block, said))
    assert counted.input_tokens == len(tokens)

    damaged = {"type": "file", "file": {"file_data": encoded(b"%PDF-1.7 and nothing else")}}
    answer = asked(client, damaged, said)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_invalid")


def test_too_many(client: Client) -> None:
    answer = asked(client, *(heard(wav(tone(1))) for _ in range(3)))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "too_many_audios")
    assert "3 sounds; at most 2" in error["message"]
