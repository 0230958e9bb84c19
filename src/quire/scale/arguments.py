"""Arguments of Quire as an application of Ray Serve. This needs no Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.core.config import ServerConfig
from quire.demo import NAME

ROUTER = "quire.scale.router:PrefixRouter"


def _listed(value: Any) -> Any:
    """Split numbers that stand in a text, with commas between."""
    return value.split(",") if isinstance(value, str) else value


class Arguments(BaseModel):
    """Arguments of `app`. Names shared with `quire serve` have the same meaning.

    Attributes:
        model: a folder at the same path on all machines, a hub id, or quire-demo.
        replicas: number of engines; auto lets Ray start and end them by load.
        max_replicas: the most replicas with auto.
        upscale_delay_s: with auto, seconds that load must last before a replica is started.
        downscale_delay_s: with auto, seconds that load must be lower before a replica is ended.
        gpus: GPUs of a replica; by default 1 if the cluster has any.
        cpus: CPUs that a replica reserves from Ray.
        router: chooses replicas; a subclass of `quire.scale.router.Addressed`, as `module:class`.
        allowed_hosts: names by which clients reach the ingress; * for any.
        signing_key: signs the reasoning that clients send back; by default each ingress has its
            own.
        dtype and all below: as in `quire.llm.Settings`; several numbers may be a text: "5,11".
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = NAME
    served_name: str | None = None
    replicas: int | Literal["auto"] = Field(1)
    max_replicas: int = Field(8, ge=1)
    upscale_delay_s: float = Field(30, ge=0)
    downscale_delay_s: float = Field(600, ge=0)
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
    kv_group_size: Annotated[Literal[64, 32], BeforeValidator(int)] | None = None
    kv_skip_layers: Annotated[tuple[int, ...], BeforeValidator(_listed)] | None = None
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
