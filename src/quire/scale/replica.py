"""A replica: one Quire engine inside a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from ray import serve

from quire.core.config import EngineConfig, ServerConfig
from quire.core.errors import EngineFailure
from quire.core.info import EngineStats, ModelInfo
from quire.core.request import Failure, FinishReason, Output, Request
from quire.scale.autoscaling import KV_USE
from quire.scale.client import LOST
from quire.scale.disk import OwnFolder
from quire.scale.routing import Route
from quire.serving.engine_client import ProcessEngine
from quire.serving.tasks import cancel_and_wait
from quire.serving.ticket import Ticket

log = logging.getLogger("quire.replica")

_LAST_WORD_S = 0.5
"""Seconds to send the errors of a broken engine's requests before the actor ends."""
_ENTRIES = 512
"""Most tokens and log-probabilities in one message of a request."""


class Replica:
    """Owns an engine's process and the requests that ingresses sent to it.

    Ray calls its methods, including `check_health`, `record_routing_stats` and
    `record_autoscaling_stats`.
    """

    # Ray awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, serving: ServerConfig, most: int = 1
    ) -> None:
        if engine.disk is not None:
            self._folder = OwnFolder(engine.disk, most)
            engine = replace(engine, disk=self._folder.disk)
        self._tickets: dict[str, Ticket] = {}
        self._name = serve.get_replica_context().replica_id.unique_id
        self._client = await ProcessEngine.start(
            engine,
            serving.log_level,
            timeout_s=serving.engine_timeout_s,
            log_format=serving.log_format,
        )
        self._watch = asyncio.create_task(self._end_with_engine())

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the engine did not start
            await cancel_and_wait(self._watch)
            await self._client.close()

    async def generate(
        self, route: Route, requests: Sequence[Request]
    ) -> AsyncIterator[str | list[Output]]:
        """Yield the replica's name, then the outputs of the requests until all have ended.

        When the caller stops iterating, its requests are aborted.
        """
        yield self._name
        try:
            tickets = self._client.submit(requests)
        except EngineFailure as error:
            failure = Failure(str(error), 503, "server_error", code=LOST)
            yield [Output(each.id, finish=FinishReason.ERROR, error=failure) for each in requests]
            return
        self._tickets |= {each.id: ticket for each, ticket in zip(requests, tickets, strict=True)}
        try:
            async for outputs in _merged(tickets):
                yield outputs
        finally:
            for request, ticket in zip(requests, tickets, strict=True):
                ticket.abort()
                self._tickets.pop(request.id, None)

    async def abort(self, route: Route, request_id: str, reason: FinishReason) -> bool:
        """Abort a request at the engine's next step. Return whether this replica has it."""
        if (ticket := self._tickets.get(request_id)) is None:
            return False
        ticket.abort(reason)
        return True

    async def info(self, route: Route) -> ModelInfo:
        """Return the description of the served model."""
        return self._client.info

    async def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return await self._client.stats()

    async def record_routing_stats(self) -> dict[str, bytes]:
        """Return the report for routers; see `PrefixTable.report`."""
        try:
            return {"cached": await self._client.cached()}
        except EngineFailure:
            return {}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures by which `autoscaling.wanted_replicas` scales."""
        try:
            stats = await self._client.stats()
        except EngineFailure:
            return {}
        return {KV_USE: sum(bytes for _, bytes in stats.kv_used) / max(1, stats.kv_budget)}

    async def check_health(self) -> None:
        """Raise an exception if the engine cannot answer."""
        if (failure := self._client.failure) is not None:
            raise RuntimeError(failure)

    async def _end_with_engine(self) -> None:
        """End the actor as soon as its engine has died, so that Ray starts another."""
        await self._client.broken.wait()
        log.error("the replica stops: %s", self._client.failure)
        await asyncio.sleep(_LAST_WORD_S)
        os._exit(1)


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[list[Output]]:
    """Yield the outputs of several requests in order of arrival. Outputs that wait come
    together.
    """
    ready: asyncio.Queue[Output] = asyncio.Queue()

    async def forward(ticket: Ticket) -> None:
        async for output in ticket:
            ready.put_nowait(output)

    forwarders = [asyncio.create_task(forward(ticket)) for ticket in tickets]
    try:
        left = len(tickets)
        while left:
            outputs = [await ready.get()]
            entries = outputs[0].entries
            while entries < _ENTRIES and not ready.empty():
                outputs.append(ready.get_nowait())
                entries += outputs[-1].entries
            left -= sum(each.finish is not None for each in outputs)
            yield outputs
    finally:
        await cancel_and_wait(*forwarders)
