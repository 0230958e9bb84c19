"""The head of an answer goes out in one write with the first of its body, if that is ready."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from quire.api.connections import _HeadWithBody
from tests.api.conftest import HTTP, Serve
from tests.api.test_foreign_fields import BODIES
from tests.support.scripted_engine import Script


class Recorded:
    """A transport that remembers its writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


async def written(*pieces: bytes, turn: bool = False, close: bool = False) -> list[bytes]:
    """Return what a transport is told to write; `turn` lets the loop run after the first piece."""
    recorded = Recorded()
    loop = asyncio.get_running_loop()
    answer = _HeadWithBody(cast(asyncio.Transport, recorded), loop.call_soon)
    for number, piece in enumerate(pieces):
        if number == 1 and turn:
            await asyncio.sleep(0)
        answer.write(piece)
    if close:
        answer.close()
        assert answer.is_closing()
    await asyncio.sleep(0)
    return recorded.writes


def test_a_body_that_is_ready_goes_out_with_its_head() -> None:
    assert asyncio.run(written(b"head", b"body", b"more")) == [b"headbody", b"more"]


def test_a_head_waits_for_no_later_body() -> None:
    assert asyncio.run(written(b"head", b"body", turn=True)) == [b"head", b"body"]


def test_a_head_without_a_body_is_written_before_the_end() -> None:
    assert asyncio.run(written(b"head", close=True)) == [b"head"]
    assert asyncio.run(written(b"head")) == [b"head"]


def test_a_streamed_first_token_comes_with_its_head(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    write = _HeadWithBody.write

    def noted(self: _HeadWithBody, data: bytes) -> None:
        together = self._held or b""
        write(self, data)
        if self._held is None:
            writes.append(together + data)

    monkeypatch.setattr(_HeadWithBody, "write", noted)
    served = serve()
    served.engine.script = lambda _: Script(served.ids("fox ")[:1])
    body = {**BODIES["chat/completions"], "stream": True}
    assert HTTP.post(f"{served.url}/v1/chat/completions", json=body).status_code == 200
    served.settle()
    assert writes[0].startswith(b"HTTP/1.1 200")
    assert b'"content":' in writes[0]
