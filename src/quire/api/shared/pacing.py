"""Spreads a burst of requests over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Lets one request be read in each turn of the event loop, in order of arrival.

    So streams wait for one request at most, and the engine can start with the first requests of a
    burst while the others are read.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Whether a request is read in this turn."""

    async def turn(self) -> None:
        """Wait until no other request is read in this turn."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._pass_on)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        """Give the next turn to the first request that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._taken = False
