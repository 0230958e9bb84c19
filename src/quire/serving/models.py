"""The models of a server: loading, leases and unloading.

A loaded model is an engine's process and the processes that read its requests. Ending them unloads
it, so all its memory returns to the system.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from quire.core.config import ModelConfig
from quire.core.errors import (
    EngineFailure,
    LoadingStopped,
    ModelError,
    NoRoom,
    NotFound,
)
from quire.core.info import EngineStats
from quire.core.messages import Progress
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Lease, Loaded, Model, count_off
from quire.serving.restarts import Restarts
from quire.serving.room import Room, Turn
from quire.serving.streams import Observer
from quire.serving.swaps import Evictions, check_wanted
from quire.serving.tasks import Tasks, cancel_and_wait, close_all, to_the_end

log = logging.getLogger("quire.models")

_CLOSED = "the server is shutting down"


OnProgress = Callable[[Progress | None], None]
"""A function that is told the progress of loading a model; None once it has ended."""

Opener = Callable[[ModelConfig, OnProgress, MakeRoom], Awaitable[Loaded]]
"""A function that loads a model, and asks for room before it reads weights that do not fit. It
raises `ModelError`.
"""


class Models:
    """Loads models on demand, and unloads them. Belongs to one event loop.

    One model is loaded at a time. If there is no room, the least recently used model that is not
    pinned is unloaded: at once if nobody holds it, else by the rules of `swaps`.

    Args:
        memory: bytes for all loaded models together; None means the machine's memory.
        restarts: see `Restarts`.
    """

    def __init__(
        self,
        model_configs: Sequence[ModelConfig],
        opener: Opener,
        *,
        memory: int | None = None,
        restarts: int = 5,
    ) -> None:
        alone = len(model_configs) == 1
        self._models = [Model(each, kept=each.pinned or alone) for each in model_configs]
        self._opener = opener
        self._memory = memory
        self.renaming = asyncio.Lock()
        """Held while an adapter of any model is added or removed, and so its name."""
        self._changing = asyncio.Lock()
        self._evictions = Evictions(self._models, self._unload)
        self._restarts = Restarts(self._models, self._load, restarts)
        self._unloading = Tasks()
        self._ending = Tasks()
        """Tasks that end the processes of models. They are never cancelled."""
        self._closed = False
        self._observer: Callable[[str, int, str], Observer] | None = None
        self.broken = self._restarts.exhausted

    def observe(self, observer: Callable[[str, int, str], Observer]) -> None:
        """Set the function that makes an observer of each choice, from caller, prompt tokens and
        model.
        """
        self._observer = observer
        for model in self._models:
            model.observe(observer)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def default(self) -> Model:
        """The model that answers requests without a model name."""
        return self._models[0]

    def find(self, name: object) -> Model:
        """Return the model of this name. None and values that cannot be names mean the default.

        Raises:
            NotFound: there is none.
        """
        if not isinstance(name, str):
            return self.default
        for spelling in spellings(name):
            for model in self._models:
                if spelling in model.config.names:
                    return model
        raise unknown_model(name, [each.name for each in self._models])

    async def open(self) -> None:
        """Load the models that must be there from the start: pinned ones, and a lone model.

        Raises:
            ModelError: one cannot be loaded.
        """
        for model in self._models:
            if model.kept:
                with model.asking(""):
                    await self._load(model)
                self._schedule(model)

    async def use(self, model: Model, caller: str = "") -> Lease:
        """Wait until the model is loaded, and hold it.

        Args:
            caller: the API key of the request.

        Raises:
            EngineFailure: it cannot be loaded, its loading was stopped, or its engine failed too
                often.
        """
        try:
            while not model.ready:
                self._restarts.check(model)
                with model.asking(caller):
                    await self._load(model)
        except ModelError as error:
            raise EngineFailure(f"The model '{model.name}' could not be loaded: {error}") from error
        finally:
            self._schedule(model)  # for the last who leaves instead of holding it
        assert model.loaded is not None
        model.held[caller] += 1
        model.callers.add(caller)
        model.idle.clear()
        model.stop_timer()
        return Lease(model, model.loaded, caller, released=self._released)

    async def unload(self, model: Model) -> None:
        """Unload a model once no request holds it. Stop its loading at once.

        So a model whose loading hangs and delays all others can be stopped. No effect if it is not
        loaded.
        """
        model.restarting = False
        if (opening := model.opening) is not None:
            await asyncio.sleep(0)  # see `close`
            await cancel_and_wait(opening)
        if model.loaded is None:
            return
        async with self._changing:
            await self._unload(model)

    async def stats(self) -> dict[str, EngineStats]:
        """Return the engine counters of each loaded model by the model's name.

        Raises:
            EngineFailure: the only engine cannot continue.
        """
        stats: dict[str, EngineStats] = {}
        for model in self._models:
            if model.loaded is None:
                continue
            try:
                stats[model.name] = await model.loaded.service.client.stats()
            except EngineFailure:
                if len(self._models) == 1:
                    raise
        return stats

    async def close(self) -> None:
        """End all processes; requests in flight fail. May be called again."""
        self._closed = True
        await asyncio.sleep(0)  # a task that is cancelled before it starts does nothing at all
        ending = [model.opening for model in self._models if model.opening is not None]
        await cancel_and_wait(*ending)
        await self._restarts.close()
        await self._unloading.cancel()
        for model in self._models:
            model.stop_timer()
        await cancel_and_wait(*(each.watch for each in self._models if each.watch is not None))
        await self._ending.wait()
        await close_all(*(each.loaded.close() for each in self._models if each.loaded is not None))

    # -- loading -------------------------------------------------------------------------------

    async def _load(self, model: Model) -> None:
        """Wait until the model is loaded. A caller that gives up does not stop it for others."""
        if self._closed:
            raise EngineFailure(_CLOSED)
        if model.opening is None:
            model.opening = asyncio.create_task(self._open(model))
            model.opening.add_done_callback(_read_exception)
        await asyncio.shield(model.opening)

    async def _open(self, model: Model) -> None:
        """Load a model after others have made room, as long as any request waits for it."""
        turn = Turn(self._changing)
        try:
            await turn.take()
            check_wanted(model)
            await self._ending.wait()  # their memory is free then
            if model.loaded is None:
                await self._open_in_room(model, turn)
        except ModelError as error:
            model.problem = str(error)
            raise
        except asyncio.CancelledError:
            if self._closed:
                raise EngineFailure(_CLOSED) from None
            raise LoadingStopped(f"The loading of '{model.name}' was stopped.") from None
        finally:
            turn.give()
            self._evictions.ended(model)
            model.opening = model.progress = None

    async def _open_in_room(self, model: Model, turn: Turn) -> None:
        """Load a model. Unload others to make room, as long as there are any."""
        room = Room(model, self._models, evictions=self._evictions, memory=self._memory, turn=turn)
        engine = await room.config()
        now = asyncio.get_running_loop().time
        started = now()
        while model.loaded is None:
            config = replace(model.config, engine=engine)
            try:
                model.loaded = await self._opener(config, model.show_progress, room.make)
            except NoRoom as error:  # it needs more than its engine had asked for
                engine = await room.make(error)
        log.info("loaded %s in %.1f s", model.name, now() - started)
        if self._observer is not None:
            model.observe(self._observer)
        model.problem, model.restarting = None, False
        model.idle_unload_s = model.config.idle_unload_s
        model.callers.clear()
        if model.loaded.broken is not None:
            model.watch = asyncio.create_task(self._watch(model, model.loaded.broken))
        self._schedule(model)  # those who waited may all have left

    async def _watch(self, model: Model, broken: asyncio.Event) -> None:
        """Clean up after an engine that failed, and have another started."""
        await broken.wait()
        assert model.loaded is not None
        loaded, model.loaded = model.loaded, None
        model.stop_timer()
        self._ending.start(loaded.close())
        self._restarts.failed(model, loaded.service.client.failure or "it ended")

    # -- unloading -----------------------------------------------------------------------------

    async def _unload(self, model: Model) -> None:
        """Unload a model. The caller holds `_changing`; new requests for it wait meanwhile."""
        model.leaving = True
        try:
            await model.idle.wait()
            loaded, model.loaded = model.loaded, None
        finally:
            model.leaving = False
        if loaded is None:
            return
        model.stop_timer()
        await to_the_end(self._ending.start(_end(model, loaded)))

    def _released(self, model: Model, caller: str) -> None:
        count_off(model.held, caller)
        if model.users == 0:
            model.used_at = asyncio.get_running_loop().time()
            model.idle.set()
            self._schedule(model)

    def _schedule(self, model: Model) -> None:
        """Unload the model later unless a request comes before."""
        after = model.idle_unload_s
        model.stop_timer()
        if after is None or model.config.pinned or model.wanted or self._closed:
            return
        model.timer = asyncio.get_running_loop().call_later(after, self._expire, model)

    def _expire(self, model: Model) -> None:
        model.timer = None
        if not (model.wanted or self._closed):
            self._unloading.start(self._unload_idle(model))

    async def _unload_idle(self, model: Model) -> None:
        async with self._changing:
            if not model.wanted and model.timer is None:  # nobody came while others were loaded
                await self._unload(model)


async def _end(model: Model, loaded: Loaded) -> None:
    """End the processes of an unloaded model."""
    if model.watch is not None:
        await cancel_and_wait(model.watch)
    await loaded.close()
    log.info("unloaded %s", model.name)


def spellings(name: str) -> tuple[str, ...]:
    """Return what a model may be called here: Ollama's clients add the tag that it adds itself."""
    return (name, name.removesuffix(":latest"))


def unknown_model(name: str, known: Sequence[str]) -> NotFound:
    """Return the refusal of a request for a model that is not served."""
    verb = "is" if len(known) == 1 else "are"
    names = ", ".join(f"'{each}'" for each in known)
    return NotFound(
        f"The model '{name}' is not served here; {names} {verb}. Send a served name, or "
        "give the model this one with --also-named.",
        param="model",
        code="model_not_found",
    )


def _read_exception(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it as unread."""
    if not task.cancelled():
        task.exception()
