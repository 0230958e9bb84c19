"""Ray Serve's request routers for replicas of Quire.

The interface is `ray.serve.request_router`. Ray asks a router to rank replicas, reports where a
request went and when it ended, and passes on what replicas report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import RequestRouter

from quire.scale.routing import PrefixTable, Route


class Addressed(RequestRouter):
    """Base of routers: sends a call to the replica that it names, never to one that failed during
    it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return ranks of replicas, the best first.

        A call to a replica that is gone may go to any other one, which answers that it does not
        have the request.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all ranks are full
        route = route_of(pending_request)
        if route.replica:
            named = [each for each in candidate_replicas if _name(each) == route.replica]
            return [named or candidate_replicas[:1]]
        able = [each for each in candidate_replicas if _name(each) not in route.lost]
        if not able:
            return []  # Ray asks again after a while
        ranks: list[list[Any]] = await super().choose_replicas(able, pending_request)
        return [[each for each in rank if _name(each) not in route.lost] for rank in ranks]


class _ByPrefix(RequestRouter):
    """Ranks replicas by a `PrefixTable`, and keeps the table up to date from Ray's callbacks."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Start with an empty table. Ray calls this once."""
        self._table = PrefixTable()
        self._running: dict[str, str] = {}
        """Replicas of the running requests that this router sent, by Ray's ids of the requests."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """Update the set of replicas and their reports."""
        super().update_replicas(replicas)
        self._table.keep([_name(each) for each in replicas])
        for each in replicas:
            if (stats := each.routing_stats) and "cached" in stats:
                self._table.report(_name(each), stats["cached"])

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas one by one, the best first."""
        by_name = {_name(each): each for each in candidate_replicas}
        loads = self._loads(by_name)
        ranked = self._table.ranked(route_of(pending_request), loads)
        return [[by_name[name]] for name in ranked if name in by_name]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record which replica got a request."""
        route = route_of(pending_request)
        if not route.replica:
            self._running[pending_request.metadata.internal_request_id] = replica_id.unique_id
            self._table.routed(route, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Record that a request ended."""
        self._running.pop(internal_request_id, None)

    def _loads(self, by_name: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of running requests of each replica, from this router or from Ray.

        Ray forgets a replica's number ten seconds after its last report.
        """
        own = Counter(self._running.values())
        heard = self.replica_queue_len_cache
        return {
            name: max(own[name], heard.get(each.replica_id) or 0) for name, each in by_name.items()
        }


class PrefixRouter(Addressed, _ByPrefix):
    """The default router of Quire's replicas."""


def route_of(pending_request: Any) -> Route:
    """Return the `Route` of a call, which is its first argument."""
    given = pending_request.args[0] if pending_request and pending_request.args else None
    return given if isinstance(given, Route) else Route()


def _name(replica: Any) -> str:
    name: str = replica.replica_id.unique_id
    return name
