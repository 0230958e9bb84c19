"""Quire as an application of Ray Serve: `serve run quire.scale.ray:app model=...`.

Annotations here are not postponed: Ray reads the one of `app` to build `Arguments`, from texts if
they stand on the command line.
"""

import secrets
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from quire.api.app import build_app
from quire.api.opening import open_service
from quire.core.config import ModelConfig
from quire.llm.settings import Settings, configured
from quire.scale.arguments import Arguments
from quire.scale.client import ReplicatedEngine
from quire.scale.deployments import UNBOUNDED, Scaling, replicas
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Loaded
from quire.serving.models import Models, OnProgress


class Ingress:
    """The HTTP API in front of the replicas. It runs the code of `quire serve`."""

    # Ray awaits the constructor.
    async def __init__(self, replicas: Any, config: ModelConfig) -> None:  # type: ignore[misc]
        async def opener(own: ModelConfig, progress: OnProgress, room: MakeRoom) -> Loaded:
            return await open_service(await ReplicatedEngine.connect(replicas), own)

        key = config.serving.signing_key or secrets.token_hex(32)
        self._config = replace(config.serving, signing_key=key)
        self._models = Models([replace(config, serving=self._config)], opener)
        await self._models.open()

    def __serve_build_asgi_app__(self) -> Any:
        return build_app(self._models, self._config)

    async def __del__(self) -> None:
        await self._models.close()


def app(arguments: Arguments) -> Any:
    """Build the application: an ingress and the replicas behind it."""
    settings = arguments.model_dump(include=set(Settings.__annotations__))
    engine, serving = configured(arguments.model, settings)
    serving = replace(
        serving,
        host="0.0.0.0",
        served_name=arguments.served_name or serving.served_name,
        api_keys=arguments.api_keys,
        allowed_hosts=arguments.allowed_hosts,
        cors_origins=arguments.cors_origins,
        max_concurrent=arguments.max_concurrent,
        page=arguments.page,
        signing_key=arguments.signing_key,
    )
    gpus = arguments.gpus
    if gpus is None:
        gpus = 1 if ray.is_initialized() and ray.cluster_resources().get("GPU") else 0
    scaling = Scaling(
        arguments.replicas,
        arguments.max_replicas,
        upscale_delay_s=arguments.upscale_delay_s,
        downscale_delay_s=arguments.downscale_delay_s,
        gpus=gpus,
        cpus=arguments.cpus,
        router=arguments.router,
    )
    front = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNBOUNDED,
    )
    return front.bind(replicas(engine, serving, scaling), ModelConfig(engine, serving, pinned=True))
