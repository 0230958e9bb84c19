"""The Python API with the embedded model in a real engine's process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from pydantic import BaseModel

from quire import LLM, AsyncLLM
from quire.core.errors import ContextOverflow, ModelError, RequestError
from quire.llm.media import with_urls
from quire.llm.options import ChatOptions
from quire.serving.ticket import Ticket
from tests.support.child import Child

PROMPTS = [f"{number} + {number + 1} =" for number in range(300)]


class Person(BaseModel):
    name: str
    age: int


def asks(text: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_context=2048) as llm:
        yield llm


def test_answers_are_those_of_the_server(llm: LLM, child: Child) -> None:
    answers = llm.generate(PROMPTS[:8], max_tokens=6, temperature=0)
    body = {"prompt": PROMPTS[:8], "max_tokens": 6, "temperature": 0}
    served = httpx.post(f"{child.url}/v1/completions", json=body, timeout=60).json()
    assert [each.text for each in answers] == [each["text"] for each in served["choices"]]
    said = llm.chat(asks("Hi."), max_tokens=12, temperature=0)
    body = {"messages": asks("Hi."), "max_tokens": 12, "temperature": 0}
    served = httpx.post(f"{child.url}/v1/chat/completions", json=body, timeout=60).json()
    assert said.text == served["choices"][0]["message"]["content"]
    assert said.usage.prompt_tokens == served["usage"]["prompt_tokens"]


def test_a_text_is_the_users_message(llm: LLM) -> None:
    options: ChatOptions = {"max_tokens": 4, "temperature": 0}
    assert llm.chat("Hi.", **options).text == llm.chat(asks("Hi."), **options).text
    with pytest.raises(RequestError, match="takes a list of conversations"):
        llm.chats("Hi.")


def test_a_model_that_is_not_there_is_one_error_without_the_threads_trace() -> None:
    with pytest.raises(ModelError, match="'no/such/model' is neither a folder nor a hub id") as bad:
        LLM("no/such/model")
    assert len(bad.traceback) == 2


def test_batches_larger_than_what_runs_at_once_keep_their_order(llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_tokens=3, temperature=0)
    assert len(together) == len(PROMPTS)
    for number in (0, 150, 299):
        alone = llm.generate(PROMPTS[number], max_tokens=3, temperature=0)
        assert together[number].token_ids == alone.token_ids
    ids = llm.generate([[5, 6, 7]], max_tokens=2)
    assert ids[0].usage.prompt_tokens == 3


def test_a_pydantic_class_is_a_schema(llm: LLM) -> None:
    answer = llm.chat(asks("Make up a person."), schema=Person, max_tokens=200)
    assert answer.parsed == Person.model_validate_json(answer.text)
    cut = llm.chat(asks("Make up a person."), schema=Person, max_tokens=2)
    assert cut.parsed is None
    assert cut.finish_reason == "length"


def test_streams_say_what_whole_answers_say(llm: LLM) -> None:
    options = {"max_tokens": 20, "temperature": 0}
    whole = llm.chat(asks("Count to five."), **options)  # type: ignore[arg-type]
    with llm.stream_chat(asks("Count to five."), **options) as stream:  # type: ignore[arg-type]
        assert "".join(stream) == whole.text
        assert stream.answer.token_ids == whole.token_ids
    with llm.stream("1 2 3", max_tokens=1000, ignore_eos=True) as stream:
        assert next(iter(stream))
        with pytest.raises(RuntimeError, match="not whole"):
            _ = stream.answer


def test_wrong_options_and_prompts_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temprature"):
        llm.generate("x", temprature=1)  # type: ignore[call-overload]
    with pytest.raises(ContextOverflow):
        llm.generate(["x", "word " * 3000], max_tokens=1)
    kept = llm.generate(["x", "word " * 3000], max_tokens=1, on_error="keep")
    assert kept[0].error is None
    assert isinstance(kept[1].error, ContextOverflow)
    with pytest.raises(TypeError, match="no setting 'ctx'"):
        LLM(ctx=5)  # type: ignore[call-arg]


def test_vectors_and_scores(llm: LLM) -> None:
    one, other = llm.embed(["a cat", "a sky"])
    assert np.linalg.norm(one.values) == pytest.approx(1, abs=1e-5)
    assert one.values != other.values
    (short,) = llm.embed("a cat", dimensions=4)
    head = np.array(one.values[:4])
    assert short.values == pytest.approx(head / np.linalg.norm(head), abs=1e-6)
    scores = llm.score("a cat", ["a cat", "a sky"])
    assert [each.index for each in scores] == [0, 1]
    assert all(0 <= each.score <= 1 for each in scores)


def test_a_picture_is_the_same_as_path_array_and_image(llm: LLM, tmp_path: Path) -> None:
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:, 24:] = 200
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    answers = [
        llm.chat(asks(["What is it?", each]), max_tokens=5, temperature=0)
        for each in (path, pixels, Image.open(path), {"type": "image", "image": str(path)})
    ]
    assert len({each.token_ids for each in answers}) == 1
    assert answers[0].usage.prompt_tokens > 40
    with pytest.raises(RequestError, match=r"content\[0\].*no such file|No such file"):
        llm.chat(asks([tmp_path / "none.png"]))


def test_sound_becomes_a_wav_file() -> None:
    part = {"type": "audio", "audio": (np.sin(np.arange(160)), 16000)}
    (message,) = with_urls(asks([part]))
    assert message["content"][0]["audio_url"]["url"].startswith("data:audio/wav;base64,UklGR")
    with pytest.raises(RequestError, match="a part of content cannot be a int"):
        with_urls(asks([5]))
    with pytest.raises(RequestError, match=r"'messages\[0\]'.*'role' and 'content', not a str"):
        with_urls(["Hi."])  # type: ignore[list-item]


def test_closing_ends_the_engine() -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    llm = LLM(max_context=512)
    assert {each.pid for each in psutil.Process().children(recursive=True)} > before
    llm.close()
    llm.close()
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


async def test_async_twins() -> None:
    async with AsyncLLM(max_context=512, kv_bits=8) as llm:
        answer = await llm.generate("1 2 3", max_tokens=4, temperature=0)
        stream = await llm.stream("1 2 3", max_tokens=4, temperature=0)
        assert "".join([text async for text in stream]) == answer.text
        assert json.dumps(answer.token_ids) == json.dumps(stream.answer.token_ids)
        assert (await llm.chat(asks("Hi."), max_tokens=2)).usage.completion_tokens == 2
        assert len(await llm.embed(["a", "b", "c"])) == 3
        assert len(await llm.score("a", ["b"])) == 1


def test_many_answers_wake_the_program_once_each(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0
    arrival = Ticket.arrival

    def counted(ticket: Ticket) -> asyncio.Future[None] | None:
        nonlocal woken
        found = arrival(ticket)
        woken += found is not None
        return found

    monkeypatch.setattr(Ticket, "arrival", counted)
    prompts = [[3 + number, 5, 8] for number in range(24)]
    answers = llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)
    assert [each.usage.completion_tokens for each in answers] == [12] * len(prompts)
    assert woken <= len(prompts)
    (longer,) = llm.generate([prompts[0]], max_tokens=400, temperature=0, ignore_eos=True)
    woken = 0
    with llm.stream(prompts[0], max_tokens=400, temperature=0, ignore_eos=True) as stream:
        assert "".join(stream) == longer.text
    assert woken > 1
