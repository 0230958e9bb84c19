"""JSON in pieces: no answer, however long, is built or sent in one turn of the event loop."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol, runtime_checkable

from starlette.responses import Response, StreamingResponse

WRITE = 1 << 16
"""Bytes to gather before a write, after which the event loop gets a turn."""

_COMPACT = json.JSONEncoder(separators=(",", ":"))
_PLACE = secrets.token_hex(16)
_QUOTED = f'"{_PLACE}"'.encode()


def quoted(text: str) -> bytes:
    """Return `text` as a JSON string."""
    return encode_basestring_ascii(text).encode()


def compact(value: Any) -> bytes:
    """Return a value as JSON without spaces."""
    return _COMPACT.encode(value).encode()


@runtime_checkable
class Written(Protocol):
    """A JSON value that is written in pieces, anywhere within the argument of `pieces`."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the value's JSON."""
        ...


class Array:
    """A list whose items are written one by one. Items of type `bytes` are JSON already.

    Args:
        items: read when the array is written. Bytes may be several items with commas between.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def pieces(self) -> Iterator[bytes]:
        separator = b"["
        for item in self._items:
            yield separator
            yield from [item] if isinstance(item, bytes) else pieces(item)
            separator = b","
        yield b"[]" if separator == b"[" else b"]"


class Merged:
    """An object of which one part is JSON already.

    Args:
        written: JSON of an object that is not empty.
        members: members with other names, at least one, which follow.
    """

    def __init__(self, written: bytes, members: Mapping[str, object]) -> None:
        self._written = written
        self._members = members

    def pieces(self) -> Iterator[bytes]:
        yield self._written[:-1]
        yield b","
        members = pieces(self._members)
        yield next(members)[1:]
        yield from members


def pieces(value: Any) -> Iterator[bytes]:
    """Yield a value as JSON without spaces. `Written` values in it are neither built nor copied
    whole.
    """
    written: list[Written] = []

    def place(each: Any) -> str:
        if not isinstance(each, Written):
            raise TypeError(f"{type(each).__name__} cannot be written as JSON")
        written.append(each)
        return _PLACE

    first, *others = json.dumps(value, separators=(",", ":"), default=place).encode().split(_QUOTED)
    yield first
    for each, following in zip(written, others, strict=True):
        yield from each.pieces()
        yield following


async def writes(written: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Join pieces to at least `WRITE` bytes, with a turn of the event loop after each write.

    The last one is shorter, and may be empty.
    """
    held: list[bytes] = []
    size = 0
    for piece in written:
        held.append(piece)
        size += len(piece)
        if size >= WRITE:
            yield b"".join(held)
            await asyncio.sleep(0)
            held, size = [], 0
    yield b"".join(held)


async def whole(written: Iterable[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. A long one is built while it is sent."""
    made = writes(written)
    first = await anext(made)
    if len(first) < WRITE:
        return Response(first, headers=headers, media_type="application/json")

    async def all_of_it() -> AsyncIterator[bytes]:
        yield first
        async for each in made:
            yield each

    return StreamingResponse(all_of_it(), headers=headers, media_type="application/json")
