"""The face that the engine shows to the HTTP side, whichever process it runs in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from quire.core.info import EngineStats, ModelInfo
from quire.core.request import Output, Request


class Ticket(Protocol):
    """A request in flight: iterate its outputs, or abort it. The last output has `finish` set."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def take(self) -> list[Output]:
        """Outputs that have arrived and were not iterated yet, without waiting; empty if none.

        A stream that was woken for one output, or that a slow reader held up, renders all that is
        ready into one write. Consecutive waiting outputs may be merged into one.
        """
        ...

    def abort(self) -> None:
        """Ends the request by the next step. Harmless after the end; safe to call twice."""
        ...


class EngineClient(Protocol):
    """Owned by the HTTP side's event loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def failure(self) -> str | None:
        """Why the engine cannot go on, or None while it can."""
        ...

    def submit(self, requests: Sequence[Request]) -> Sequence[Ticket]:
        """Queues requests, which may share a prompt.

        Refusals that need the engine come as an output with `error`.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
