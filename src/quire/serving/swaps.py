"""Rules for unloading a model in use in favour of another, and which API keys pay for it.

A model in use is not unloaded at once. It stays open for a while, and is unloaded as soon as nobody
holds it. Then it takes no new requests for a while, so that it empties; then it is open again,
longer each time. So a long stream or a busy key cannot keep the next model away for ever, nor lock
others out of the loaded one. All this stops as soon as nobody waits for the next model.

A swap costs time for all users of the unloaded model. The API keys that asked for it may cause no
other swap before they have left the others in peace for several times as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from quire.core.errors import LoadingStopped, NoRoom
from quire.serving.model import Model

log = logging.getLogger("quire.models")

OPEN_S = (5.0, 30.0, 120.0)
"""Seconds for which a model to be unloaded still accepts requests, by attempt; the last value
repeats.
"""
CLOSED_S = 20.0
"""Seconds for which it accepts none, so that its requests can end."""
REST = 8.0
"""If API keys share a model, a caller that caused a swap causes no other for this multiple of the
swap's duration.
"""
_LONGEST_REST_S = 120.0
_LOOK_S = 0.1


class Debts:
    """Seconds that API keys owe for swaps that they caused. Pure Python."""

    def __init__(self) -> None:
        self._ready_at: dict[str, float] = {}

    def wait_s(self, askers: Collection[str], users: Iterable[str], now: float) -> float:
        """Return the seconds until `askers` may unload a model that `users` have used.

        0 for a model that nobody else has used.
        """
        if not set(users) - set(askers):
            return 0.0
        ready_at = min((self._ready_at.get(each, now) for each in askers), default=now)
        return max(0.0, ready_at - now)

    def caused(self, askers: Iterable[str], took_s: float, now: float) -> None:
        """Charge a swap's duration to the API keys that asked for it."""
        for each in askers:
            self._ready_at[each] = now + min(REST * took_s, _LONGEST_REST_S)


@dataclass(frozen=True, slots=True)
class Postponed:
    """A postponed loading: retry when `ready`, after some seconds, or give up when unwanted."""

    model: Model
    seconds: float
    ready: Callable[[], bool]

    async def wait(self) -> None:
        """Wait until another attempt is worthwhile."""
        await _until(lambda: not self.model.waiting or self.ready(), self.seconds)


class Evictions:
    """Makes room for models. Belongs to `Models`, which loads one at a time.

    Args:
        unload: unloads a model as soon as nobody holds it.
    """

    def __init__(self, models: Sequence[Model], unload: Callable[[Model], Awaitable[None]]) -> None:
        self._models = models
        self._unload = unload
        self._debts = Debts()
        self._swaps: dict[str, tuple[set[str], float]] = {}
        """By model: the API keys that asked for its swap, and the time when it started."""

    async def make_room(
        self, model: Model, lacking: NoRoom, attempt: int, since: float
    ) -> Postponed | None:
        """Unload the least recently used model.

        Args:
            attempt: how often this was postponed for the same loading.
            since: the loop's time from which the swap is charged: the start of the loading, moved
                on by the time for which it was postponed.

        Returns:
            When to try again, if no model may be unloaded yet.

        Raises:
            NoRoom: no loaded model may be unloaded.
            LoadingStopped: no request waits for `model`.
        """
        rest = [each for each in self._models if each.loaded and not each.config.pinned]
        if not rest:
            raise lacking
        oldest = min(rest, key=lambda each: (each.wanted, each.used_at))
        clock = asyncio.get_running_loop().time
        if (rest_s := self._debts.wait_s(model.asked, oldest.callers, clock())) > 0:
            return Postponed(model, rest_s, lambda: False)
        if oldest.users and (attempt == 0 or not await _empties(oldest, model)):
            check_wanted(model)
            return Postponed(model, _open_s(attempt), lambda: not oldest.users)
        check_wanted(model)
        log.info("unloading %s to load %s: %s", oldest.name, model.name, lacking)
        if set(oldest.callers) - set(model.asked):
            self._swaps[model.name] = (set(model.asked), since)
        await self._unload(oldest)
        return None

    def ended(self, model: Model) -> None:
        """Charge a finished swap to the API keys that asked for `model`."""
        if (swap := self._swaps.pop(model.name, None)) is not None:
            now = asyncio.get_running_loop().time()
            self._debts.caused(swap[0], now - swap[1], now)


def check_wanted(model: Model) -> None:
    """Raise `LoadingStopped` if no request waits for the model."""
    if not model.waiting:
        raise LoadingStopped(f"No request waits for '{model.name}' any more.")


def _open_s(attempt: int) -> float:
    return OPEN_S[min(attempt, len(OPEN_S) - 1)]


async def _empties(leaving: Model, model: Model) -> bool:
    """Close the model to new requests for a while. Return whether it became unused."""
    leaving.leaving = True
    try:
        await _until(lambda: not (leaving.users and model.waiting), CLOSED_S)
    finally:
        leaving.leaving = False
    return not leaving.users


async def _until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until `holds()` is true, at most for some seconds."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not holds() and clock() < deadline:
        await asyncio.sleep(min(_LOOK_S, deadline - clock()))
