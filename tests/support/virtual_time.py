"""An event loop on which time passes only while everything waits, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Adds what it is asked to wait to a clock, instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits for something that never comes"
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine as `asyncio.run` does, in virtual seconds. No thread may be waited for."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
