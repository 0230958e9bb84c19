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
    """Start Ray and the replicas; return their handle once all are ready."""
    shared = scaling.most_replicas
    cores = os.cpu_count() or 1
    ray.init(
        num_cpus=max(cores, shared),
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
    )
    gpus = ray.cluster_resources().get("GPU", 0)
    engine = config.engine if gpus else _shared(config.engine, shared, cores)
    scaling = replace(scaling, gpus=1 if gpus else 0)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        return serve.run(
            replicas(engine, config.serving, scaling), name=_APPLICATION, route_prefix=None
        )
    except RuntimeError as error:
        _stop()
        raise ModelError(f"the replicas did not start: {error}") from error


def _shared(engine: EngineConfig, replicas: int, cores: int) -> EngineConfig:
    """Return the settings of one engine, with its share of this machine's cores and memory."""
    return replace(
        engine, threads=engine.threads or max(1, cores // replicas), sharers=max(1, replicas)
    )


def _stop() -> None:
    serve.shutdown()
    ray.shutdown()


async def _stop_in_thread() -> None:
    await asyncio.to_thread(_stop)
