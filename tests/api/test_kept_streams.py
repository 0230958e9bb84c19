"""Streams that outlive their connection: what is kept, for whom, how long, and how much."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import ExitStack

import httpx
import pytest

from quire.api.shared.kept_streams import KeptStream, KeptStreams
from quire.core.config import ServerConfig
from quire.core.errors import NotFound, Overloaded, RequestError
from quire.core.request import FinishReason
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served, start
from tests.support.scripted_engine import Script
from tests.support.waiting import wait_until

ID = "a-stream-of-this-test"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


def started(served: Served, events: int, **headers: str) -> list[str]:
    """Return the first events of a stream whose client then leaves."""
    text = ""
    named = {"x-quire-stream": ID, **headers}
    url = f"{served.url}/v1/chat/completions"
    with HTTP.stream("POST", url, json=ASKED, headers=named) as answer:
        assert answer.headers["x-quire-stream"] == ID
        for piece in answer.iter_text():
            text += piece
            if text.count("\n\n") >= events:
                break
    return text.split("\n\n")[:events]


def resumed(served: Served, after: int = 0, **headers: str) -> httpx.Response:
    return HTTP.get(f"{served.url}/streams/{ID}?after={after}", headers=headers)


def content(events: list[str]) -> str:
    chunks = [json.loads(data) for data in re.findall(r"data: (\{.*)", "\n".join(events))]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def test_an_answer_goes_on_without_its_client_and_is_taken_up(serve: Serve) -> None:
    held = threading.Event()
    served = serve("", ServerConfig())
    tokens = served.ids("One two three four five six.")
    served.engine.reset(lambda _: Script(tokens, held=held, held_at=3))
    first = started(served, 3)
    assert [event.split("\n")[0] for event in first] == ["id: 1", "id: 2", "id: 3"]
    held.set()
    rest = resumed(served, after=3)
    assert rest.headers["content-type"].startswith("text/event-stream")
    events = rest.text.split("\n\n")[:-1]
    assert events[0].startswith("id: 4\n")
    assert events[-1].endswith("data: [DONE]")
    assert content(first) + content(events) == "One two three four five six."
    assert len(served.engine.requests) == 1
    assert served.engine.tickets[0].aborted is None
    assert resumed(served).text == "".join(f"{event}\n\n" for event in [*first, *events])


def test_a_stream_without_a_name_ends_with_its_client(serve: Serve) -> None:
    served = serve("", ServerConfig())
    served.engine.reset(lambda _: Script(served.ids("On and on"), silent=True))
    with HTTP.stream("POST", f"{served.url}/v1/chat/completions", json=ASKED) as answer:
        next(answer.iter_text())
    wait_until(lambda: served.engine.tickets[0].aborted is not None)
    assert resumed(served).status_code == 404


def test_a_stream_is_stopped(serve: Serve) -> None:
    served = serve("", ServerConfig())
    served.engine.reset(lambda _: Script(served.ids("On and on"), silent=True))
    started(served, 2)
    assert HTTP.delete(f"{served.url}/streams/{ID}").status_code == 204
    wait_until(lambda: served.engine.tickets[0].aborted is FinishReason.ABORT)
    served.settle()


def test_an_answer_that_nobody_reads_ends_after_the_grace(serve: Serve) -> None:
    served = serve("", ServerConfig(keep_streams_s=0.05))
    served.engine.reset(lambda _: Script(served.ids("On and on"), silent=True))
    started(served, 2)
    wait_until(lambda: served.engine.tickets[0].aborted is not None)
    wait_until(lambda: resumed(served).status_code == 404)


def test_streams_that_are_not_kept_are_told_of(serve: Serve) -> None:
    served = serve("Hello.", ServerConfig(keep_streams_s=0))
    url = f"{served.url}/v1/chat/completions"
    answer = HTTP.post(url, json=ASKED, headers={"x-quire-stream": ID})
    assert "x-quire-stream" not in answer.headers
    assert answer.headers["x-quire-ignored-fields"] == "x-quire-stream"
    assert "id: 1" not in answer.text
    assert resumed(served).status_code == 404


def test_an_error_is_kept_like_an_answer(serve: Serve) -> None:
    served = serve("Hello.", ServerConfig())
    url = f"{served.url}/v1/chat/completions"
    named = {"x-quire-stream": ID}
    refused = HTTP.post(url, json={**ASKED, "temperature": "hot"}, headers=named)
    assert refused.status_code == 400
    again = resumed(served)
    assert (again.status_code, again.json()) == (400, refused.json())
    taken = HTTP.post(url, json=ASKED, headers=named)
    assert taken.status_code == 400
    assert "existing" in taken.json()["error"]["message"]


def test_a_key_reads_its_own_streams_alone(tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(api_keys=("mine", "yours")))
        served.engine.reset(lambda _: Script(served.ids("A secret.")))
        mine, yours = ({"x-api-key": key} for key in ("mine", "yours"))
        started(served, 1, **mine)
        assert resumed(served, **yours).status_code == 404
        assert HTTP.delete(f"{served.url}/streams/{ID}", headers=yours).status_code == 404
        assert resumed(served).status_code == 401
        assert content(resumed(served, **mine).text.split("\n\n")) == "A secret."


def grown(streams: KeptStreams, stream_id: str, count: int) -> KeptStream:
    """Return a stream with events of 100 bytes and their numbers, which has not ended."""
    stream = streams.open(stream_id)
    stream.start(HEAD)
    for _ in range(count):
        before = stream.size
        stream.add(b"data: " + b"x" * 92 + b"\n\n")
        streams.grown(stream, before)
    return stream


def test_bytes_and_streams_are_bounded() -> None:
    async def scenario() -> None:
        streams = KeptStreams(1.0, max_bytes=1000, max_count=2)
        over = grown(streams, "a" * 16, 5)
        over.end()
        going = grown(streams, "b" * 16, 20)
        with pytest.raises(NotFound):
            streams.get("a" * 16)  # it had ended, and made room first
        assert streams.size == going.size <= 1000
        assert (going.last, going.dropped) == (20, 11)
        assert going.after(10) is None
        assert (going.after(11) or b"").startswith(b"id: 12\n")
        streams.open("c" * 16)
        with pytest.raises(Overloaded, match="2 resumable streams"):
            streams.open("d" * 16)
        for malformed in ("short", "x" * 65, "with blanks in it"):
            with pytest.raises(RequestError, match="16 to 64"):
                streams.open(malformed)

    asyncio.run(scenario())


def test_an_id_is_taken_once_and_free_again_where_no_answer_came() -> None:
    async def scenario() -> None:
        streams = KeptStreams(1.0)
        streams.open(ID)
        with pytest.raises(RequestError) as refused:
            streams.open(ID)
        assert refused.value.code == "stream_exists"
        streams.ended(ID)  # its client left before the body was whole
        streams.open(ID).start(HEAD)
        streams.ended(ID)
        streams.get(ID)

    asyncio.run(scenario())


def test_pieces_of_any_size_are_the_same_events() -> None:
    body = b": waiting\n\n" + b"".join(b"data: %d\n\n" % number for number in range(30))

    async def numbered(size: int) -> bytes:
        stream = KeptStream(1.0)
        stream.start(HEAD)
        shown = b"".join(stream.add(body[at : at + size]) for at in range(0, len(body), size))
        assert shown == b": waiting\n\n" + (stream.after(0) or b"")
        return shown

    whole = asyncio.run(numbered(len(body)))
    assert whole.count(b"id: ") == 30
    for size in (1, 2, 3, 7, 100):
        assert asyncio.run(numbered(size)) == whole
