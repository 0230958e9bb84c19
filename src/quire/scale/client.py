"""The client of many engines: an `EngineClient` over a Ray Serve deployment of replicas.

It needs only the deployment's handle, and imports no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import fields, replace
from typing import Any

from quire.core.block_keys import BlockNames
from quire.core.errors import EngineFailure, NotOffered
from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import ToEngine
from quire.core.request import Failure, FinishReason, Output, Request
from quire.scale.routing import Route
from quire.serving.tasks import cancel_and_wait
from quire.serving.ticket import Ticket

log = logging.getLogger("quire.scale")

_ATTEMPTS = 4
"""Number of replicas that may die during a request before it fails."""
_PAUSE_S = 0.2
_STATS_S = 5.0
_CLOSED = "the server is shutting down"
LOST = "engine_failure"
"""Code of failures of an engine that the request did not cause."""


class _Call:
    """The requests of one generation, from submission to their last output.

    Attributes:
        open: requests that have not ended, by id.
        started: ids of those that have a token.
        replica: name of the replica that works on them; empty before one took them.
        lost: names of replicas that failed during this call.
        task: the asyncio task that runs the call to its end.
    """

    task: asyncio.Task[None]

    def __init__(self, requests: Sequence[Request]) -> None:
        self.open = {each.id: each for each in requests}
        self.started: set[str] = set()
        self.replica = ""
        self.lost: set[str] = set()
        self.since = time.monotonic()

    def route(self, names: BlockNames) -> Route:
        """Return the routing data of the open requests, which share most of their prompt."""
        first = next(iter(self.open.values()))
        return replace(Route.of(first, names), lost=frozenset(self.lost))

    def requests(self) -> tuple[Request, ...]:
        """Return the open requests with their remaining time until the deadline."""
        passed = time.monotonic() - self.since
        return tuple(
            each if each.deadline_s is None else replace(each, deadline_s=each.deadline_s - passed)
            for each in self.open.values()
        )


class ReplicatedEngine:
    """Hands requests to replicas; implements `EngineClient`. Belongs to one event loop.

    If a replica dies, its requests without a token go to another one; the others fail.

    Args:
        replicas: the handle of a deployment of `Replica`.
        on_close: called once when the client is closed.
    """

    def __init__(
        self,
        replicas: Any,
        info: ModelInfo,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._replicas = replicas
        self._generate = replicas.options(method_name="generate", stream=True)
        self._info = info
        self._on_close = on_close
        self._tickets: dict[str, Ticket] = {}
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: str | None = None

    @classmethod
    async def connect(
        cls, replicas: Any, on_close: Callable[[], Awaitable[None]] | None = None
    ) -> ReplicatedEngine:
        """Return a client as soon as one replica is ready.

        For the arguments see `ReplicatedEngine`.

        Args:
            replicas: see `ReplicatedEngine`.
            on_close: see `ReplicatedEngine`.
        """
        return cls(replicas, await replicas.info.remote(Route()), on_close)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def failure(self) -> str | None:
        """Return None while the client is open: without a replica, requests wait for one."""
        return self._failure

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue requests. All requests of one call go to one replica.

        Raises:
            EngineFailure: the client is closed.
        """
        if self._failure is not None:
            raise EngineFailure(self._failure)
        tickets = [Ticket(request.id, self.abort) for request in requests]
        call = _Call(requests)
        for request, ticket in zip(requests, tickets, strict=True):
            self._tickets[request.id], self._calls[request.id] = ticket, call
        call.task = self._spawn(self._run(call))
        return tickets

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request: at once if no replica has it yet, else by the replica's next step."""
        call = self._calls.get(request_id)
        if call is None:
            return
        if call.replica:
            self._spawn(self._tell_abort(call.replica, request_id, reason))
        else:
            self._end_here(request_id, reason)

    async def stats(self) -> EngineStats:
        """Return the sums of the replicas' counters.

        Raises:
            EngineFailure: no replica answers.
        """
        answers = self._replicas.broadcast("stats")
        try:
            found = await answers.results_async(timeout_s=_STATS_S, return_exceptions=True)
        except Exception as error:  # Ray raises errors of its own and those of actors
            raise EngineFailure(f"no replica is reachable: {error}") from error
        return total([each for each in found if isinstance(each, EngineStats)])

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Refuse the command: it would change only one of several engines.

        Raises:
            NotOffered: always.
        """
        raise NotOffered(
            "Replicas load adapters only at start: restart the server with --adapter NAME=FOLDER.",
            code="not_offered",
        )

    async def close(self) -> None:
        """Release the replicas and fail the requests in flight. May be called again."""
        if self._failure is not None:
            return
        self._failure = _CLOSED
        await cancel_and_wait(*self._tasks)
        for request_id in list(self._tickets):
            self._end(request_id).fail(_failure(_CLOSED))
        if self._on_close is not None:
            await self._on_close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell_abort(self, replica: str, request_id: str, reason: FinishReason) -> None:
        try:
            found = await self._replicas.abort.remote(Route(replica=replica), request_id, reason)
        except Exception as error:  # the replica died, and the request with it
            log.debug("abort of %s: %s", request_id, error)
            return
        if not found:  # the replica finishes what it has, and gets no more messages
            self._end_here(request_id, reason)

    def _end_here(self, request_id: str, reason: FinishReason) -> None:
        """End a request whose replica is not known, and cancel the call if no request is left."""
        if (call := self._calls.get(request_id)) is None:
            return
        self._deliver(call, Output(request_id, finish=reason))
        if not call.open:
            call.task.cancel()

    async def _run(self, call: _Call) -> None:
        """Run a call to its end, with another replica each time one dies."""
        reason = ""
        for _ in range(_ATTEMPTS):
            reason = await self._attempt(call)
            if not call.open:
                return
            for request_id in call.started & call.open.keys():
                self._fail(call, request_id, f"{reason} after the answer had started")
            if not call.open:
                return
            log.warning("%s; %d requests are restarted on another replica", reason, len(call.open))
            if call.replica:
                call.lost.add(call.replica)
            else:
                await asyncio.sleep(_PAUSE_S)  # Ray learns meanwhile which replica died
        for request_id in list(call.open):
            self._fail(call, request_id, f"{reason}, as did {_ATTEMPTS - 1} before")

    async def _attempt(self, call: _Call) -> str:
        """Send a call to a replica and deliver its outputs. Return why requests are still open."""
        call.replica, asked = "", call.requests()
        stream = self._generate.remote(call.route(self._info.blocks), asked)
        lost = "the replica ended without an answer"
        try:
            async for message in stream:
                if isinstance(message, str):
                    call.replica = message
                    for request in asked:
                        if request.id not in call.open:  # aborted while the call was on its way
                            self._spawn(self._tell_abort(message, request.id, FinishReason.ABORT))
                    continue
                for output in message:
                    if (error := output.error) is not None and error.code == LOST:
                        lost = error.message
                    elif output.request_id in call.open:
                        self._deliver(call, output)
                if not call.open:
                    break
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:  # Ray's, or any of the replica's: each request has to end
            log.debug("a replica failed", exc_info=True)
            lost = f"the replica failed ({type(error).__name__})"
        return lost

    def _deliver(self, call: _Call, output: Output) -> None:
        name, ticket = output.request_id, self._tickets[output.request_id]
        plain = output.finish is None and output.read is None and not output.logprobs
        if plain and name in call.started:
            drafts = output.accepted_drafts, output.rejected_drafts
            ticket.put_tokens(output.token_ids, *drafts)
            return
        if output.token_ids:
            call.started.add(name)
        if output.finish is not None:
            self._end(name)
        ticket.put(output)

    def _fail(self, call: _Call, request_id: str, reason: str) -> None:
        self._end(request_id).fail(_failure(reason))

    def _end(self, request_id: str) -> Ticket:
        self._calls.pop(request_id).open.pop(request_id)
        return self._tickets.pop(request_id)


def _failure(reason: str) -> Failure:
    return Failure(reason, 503, "server_error", code=LOST)


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sum of several engines' counters and gauges."""
    sums: dict[str, Any] = {}
    for field in fields(EngineStats):
        values = [getattr(each, field.name) for each in stats]
        if isinstance(field.default, int):
            sums[field.name] = sum(values)
        else:
            named: dict[str, int] = {}
            for name, number in (pair for value in values for pair in value):
                named[name] = named.get(name, 0) + number
            sums[field.name] = tuple(named.items())
    return EngineStats(**sums)
