"""Quire as an application of Ray Serve: `serve run quire.scale.ray:app model=...`.

Annotations here are not postponed: Ray reads the one of `app` to build `Arguments`.
"""

import secrets
from dataclasses import replace
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from quire.api.app import build_app
from quire.api.opening import open_service
from quire.core.config import ModelConfig, ServerConfig
from quire.demo import NAME
from quire.llm.settings import Settings, configured
from quire.scale.client import ReplicatedEngine
from quire.scale.deployments import ROUTER, UNBOUNDED, Scaling, replicas
from quire.serving.engine_client import MakeRoom
from quire.serving.model import Loaded
from quire.serving.models import Models, OnProgress


class Arguments(BaseModel):
    """Arguments of `app`. Names shared with `quire serve` have the same meaning.

    Attributes:
        model: a folder at the same path on all machines, a hub id, or quire-demo.
        replicas: number of engines; auto lets Ray start and end them by load.
        max_replicas: the most replicas with auto.
        gpus: GPUs of a replica; by default 1 if the cluster has any.
        cpus: CPUs that a replica reserves from Ray.
        router: chooses replicas; a subclass of `quire.scale.router.Addressed`, as `module:class`.
        allowed_hosts: names by which clients reach the ingress; * for any.
        signing_key: signs the reasoning that clients send back; by default each ingress has its
            own.
        dtype and all below: as in `quire.llm.Settings`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = NAME
    served_name: str | None = None
    replicas: int | Literal["auto"] = Field(1)
    max_replicas: int = Field(8, ge=1)
    gpus: float | None = Field(None, ge=0)
    cpus: float = Field(1, ge=0)
    router: str = ROUTER
    api_keys: tuple[str, ...] = ()
    signing_key: str | None = None
    allowed_hosts: tuple[str, ...] = ("*",)
    cors_origins: tuple[str, ...] = ()
    max_concurrent: int = Field(ServerConfig().max_concurrent, ge=1)
    page: bool = True

    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    adapter: str | None = None
    adapters: dict[str, str] | None = None
    kv_memory: int | None = None
    kv_bits: float | str | None = None
    kv_scheme: str | None = None
    kv_disk: str | None = None
    kv_disk_size: int | None = None
    max_context: int | None = None
    max_sequences: int | None = None
    step_ms: float | None = None
    prefix_cache: bool | None = None
    kernels: str | None = None
    threads: int | None = None
    blas: Literal["auto", "openblas", "mlx"] | None = None
    batch_invariant: bool | None = None
    stop_on_loop: int | None = None
    speculate: str | None = None
    dialect: str | None = None
    sampling_defaults: Literal["model", "openai"] | None = None
    allow_special_tokens: bool | None = None
    allow_media_hosts: bool | None = None
    log_level: str = "info"


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
