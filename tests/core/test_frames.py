"""Frames arrive whole however the pipe cuts them up, and each reader sees the other end leave."""

from __future__ import annotations

import asyncio
import socket

import pytest

from quire.core.frames import Frames, encode

VALUES = [{"a": 1}, b"x" * 300_000, (), "last"]


def test_frames_may_be_cut_anywhere() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, found = Frames(theirs), []
        theirs.setblocking(False)
        assert reader.read() == []
        data = b"".join(map(encode, VALUES))
        for start in range(0, len(data), 4099):
            ours.sendall(data[start : start + 4099])
            found += reader.read() or []
        assert found == VALUES
        ours.close()
        assert reader.read() is None


def test_a_frame_at_a_time() -> None:
    ours, theirs = socket.socketpair()

    async def answered(value: object) -> object:
        await asyncio.get_running_loop().sock_sendall(theirs, encode(value))
        return await Frames(theirs).next_async()

    with ours, theirs:
        theirs.setblocking(False)
        ours.sendall(encode("question"))
        assert asyncio.run(answered("answer")) == "question"
        assert Frames(ours).next() == "answer"
        ours.close()
        with pytest.raises(EOFError):
            asyncio.run(Frames(theirs).next_async())


def test_frames_that_arrive_together_come_one_by_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode("first") + encode("second"))
        reader = Frames(theirs)
        assert [reader.next(), reader.next()] == ["first", "second"]
        ours.sendall(encode("third") + encode("fourth"))
        theirs.setblocking(False)

        async def both() -> list[object]:
            return [await reader.next_async(), await reader.next_async()]

        assert asyncio.run(both()) == ["third", "fourth"]
