"""The deployments of a Quire application: replicas, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ray import serve

from quire.core.config import EngineConfig, ServerConfig
from quire.scale.arguments import ROUTER
from quire.scale.replica import Replica

UNBOUNDED = 1_000_000
"""Most calls that a replica may have at a time: practically unlimited, because its engine queues
requests.
"""
_HEALTH_S = 5.0
_DRAIN_S = 600.0
"""Seconds that a replica being removed has to finish its answers."""
_REPORT_S = 1.0
"""Seconds between reports of what a replica has cached."""
POLICY = "quire.scale.autoscaling:wanted_replicas"


@dataclass(frozen=True, slots=True)
class Scaling:
    """The number of replicas and the Ray resources that each reserves.

    Attributes:
        replicas: how many; auto lets Ray start and end them by load.
        most: the most replicas with auto.
        upscale_delay_s: how long load must last before auto starts a replica.
        downscale_delay_s: how long load must be lower before auto ends one.
        router: a subclass of `quire.scale.router.Addressed`, as `module:class`.
    """

    replicas: int | Literal["auto"] = 1
    most: int = 8
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    gpus: float = 0
    cpus: float = 1
    router: str = ROUTER

    @property
    def most_replicas(self) -> int:
        """Return the largest number of replicas that may run at once."""
        return self.most if self.replicas == "auto" else self.replicas


def replicas(engine: EngineConfig, serving: ServerConfig, scaling: Scaling) -> Any:
    """Return the deployment of replicas, bound to its settings."""
    number: dict[str, Any] = {"num_replicas": scaling.replicas}
    if scaling.replicas == "auto":
        number["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": scaling.most,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "policy": {"policy_function": POLICY},
        }
    return (
        serve.deployment(Replica)
        .options(
            name="replicas",
            ray_actor_options={"num_cpus": scaling.cpus, "num_gpus": scaling.gpus},
            max_ongoing_requests=UNBOUNDED,
            graceful_shutdown_timeout_s=_DRAIN_S,
            health_check_period_s=_HEALTH_S,
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
            request_router_config={
                "request_router_class": scaling.router,
                "request_routing_stats_period_s": _REPORT_S,
            },
            **number,
        )
        # An argument that follows the number of replicas restarts all of them when that changes.
        .bind(engine, serving, scaling.most_replicas if engine.disk else 1)
    )
