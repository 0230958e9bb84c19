"""How many replicas Ray Serve keeps: by requests, and by the KV memory that they hold.

Ray's controller imports this module without the rest of Quire, and applies delays and bounds.
"""

from __future__ import annotations

from typing import Any

KV_USE = "kv_use"
"""Name of the figure that replicas report: the share of KV memory that requests hold."""
KV_TARGET = 0.7
"""Share of each replica's KV memory above which another replica is started. Requests of a replica
whose memory is full wait or are preempted.
"""


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for the present load: enough for the requests, each replica
    having Ray's `target_ongoing_requests`, and for the KV memory.

    Args:
        context: Ray's `AutoscalingContext`.
    """
    requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    used = (context.aggregated_metrics or {}).get(KV_USE, {})
    return max(requests, sum(used.values()) / KV_TARGET), {}
