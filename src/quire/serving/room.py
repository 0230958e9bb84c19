"""Memory for a model that is being loaded beside others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, NoRoom
from quire.core.info import EngineStats
from quire.serving.model import Model
from quire.serving.swaps import Evictions, Postponed

_STATS_S = 5.0


class Room:
    """Makes room for one attempt to load a model. Belongs to `Models`.

    Args:
        models: all of the server.
        memory: bytes for all loaded models together; None is what the machine has.
        attempt: how often this loading was postponed.

    Attributes:
        postponed: when to try again, if the models that are loaded may not go yet.
    """

    def __init__(
        self,
        model: Model,
        models: Sequence[Model],
        evictions: Evictions,
        memory: int | None,
        attempt: int,
    ) -> None:
        self.postponed: Postponed | None = None
        self._model = model
        self._models = models
        self._evictions = evictions
        self._memory = memory
        self._attempt = attempt
        self._beside: list[Model] = []

    async def config(self) -> EngineConfig:
        """Return the engine's settings, with the memory that the loaded models leave."""
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
        """Unload the least recently used model, and return the settings for what is free then.

        Raises:
            NoRoom: none may go at all, or not yet; then `postponed` is set.
            LoadingStopped: nobody waits for the model any more.
        """
        # If one broke down since the settings were made, its memory is free without an eviction.
        if all(each.loaded for each in self._beside):
            self.postponed = await self._evictions.make_room(self._model, lacking, self._attempt)
            if self.postponed is not None:
                raise lacking
        return await self.config()
