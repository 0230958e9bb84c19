"""Replicas on a Ray that runs on this machine alone: `quire serve MODEL --replicas N`."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from quire.api.opening import open_service
from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ModelError
from quire.scale.client import ReplicatedEngine
from quire.scale.deployments import Scaling, replicas
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Loaded
from quire.serving.models import OnProgress, Opener

_APPLICATION = "quire"


def local_opener(scaling: Scaling) -> Opener:
    """Return the function that starts Ray and opens a model as replicas on it.

    Each replica gets a GPU if the machine has any.
    """

    async def opener(config: ModelConfig, progress: OnProgress, make_room: MakeRoom) -> Loaded:
        handle = await asyncio.to_thread(_start, config, scaling)
        try:
            client = await ReplicatedEngine.connect(handle, on_close=_stop_in_thread)
        except BaseException:
            await _stop_in_thread()
            raise
        return await open_service(client, config)

    return opener


def _start(config: ModelConfig, scaling: Scaling) -> Any:
    """Start Ray and the replicas; return their handle once all are ready.

    Raises:
        ModelError: Ray or the replicas did not start. For its own start Ray has limits of time that
            no option changes: 15 s for an agent's port, 30 s for the node.
    """
    try:
        gpus = _start_ray(scaling)
        cores, shared = os.cpu_count() or 1, scaling.most_replicas
        engine = config.engine if gpus else _shared(config.engine, shared, cores)
        scaling = replace(scaling, gpus=1 if gpus else 0)
        deployment = replicas(engine, config.serving, scaling)
        return serve.run(deployment, name=_APPLICATION, route_prefix=None)
    except Exception as error:  # Ray raises `Exception` itself if its node starts too slowly
        _stop()
        raise ModelError(f"Ray did not start the replicas: {error}") from error


def _start_ray(scaling: Scaling) -> float:
    """Start Ray and Ray Serve on this machine; return how many GPUs it has."""
    ray.init(
        num_cpus=max(os.cpu_count() or 1, scaling.most_replicas),
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
    )
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    return float(ray.cluster_resources().get("GPU", 0))


def _shared(engine: EngineConfig, replicas: int, cores: int) -> EngineConfig:
    """Return the settings of one engine, with its share of this machine's cores and memory."""
    return replace(
        engine, threads=engine.threads or max(1, cores // replicas), sharers=max(1, replicas)
    )


def _stop() -> None:
    if ray.is_initialized():  # otherwise Ray Serve would start Ray to shut it down
        serve.shutdown()
        ray.shutdown()


async def _stop_in_thread() -> None:
    await asyncio.to_thread(_stop)
