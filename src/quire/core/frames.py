"""Frames on a pipe between two processes: a pickle after its length in eight bytes.

A pipe is a socket pair that nobody else holds, or ssh. Both ends are this package.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections import deque
from typing import Any, Protocol

_LENGTH = struct.Struct("<Q")
_READ = 1 << 18


def encode(value: object) -> bytes:
    """Return a value as one frame."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Readable(Protocol):
    """A source of frames with a socket's interface."""

    def recv(self, count: int, /) -> bytes:
        """Return up to `count` bytes; none once the other end has closed."""
        ...


class Frames:
    """Reads frames from a socket as they arrive."""

    def __init__(self, sock: socket.socket | Readable) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._waiting: deque[Any] = deque()
        """Complete frames that `next` has yet to return."""

    def read(self) -> list[Any] | None:
        """Return the values of the frames that one read completes; None once the other end has
        closed.

        It blocks if the socket does. An empty list means that nothing can be read without blocking.
        """
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            return None
        return self._completed(data) if data else None

    def next(self) -> Any:
        """Return the value of the next frame. Only for a blocking socket on which `read` is not
        called.

        Raises:
            EOFError: the other end has closed.
        """
        while not self._waiting:
            values = self.read()
            if values is None:
                raise EOFError
            self._waiting.extend(values)
        return self._waiting.popleft()

    async def next_async(self) -> Any:
        """Return the value of the next frame, for a socket that does not block.

        Raises:
            EOFError: the other end has closed.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(self._socket, socket.socket)
        while not self._waiting:
            data = await loop.sock_recv(self._socket, _READ)
            if not data:
                raise EOFError
            self._waiting.extend(self._completed(data))
        return self._waiting.popleft()

    def _completed(self, data: bytes) -> list[Any]:
        self._buffer += data
        values = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                values.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return values
