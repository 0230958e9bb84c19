"""Routing by prefix: a request goes to the replica that has cached its start, unless loaded.

Pure Python, without Ray. Replicas report the short keys of their cached blocks. A router adds the
keys of prompts that it has sent since, and matches a prompt's keys against both. No tokens are
sent.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quire.core.block_keys import SHORT, BlockNames, chains, content_of
from quire.core.request import Request

TRUST_S = 15.0
"""Seconds for which a prompt counts as cached where it was sent, whatever the replica reports."""
_SESSIONS = 100_000
"""Number of sessions, last used, whose replicas a router remembers."""
SPARE = 4
"""A replica gets a prompt that it has cached if its requests exceed twice those of the least busy
replica by at most this number.
"""


@dataclass(frozen=True, slots=True)
class Route:
    """First argument of each call to a replica: the data for choosing the replica.

    Attributes:
        blocks: short keys of the prompt's full blocks, concatenated.
        session: requests with the same session prefer one replica; empty without a session.
        replica: the replica that must get the call; if empty, the router chooses.
        lost: replicas that failed during this call and must not get it again.
    """

    blocks: bytes = b""
    session: str = ""
    replica: str = ""
    lost: frozenset[str] = frozenset()

    @classmethod
    def of(cls, request: Request, names: BlockNames) -> Route:
        """Return the route of a request."""
        root = names.root(names.format(request.kv_format), request.cache_salt)
        content = content_of(request.prompt, request.media)
        full = len(content) // names.block_size * names.block_size
        keys = chains(root, content[:full], names.block_size)
        return cls(b"".join(key[:SHORT] for key in keys), request.session)

    def keys(self) -> list[bytes]:
        """Split `blocks` into its keys."""
        return short_keys(self.blocks)


def short_keys(joined: bytes) -> list[bytes]:
    """Return keys in the concatenated form of `Engine.cached` and `Route.blocks`."""
    return [joined[at : at + SHORT] for at in range(0, len(joined), SHORT)]


@dataclass(slots=True)
class _Replica:
    """A router's knowledge of one replica.

    Attributes:
        reported: keys of its cached blocks, from its last report.
        sent: keys of the prompts sent to it, each with the time until which it counts as cached.
        placed: number of conversations that started there.
    """

    reported: frozenset[bytes] = frozenset()
    sent: dict[bytes, float] = field(default_factory=dict)
    placed: int = 0

    def matched(self, keys: Sequence[bytes], now: float) -> int:
        """Return how many leading blocks of a prompt are cached there, found by bisection: who has
        a block has those before it.
        """
        reported, sent = self.reported, self.sent

        def lacks(key: bytes) -> bool:
            return key not in reported and sent.get(key, 0.0) <= now

        if not keys or lacks(keys[0]):
            return 0
        return bisect_left(keys, True, key=lacks)


class PrefixTable:
    """Chooses replicas by cached prefixes and by load. Belongs to one thread.

    A new conversation goes to the replica with the fewest requests, then with the fewest
    conversations started. So each replica computes a common system prompt once. A continued
    conversation goes to the replica with its longest cached prefix. It leaves that replica if the
    replica has more than twice as many requests as the least busy one, and `SPARE` more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def keep(self, names: Collection[str]) -> None:
        """Set the known replicas; forget all others."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def report(self, name: str, cached: bytes) -> None:
        """Store the report of a replica: the short keys of its cached blocks, concatenated."""
        replica, now = self._replicas[name], self._clock()
        replica.reported = frozenset(short_keys(cached))
        replica.sent = {key: until for key, until in replica.sent.items() if until > now}

    def ranked(self, route: Route, loads: Mapping[str, int]) -> list[str]:
        """Return the replicas for a request, the best first.

        Args:
            loads: requests that replicas work on; one that is missing has none.
        """
        keys, now = route.keys(), self._clock()
        matched = {name: each.matched(keys, now) for name, each in self._replicas.items()}
        home = self._sessions.get(route.session)
        if home in matched:
            matched[home] = len(keys)
        starts = _starts(len(keys), max(matched.values(), default=0))
        if route.session:
            starts = home not in matched

        most = 2 * min((loads.get(name, 0) for name in matched), default=0) + SPARE

        def cost(name: str) -> tuple[float, ...]:
            load = loads.get(name, 0)
            if starts:
                return load, self._replicas[name].placed, -matched[name], random.random()
            return load > most, -matched[name], load, random.random()

        return sorted(matched, key=cost)

    def routed(self, route: Route, name: str) -> None:
        """Record that a request went to a replica."""
        if (replica := self._replicas.get(name)) is None:
            return
        keys, now = route.keys(), self._clock()
        matched = replica.matched(keys, now)
        starts = _starts(len(keys), matched)
        if route.session:
            starts = self._sessions.get(route.session) != name
            self._sessions[route.session] = name
            self._sessions.move_to_end(route.session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        replica.placed += starts
        replica.sent |= dict.fromkeys(keys, now + TRUST_S)


def _starts(blocks: int, matched: int) -> bool:
    """Return whether a prompt starts a conversation: no replica has cached most of it."""
    return 2 * matched < blocks
