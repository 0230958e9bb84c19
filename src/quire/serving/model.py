"""One model of a server, loaded or not, and a request's lease on it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.core.config import ModelConfig
from quire.core.info import ModelInfo
from quire.core.messages import Progress
from quire.serving.jobs import Jobs
from quire.serving.service import Service
from quire.serving.streams import Observer
from quire.serving.tasks import close_all
from quire.serving.tokenizer_process import TokenizerProcess


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can answer.

    Attributes:
        tokenizer: the process that holds its tokenizer; None if the server does itself.
        broken: set when its engine cannot continue; None if the engine does not report it.
    """

    service: Service
    jobs: Jobs | None = None
    broken: asyncio.Event | None = None
    tokenizer: TokenizerProcess | None = None

    async def close(self) -> None:
        """End its processes; requests in flight fail."""
        beside = [each.close() for each in (self.jobs, self.tokenizer) if each is not None]
        await close_all(self.service.close(), *beside)


def count_off(counts: Counter[str], caller: str) -> None:
    """Lower a caller's count by one; keep none of zero."""
    counts[caller] -= 1
    if not counts[caller]:
        del counts[caller]


class Model:
    """One model of a server. Only `Models` changes it.

    Attributes:
        kept: whether it is loaded at the start, and anew at once if its engine fails.
        loaded: the loaded model; None unless it can answer.
        held: number of requests that hold it, by API key.
        asked: number of requests that wait for it to be loaded, by API key.
        callers: API keys that have held it since it was loaded.
        progress: progress of loading; None while it is not loading or reports none.
        problem: why its last loading failed, or why its engine did; None if neither happened.
        restarting: whether its failed engine is to be started without a request.
        failures: number of failures of its engine.
        leaving: whether it is unloaded as soon as nobody holds it. New requests wait, and load it
            again.
    """

    def __init__(self, config: ModelConfig, *, kept: bool) -> None:
        self.config = config
        self.kept = kept
        self.loaded: Loaded | None = None
        self.held: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.callers: set[str] = set()
        self.progress: Progress | None = None
        self.problem: str | None = None
        self.restarting = False
        self.failures = 0
        self.leaving = False
        self.used_at = -math.inf
        self.idle_unload_s = config.idle_unload_s
        self.opening: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.watch: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._info: ModelInfo | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def ready(self) -> bool:
        """Whether a request can use it without waiting."""
        return self.loaded is not None and not self.leaving

    @property
    def users(self) -> int:
        """Number of requests that hold it."""
        return self.held.total()

    @property
    def waiting(self) -> int:
        """Number of requests that wait until it is loaded."""
        return self.asked.total()

    @property
    def wanted(self) -> bool:
        """Whether any request holds it, or waits for it."""
        return self.users > 0 or self.waiting > 0

    @property
    def state(self) -> str:
        """`loaded`, `unloading`, `loading`, `failed` or `unloaded`."""
        if self.loaded is not None:
            return "unloading" if self.leaving else "loaded"
        if self.opening is not None:
            return "loading"
        return "unloaded" if self.problem is None else "failed"

    @property
    def failure(self) -> str | None:
        """Why its engine does not answer although it should; None if it does, or need not run."""
        if self.loaded is not None:
            return self.loaded.service.client.failure
        return self.problem if self.restarting else None

    @property
    def info(self) -> ModelInfo | None:
        """The description of the served model as of its last loading; None before that."""
        if self.loaded is not None:
            self._info = self.loaded.service.info
        return self._info

    @property
    def expires_s(self) -> float | None:
        """Seconds until the idle model is unloaded; None if it is not unloaded by time."""
        if self.timer is None or self.loaded is None:
            return None
        return max(0.0, self.timer.when() - asyncio.get_running_loop().time())

    @contextmanager
    def asking(self, caller: str) -> Iterator[None]:
        """Count a request as waiting, within the context."""
        self.asked[caller] += 1
        try:
            yield
        finally:
            count_off(self.asked, caller)

    def show_progress(self, progress: Progress | None) -> None:
        """Set the progress of loading. An `OnProgress`."""
        self.progress = progress

    def observe(self, observer: Callable[[str, int, str], Observer]) -> None:
        """Set the observer of choices, if the model is loaded; see `Models.observe`."""
        if self.loaded is not None:
            name = self.name
            self.loaded.service.observe(lambda caller, tokens: observer(caller, tokens, name))

    def stop_timer(self) -> None:
        """Cancel the timer that would unload it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Lease:
    """One request's hold on a loaded model. The model stays loaded until it is released."""

    def __init__(
        self, model: Model, loaded: Loaded, caller: str, released: Callable[[Model, str], None]
    ) -> None:
        self.model = model
        self.loaded = loaded
        self._caller = caller
        self._released: Callable[[Model, str], None] | None = released

    def keep(self, seconds: float) -> bool:
        """Set how long the model stays loaded after its last request. Return whether that has an
        effect.
        """
        if self.model.config.pinned:
            return False
        self.model.idle_unload_s = seconds if math.isfinite(seconds) else None
        return True

    def release(self) -> None:
        """Release the model. May be called again."""
        if (released := self._released) is not None:
            self._released = None
            released(self.model, self._caller)
