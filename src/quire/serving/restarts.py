"""Starts failed engines anew, as long as they do not fail too often."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, repeat

from quire.core.errors import EngineFailure, ModelError
from quire.core.figures import duration
from quire.serving.model import Model
from quire.serving.tasks import Tasks

log = logging.getLogger("quire.models")

WITHIN_S = 600.0
"""Seconds for which a failure counts."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after a restart that failed, by attempt; the last value repeats."""


class Restarts:
    """Counts the failures of engines, and starts engines anew. Belongs to `Models`.

    The engine of a kept model is started at once; that of another with the next request. An engine
    that failed more than `limit` times within `WITHIN_S` is not started before the first of these
    failures is older.

    Args:
        load: loads a model. It raises `ModelError` if that fails, `EngineFailure` if it is stopped.
        limit: the most restarts of a model within `WITHIN_S`.
    """

    def __init__(
        self, models: Sequence[Model], load: Callable[[Model], Awaitable[None]], limit: int
    ) -> None:
        self._models = models
        self._load = load
        self._limit = limit
        self._failed_at = {model.name: deque[float](maxlen=limit + 1) for model in models}
        self._tasks = Tasks()
        self.exhausted = asyncio.Event()
        """Set when no engine may be started any more, because all have failed too often."""

    def failed(self, model: Model, why: str) -> None:
        """Count the failure of a model's engine. Start the engine of a kept model anew."""
        self._count(model, why)
        if model.kept:
            model.restarting = True
            self._tasks.start(self._restart(model))

    def check(self, model: Model) -> None:
        """Raise `EngineFailure` if the model's engine has failed too often to be started now."""
        if (wait_s := self._wait_s(model)) > 0:
            raise EngineFailure(
                f"The engine of '{model.name}' failed {self._limit + 1} times within "
                f"{duration(WITHIN_S)}; the last time: {model.problem}",
                retry_after_s=None if self.exhausted.is_set() else wait_s,
            )

    async def close(self) -> None:
        """Start no engine any more."""
        await self._tasks.cancel()

    def _count(self, model: Model, why: str) -> None:
        failures, now = self._failed_at[model.name], asyncio.get_running_loop().time()
        failures.append(now)
        model.problem, model.failures = why, model.failures + 1
        recent = sum(now - each < WITHIN_S for each in failures)
        counted = (
            f"failure {recent} within {duration(WITHIN_S)}, of which {self._limit} are allowed"
        )
        log.error("the engine of %s failed: %s (%s)", model.name, why, counted)
        if all(self._wait_s(each) > 0 for each in self._models):
            self.exhausted.set()

    def _wait_s(self, model: Model) -> float:
        """Return the seconds until the model's engine may be started."""
        failures = self._failed_at[model.name]
        if len(failures) <= self._limit:
            return 0.0
        return max(0.0, failures[0] + WITHIN_S - asyncio.get_running_loop().time())

    async def _restart(self, model: Model) -> None:
        """Load a model whose engine failed, until it is loaded or its loading is stopped."""
        for pause_s in chain(_PAUSES_S, repeat(_PAUSES_S[-1])):
            await asyncio.sleep(self._wait_s(model))
            if not model.restarting:
                return
            try:
                with model.asking(""):
                    await self._load(model)
                return
            except EngineFailure:
                model.restarting = False
                return
            except ModelError as error:
                self._count(model, str(error))
            await asyncio.sleep(pause_s)
