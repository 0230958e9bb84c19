"""Places for jobs: a limited number runs at once, and API keys take turns.

A job that has run for long is paused while another key's job waits, and continues later. So an API
key that fills all places delays others by a fraction of a second, not by the length of its jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.core.errors import EngineFailure, Overloaded
from quire.core.turns import Turns

SLICE_S = 0.25
"""Most seconds that a running key may be ahead of a waiting one."""
_QUEUED = 512
"""Most waiting jobs of one key."""
_PAUSED = 3
"""Most paused jobs per place; bounds the memory of started jobs."""


class Place:
    """One job's right to run. Created and changed by `Places` alone.

    Attributes:
        key: the API key that the job belongs to.
        since: time up to which its use has been counted; None while it does not run.
        started: whether it has ever run.
    """

    def __init__(self, key: str, granted: asyncio.Future[None]) -> None:
        self.key = key
        self.granted = granted
        self.since: float | None = None
        self.started = False
        self.pause: Callable[[], None] | None = None
        self.resume: Callable[[], None] | None = None


class Places:
    """Hands out places. Belongs to one event loop.

    Args:
        at_once: the most jobs that run at the same time.
        clock: returns seconds.
    """

    def __init__(self, at_once: int, clock: Callable[[], float] | None = None) -> None:
        self._at_once = at_once
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._turns: Turns[str, Place] = Turns()
        self._running: list[Place] = []
        self._paused = 0
        """Number of started jobs that wait for their next turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None

    @property
    def running(self) -> int:
        """Number of running jobs."""
        return len(self._running)

    async def acquire(self, key: str) -> Place:
        """Wait for a place. The caller releases it.

        Raises:
            Overloaded: too many jobs of `key` wait.
            EngineFailure: the places were closed.
        """
        if self._closed is not None:
            raise EngineFailure(self._closed)
        if self._turns.count(key) >= _QUEUED:
            raise Overloaded(
                f"{_QUEUED} requests of this API key wait to be read, which is the limit: try "
                "again later.",
                code="too_many_requests",
            )
        place = Place(key, asyncio.get_running_loop().create_future())
        self._turns.add(key, place)
        self._advance()
        try:
            await place.granted
        except BaseException:
            self.release(place)
            raise
        return place

    def attach(self, place: Place, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Set how a running job is paused and resumed."""
        place.pause, place.resume = pause, resume

    def release(self, place: Place) -> None:
        """Give up a place, or stop waiting for one. May be called again."""
        if self._turns.discard(place.key, place):
            self._paused -= place.started
        elif place in self._running:
            self._count(place)
            self._running.remove(place)
            self._turns.release(place.key)
        self._advance()

    def close(self, reason: str) -> None:
        """Fail all waiting and future requests for a place."""
        self._closed = reason
        while (taken := self._turns.take()) is not None:
            key, place = taken
            self._turns.release(key)
            self._paused -= place.started
            if not place.granted.done():
                place.granted.set_exception(EngineFailure(reason))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _advance(self) -> None:
        """Fill free places, pause jobs that are ahead of waiting ones, and check again soon if any
        wait.
        """
        for place in self._running:
            self._count(place)
        while self._turns and (len(self._running) < self._at_once or self._make_room()):
            self._run_next()
        if not self._turns or self._timer is not None:
            return
        self._timer = asyncio.get_running_loop().call_later(SLICE_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()

    def _run_next(self) -> None:
        taken = self._turns.take()
        assert taken is not None, "somebody waits"
        _, place = taken
        place.since = self._clock()
        self._running.append(place)
        if not place.started:
            place.started = True
            if not place.granted.done():  # else it is cancelled, and about to be released
                place.granted.set_result(None)
            return
        self._paused -= 1
        if place.resume is not None:
            place.resume()

    def _make_room(self) -> bool:
        """Pause the job that is furthest ahead of the next waiting one, if it may be paused."""
        following = self._turns.next()
        assert following is not None, "somebody waits"
        key, waiting = following
        if not waiting.started and self._paused >= _PAUSED * self._at_once:
            return False
        used = self._turns.shares.used
        others = [each for each in self._running if each.key != key and each.pause is not None]
        if not others:
            return False
        ahead = max(others, key=lambda each: used(each.key))
        if used(ahead.key) - used(key) < SLICE_S:
            return False
        assert ahead.pause is not None
        ahead.pause()
        self._running.remove(ahead)
        ahead.since = None
        self._paused += 1
        self._turns.add(ahead.key, ahead, first=True)
        self._turns.release(ahead.key)
        return True

    def _count(self, place: Place) -> None:
        now = self._clock()
        assert place.since is not None, "it runs"
        self._turns.shares.charge(place.key, now - place.since)
        place.since = now
