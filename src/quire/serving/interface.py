"""The face that the engine shows to the HTTP side, whichever process it runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import ToEngine
from quire.core.request import Request
from quire.serving.ticket import Ticket


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

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Ask the engine something between two steps, by a message that has a number."""
        ...

    async def close(self) -> None: ...
