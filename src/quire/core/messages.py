"""What crosses the pipe between the HTTP side and the process that owns MLX, and how it is framed.

A frame is its length in four bytes and a pickle. Both ends are this package on this machine, joined
by a socket pair that nobody else holds.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.core.info import EngineStats, ModelInfo
from quire.core.request import Output, Request

_LENGTH = struct.Struct("<I")
_READ = 1 << 18


@dataclass(frozen=True, slots=True)
class Open:
    """To the engine, first: what to serve."""

    config: EngineConfig
    log_level: str
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: the choices of a run. What they share, as prompt and images, is sent once."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: a request ends by the next step."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AskStats:
    """To the engine: a question for its counters, which the answer repeats by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Progress:
    """From the engine, while it opens: how far it has come.

    Attributes:
        stage: "weights", counted in bytes, or "warm-up", in batches of requests.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine: the model is open."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """From the engine: the model cannot be opened.

    Attributes:
        no_room: it would fit if other models were unloaded.
    """

    message: str
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """From the engine: what one step gave.

    Attributes:
        outputs: a request's first and last, and those that carry more than a token.
        tokens: (request id, its next tokens) of all others; read before the outputs.
    """

    outputs: tuple[Output, ...]
    tokens: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """From the engine: the answer to the `AskStats` of this number."""

    number: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Broken:
    """From the engine, last: it cannot go on."""

    message: str


ToEngine = Open | Submit | Abort | AskStats
FromEngine = Progress | Ready | Refused | StepOutputs | Stats | Broken


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Reads frames from a socket as they arrive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def read(self) -> list[ToEngine | FromEngine] | None:
        """The frames that one read completes; None when the other end is gone.

        Blocks if the socket does; an empty list when nothing can be read without blocking.
        """
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
