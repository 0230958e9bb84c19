"""Makes memory for a model that is loaded beside others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, NoRoom
from quire.core.info import EngineStats
from quire.serving.model import Model
from quire.serving.swaps import Evictions, check_wanted

_STATS_S = 5.0


class Turn:
    """A loading's hold on the lock for loading and unloading models."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._held = False

    async def take(self) -> None:
        """Wait for the lock."""
        await self._lock.acquire()
        self._held = True

    def give(self) -> None:
        """Release the lock if it is held."""
        if self._held:
            self._held = False
            self._lock.release()

    async def let_others(self, until: Awaitable[None]) -> None:
        """Release the lock within the context, so that other models load and unload; then take it
        again.
        """
        self.give()
        await until
        await self.take()


class Room:
    """Makes room for the loading of a model. Belongs to `Models`.

    Args:
        models: all models of the server.
        memory: bytes for all loaded models together; None means the machine's memory.
        turn: the lock, released while the loading is postponed.
    """

    def __init__(
        self,
        model: Model,
        models: Sequence[Model],
        evictions: Evictions,
        memory: int | None,
        turn: Turn,
    ) -> None:
        self._model = model
        self._models = models
        self._evictions = evictions
        self._memory = memory
        self._turn = turn
        self._attempt = 0
        """How often this loading was postponed."""
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        """When it started, moved on by the time for which it was postponed."""
        self._beside: list[Model] = []

    async def config(self) -> EngineConfig:
        """Return the engine's settings, with the memory that the loaded models leave free."""
        self._beside = [each for each in self._models if each.loaded]
        reserved = taken = 0
        for each in self._beside:
            assert each.loaded is not None
            info, stats = each.loaded.service.info, EngineStats()
            with contextlib.suppress(EngineFailure, TimeoutError):
                async with asyncio.timeout(_STATS_S):
                    stats = await each.loaded.service.client.stats()
            held = sum(size for _, size in (*stats.kv_used, *stats.kv_kept))
            reserved += max(0, info.kv_memory - held)
            taken += info.weight_bytes + info.kv_memory
        return replace(
            self._model.config.engine,
            memory=None if self._memory is None else max(0, self._memory - taken),
            reserved=reserved,
            sharers=len(self._models) - len(self._beside),
        )

    async def make(self, lacking: NoRoom) -> EngineConfig:
        """Unload the least recently used model, and return the settings for the memory free then.

        If that model may not be unloaded yet, wait until it may. An engine that asked for room
        waits too, so it is not started again; other models load and unload meanwhile.

        Raises:
            NoRoom: no loaded model may be unloaded.
            LoadingStopped: no request waits for the model any more.
        """
        # If one was unloaded since the settings were made, its memory is free without an eviction.
        while all(each.loaded for each in self._beside):
            postponed = await self._evictions.make_room(
                self._model, lacking, self._attempt, since=self._started
            )
            if postponed is None:
                break
            self._attempt += 1
            before = self._clock()
            await self._turn.let_others(postponed.wait())
            self._started += self._clock() - before
            check_wanted(self._model)
        return await self.config()
