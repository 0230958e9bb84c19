"""The interface of an engine as the HTTP side sees it, in whichever process it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import ToEngine
from quire.core.request import Request
from quire.serving.ticket import Ticket


class EngineClient(Protocol):
    """The client of an engine. Owned by the HTTP side's event loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def failure(self) -> str | None:
        """Why the engine cannot continue, or None while it can."""
        ...

    def submit(self, requests: Sequence[Request]) -> Sequence[Ticket]:
        """Queue requests, which may share a prompt.

        A request that only the engine can refuse ends with an output that has `error`.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Send the engine a numbered message, which it answers between two steps."""
        ...

    async def close(self) -> None: ...
