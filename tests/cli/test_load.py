"""The load client's reading of bytes, cut anywhere."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.cli.load import Client, Exchange, Target, Timings
from quire.cli.sse_counter import Dechunker, EventCounter, error_message


def delta(**fields: object) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": fields}], "usage": None})


USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3},
}
EVENTS = [
    ": keepalive",
    "data: " + delta(role="assistant", content=""),
    "data: " + delta(content='"quoted"'),
    "data:" + delta(reasoning_content="hm", content=None),
    "event: message\ndata: " + delta(content="é\n"),
    "data: " + delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
    "data: " + delta(content=None),
    "data: " + json.dumps({"choices": [], "usage": USAGE}),
    "data: [DONE]",
]
WITH_TEXT = 4


def pieces(data: bytes, cuts: set[int]) -> list[bytes]:
    ends = [*sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


CUTS = st.sets(st.integers(1, 2000), max_size=20)


@given(CUTS, CUTS, st.sampled_from(["\n\n", "\r\n\r\n"]))
@example(set(range(2000)), set(range(9000)), "\r\n\r\n")
def test_events_cut_anywhere_count_the_same(
    chunk_cuts: set[int], read_cuts: set[int], between: str
) -> None:
    body = "".join(event + between for event in EVENTS).encode()
    chunks = [b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in pieces(body, chunk_cuts)]
    dechunker, counter = Dechunker(), EventCounter()
    for read in pieces(b"".join(chunks) + b"0\r\n\r\n", read_cuts):
        counter.feed(dechunker.feed(read), 1.0)
    assert dechunker.done
    assert counter.done
    assert counter.error is None
    assert len(counter.text_times) == WITH_TEXT
    assert counter.usage() == (7, 5, 3)


def test_an_error_in_the_stream_is_kept() -> None:
    counter = EventCounter()
    counter.feed(b'data: {"error": {"message": "out of paper"}}\n\n', 0.0)
    assert counter.error == "out of paper"
    assert counter.text_times == []


def test_a_bad_chunk_size_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Dechunker().feed(b"xyz\r\n")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:1", ("a", 1, False, "/v1")),
        ("http://a:1/v1/", ("a", 1, False, "/v1")),
        ("https://a/proxy", ("a", 443, True, "/proxy/v1")),
    ],
)
def test_urls(url: str, expected: tuple[str, int, bool, str]) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.tls, target.path) == expected


@pytest.mark.parametrize("url", ["ftp://a", "localhost:8000", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        Target.parse(url)


def test_error_bodies_of_any_shape_are_shown() -> None:
    assert error_message(b'{"error": {"message": "m", "code": 1}}') == "m"
    assert error_message(b'{"error": "m"}') == "m"
    assert error_message(b"<html>gone</html>") == "<html>gone</html>"


STREAM = b"data: " + delta(content="hi").encode() + b"\n\ndata: [DONE]\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
    len(STREAM),
    STREAM,
)
SHORT = b'{"error": {"message": "too short"}}'
REFUSED = b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%s" % (len(SHORT), SHORT)
OLD = b"HTTP/1.0 200 OK\r\n\r\n" + STREAM
CLOSING = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


class Script:
    """A server that answers each request on a connection with the next of what it is given.

    None closes the connection instead.
    """

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while await reader.read(1000):  # a small request comes at once
            answer = self._answers.pop(0)
            if answer is None:
                break
            writer.write(answer)
            if b"HTTP/1.0" in answer or b"close" in answer:
                break
        writer.close()


async def asked(script: Script, count: int) -> list[Timings]:
    """Return the answers to so many requests of one client."""
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(Target("127.0.0.1", port, False, "/v1"))
    exchanges = [await client.send("/completions", b"{}", 5.0) for _ in range(count)]
    client.close()
    server.close()
    return [each.timings() for each in exchanges]


def in_chunks(events: list[str]) -> list[bytes]:
    """Return an answer in as many writes as events: the head with the first, the end with the
    last.
    """
    writes = [b"%x\r\n%s\n\n\r\n" % (len(each) + 2, each.encode()) for each in events]
    writes[0] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + writes[0]
    writes[-1] += b"0\r\n\r\n"
    return writes


async def test_events_are_decoded_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, feed = list[bytes](), EventCounter.feed

    def counted(self: EventCounter, data: bytes, now: float) -> None:
        decoded.append(data)
        feed(self, data, now)

    monkeypatch.setattr(EventCounter, "feed", counted)
    exchange = Exchange(0.0)
    for write in in_chunks(EVENTS):
        assert not exchange.finished.done()
        exchange.feed(write)
    assert exchange.finished.done()
    assert exchange.whole
    assert not decoded
    answer = exchange.timings()
    assert answer.error is None
    assert answer.completion_tokens == USAGE["completion_tokens"]
    assert len(answer.text_times) == len(set(answer.text_times)) == WITH_TEXT
    assert len(decoded) == len(EVENTS)


@given(CUTS)
async def test_an_answer_cut_anywhere_has_the_same_figures(cuts: set[int]) -> None:
    exchange = Exchange(0.0)
    for read in pieces(b"".join(in_chunks(EVENTS[-2:])), cuts):
        exchange.feed(read)
    assert exchange.finished.done()
    answer = exchange.timings()
    assert (answer.error, answer.completion_tokens) == (None, USAGE["completion_tokens"])


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    exchange = Exchange(0.0)
    for write in in_chunks(EVENTS[1:])[:2]:
        exchange.feed(write)
    exchange.lost()
    answer = exchange.timings()
    assert answer.error == "the stream ended without [DONE]"
    assert len(answer.text_times) == 1


@pytest.mark.parametrize(
    ("answers", "connections"),
    [
        ((CHUNKED, CHUNKED, REFUSED, CHUNKED), 1),
        ((CLOSING, CHUNKED), 2),
        ((OLD, OLD), 2),
        ((CHUNKED, None, CHUNKED), 2),  # closed while it was kept: asked again
    ],
    ids=["kept", "closed by header", "HTTP/1.0", "closed meanwhile"],
)
async def test_a_connection_serves_as_long_as_it_can(
    answers: tuple[bytes | None, ...], connections: int
) -> None:
    script = Script(*answers)
    count = sum(answer is not None for answer in answers)
    got = await asked(script, count)
    expected = [None if b"200" in each else "HTTP 400: too short" for each in answers if each]
    assert [answer.error for answer in got] == expected
    assert [len(answer.text_times) for answer in got] == [error is None for error in expected]
    assert script.connections == connections


async def test_an_empty_answer_is_not_waited_for() -> None:
    script = Script(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", CHUNKED)
    first, second = await asked(script, 2)
    assert (first.error, second.error) == ("HTTP 502: ", None)


async def test_a_server_that_says_nothing_is_asked_once() -> None:
    script = Script(None, CHUNKED)
    (answer,) = await asked(script, 1)
    assert answer.error == "the server closed the connection without an answer"
