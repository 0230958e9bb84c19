"""The deployments of a Quire application: replicas, and how many of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ray import serve

from quire.core.config import EngineConfig, ServerConfig
from quire.scale.replica import Replica

UNBOUNDED = 1_000_000
"""Calls that a replica may have at once: its engine queues requests, and messages pass them."""
_HEALTH_S = 5.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many replicas there are, and what each reserves of Ray's resources.

    Attributes:
        replicas: how many; auto lets Ray start and end them by load.
        most: replicas of auto.
    """

    replicas: int | Literal["auto"] = 1
    most: int = 8
    gpus: float = 0
    cpus: float = 1


def replicas(engine: EngineConfig, serving: ServerConfig, scaling: Scaling) -> Any:
    """Return the deployment of replicas, bound to their settings."""
    number: dict[str, Any] = {"num_replicas": scaling.replicas}
    if scaling.replicas == "auto":
        number["autoscaling_config"] = {"min_replicas": 1, "max_replicas": scaling.most}
    return (
        serve.deployment(Replica)
        .options(
            name="replicas",
            ray_actor_options={"num_cpus": scaling.cpus, "num_gpus": scaling.gpus},
            max_ongoing_requests=UNBOUNDED,
            health_check_period_s=_HEALTH_S,
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
            request_router_config={"request_router_class": "quire.scale.router:ReplicaRouter"},
            **number,
        )
        .bind(engine, serving)
    )
