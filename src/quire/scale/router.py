"""Ray Serve's request router for replicas of Quire."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import FIFOMixin, RequestRouter

from quire.scale.routing import Route


class Addressed(RequestRouter):
    """Sends calls that name a replica to it. A base for routers of replicas."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return ranks of replicas, the best first.

        A call to a replica that is gone goes to any other, which knows nothing of it.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all ranks are full
            route = pending_request.args[0] if pending_request.args else None
            if isinstance(route, Route) and route.replica:
                named = [
                    each
                    for each in candidate_replicas
                    if each.replica_id.unique_id == route.replica
                ]
                return [named or candidate_replicas[:1]]
        ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        return ranks


class ShortestQueue(FIFOMixin, RequestRouter):
    """Sends a call to the replica with the fewest."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return all replicas as one rank, of which Ray takes the shortest queue."""
        return [random.sample(candidate_replicas, len(candidate_replicas))]


class ReplicaRouter(Addressed, ShortestQueue):
    """The router of Quire's replicas."""
