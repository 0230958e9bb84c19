"""Other routers before Quire's replicas, to measure ours beside them; `replicas.py` names them."""

from __future__ import annotations

from typing import Any

# `ray.serve.llm` exports it, and needs packages that nothing here does.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.experimental.round_robin_router import RoundRobinRouter

from quire.scale.router import Addressed


class RoundRobin(Addressed, RoundRobinRouter):
    """Ray's router that takes one replica after the other."""


class RayPrefix(Addressed, PrefixCacheAffinityRouter):
    """Ray's prefix-aware router, with the tokens of a prompt as the characters that it compares."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        requests = pending_request.args[1] if len(pending_request.args) > 1 else ()
        prompt = requests[0].prompt if requests else (0,)
        return "".join(chr(token + 256) for token in prompt)
