"""The end of the server: answers in flight get some time, then they end with an error. Meanwhile
new requests are refused, and `/health` tells load balancers that the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.shared.errors import error_response
from quire.core.logs import announce
from quire.core.request import Failure
from quire.core.stop_signals import stop_signals
from quire.serving.models import Models
from quire.serving.tasks import cancel_and_wait

_LAST_WRITES_S = 2.0
"""Seconds to write the errors of interrupted answers to their clients."""
_RETRY_AFTER_S = 5
"""Seconds after which a refused client should try again, by then with the next server."""
_STOPPING = Failure(
    "The server is stopping and takes no new requests.", 503, "server_error", code="stopping"
)
Result = TypeVar("Result")


class StopSignal(Exception):
    """Raised if a signal came before the server ran. `number` is the signal's."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def until_stop_signal(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Await startup work; a stop signal cancels it.

    From here on the event loop handles signals. One that arrives before `StoppingServer` runs is
    delivered to it.

    Raises:
        StopSignal: it was cancelled.
    """
    task, received = asyncio.ensure_future(coroutine), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise StopSignal(received[0]) from None
        raise


class Door:
    """The application, until it is shut: from then on each request is refused with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._is_shut = False

    def shut(self) -> None:
        """Refuse all further requests. Those in flight go on."""
        self._is_shut = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_shut and scope["type"] == "http":
            await _refusal(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _refusal(scope: Scope) -> Response:
    """Return the response of a server that stops, after which the connection ends."""
    headers = {"connection": "close", "retry-after": str(_RETRY_AFTER_S)}
    if scope["path"] == "/health":
        return JSONResponse({"status": "stopping"}, 503, headers)
    return error_response(scope, _STOPPING, headers)


class StoppingServer(uvicorn.Server):
    """A server that stops at the first signal when all is answered, at a second SIGINT or SIGTERM
    at once.

    A closed terminal may send SIGHUP twice, from the shell and from the system.

    Args:
        door: the application that `config` names, which this server shuts.
        models: the models. Closing them ends requests in flight with an error.
        grace_s: how long answers may go on after the first signal.
    """

    def __init__(
        self, config: uvicorn.Config, door: Door, models: Models, *, grace_s: float
    ) -> None:
        super().__init__(config)
        self._door = door
        self._models = models
        self._grace_s = grace_s
        self._stopped_at_start = False
        self._now = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the event loop, so that no Python handler interrupts other code."""
        loop, signals = asyncio.get_running_loop(), stop_signals()
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # there is nothing left to be stopped

    def stop_now(self) -> None:
        """Stop without waiting for answers, because none can come."""
        self.should_exit = True
        self._now.set()

    async def main_loop(self) -> None:
        """Serve until a signal asks to stop."""
        self.should_exit |= self._stopped_at_start
        await super().main_loop()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.started:  # the start is finished first, so that all of it is undone
            self._stopped_at_start = True
            return
        if self.should_exit:
            if number != signal.SIGHUP:
                self._now.set()
            return
        self.should_exit = True
        text = "stopping"
        if count := len(self.server_state.tasks):
            have = "has" if count == 1 else "have"
            text += f": {_answers(count)} {have} {self._grace_s:g} s to finish; "
            text += "press Ctrl-C again to stop now"
        _say(text)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests until those in flight are answered, then new connections. Return when
        the open ones have ended.
        """
        self._door.shut()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # after its answer, if there is one
        ending = asyncio.create_task(self._end_answers())
        try:
            if answers := set(self.server_state.tasks):
                await asyncio.wait(answers)
            await super().shutdown(sockets)
        finally:
            await cancel_and_wait(ending)

    async def _end_answers(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._now.wait(), self._grace_s)
        if count := len(self.server_state.tasks):
            _say(f"{_answers(count)} did not finish: ended with an error")
        closing = asyncio.create_task(self._models.close())
        await asyncio.sleep(_LAST_WRITES_S)
        for connection in list(self.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()  # its reader does not read
        await closing


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that is closed
        announce(f"quire: {text}")
