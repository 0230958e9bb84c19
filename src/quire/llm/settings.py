"""Settings of an `LLM`: those of `quire serve` that mean something without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from quire.core.config import DiskConfig, EngineConfig, ServerConfig
from quire.core.kv_choice import choose_format, offered
from quire.core.kv_format import KVFormat
from quire.core.speculation import Speculation
from quire.demo import NAME, place

_GROUP = 64
"""Elements that share a scale in the uniform scheme."""


class Settings(TypedDict, total=False):
    """What `LLM` takes beside the model; all are optional, and named as `quire serve` names them.

    Attributes:
        dtype: "float32", "float16" or "bfloat16"; by default as `quire serve` chooses.
        adapter: folder or hub id of a LoRA adapter, merged into the weights.
        adapters: folders or hub ids of LoRA adapters by their names; `model=NAME` of a request
            chooses one.
        kv_memory: bytes for KV blocks; by default a share of what is free.
        kv_bits, kv_scheme: how keys and values are stored, as in `--kv-bits 8/4`.
        kv_disk: folder where evicted KV blocks go.
        kv_disk_size: bytes that they may take there.
        max_context: tokens of prompt and answer together.
        max_sequences: that run at once; others wait.
        step_ms: time aimed at for a step that only reads prompts.
        prefix_cache: whether prompts share what they begin with; default: true.
        kernels, threads, blas: how a CPU is used.
        batch_invariant: logits have the same bits alone and in any batch.
        stop_on_loop: repeats of a cycle of tokens that end an answer; 0 is never.
        speculate: what guesses tokens, several of which a step verifies.
        dialect: how answers spell reasoning and tool calls; by default by the model.
        sampling_defaults: whose defaults hold, the model's or OpenAI's.
        allow_special_tokens: control tokens spelled in messages become tokens.
        allow_media_hosts: whether http(s) URLs in messages are fetched.
        log_level: of the engine's process; default: "warning".
    """

    dtype: Literal["float32", "float16", "bfloat16"]
    adapter: str
    adapters: Mapping[str, str]
    kv_memory: int
    kv_bits: float | str
    kv_scheme: str
    kv_disk: str | Path
    kv_disk_size: int
    max_context: int
    max_sequences: int
    step_ms: float
    prefix_cache: bool
    kernels: str
    threads: int
    blas: Literal["auto", "openblas", "mlx"]
    batch_invariant: bool
    stop_on_loop: int
    speculate: Speculation
    dialect: str
    sampling_defaults: Literal["model", "openai"]
    allow_special_tokens: bool
    allow_media_hosts: bool
    log_level: str


_ENGINE = frozenset(
    {
        *("dtype", "adapter", "kv_memory", "max_context", "max_sequences", "step_ms"),
        *("prefix_cache", "kernels", "threads", "blas", "batch_invariant", "stop_on_loop"),
        "speculate",
    }
)
_SERVING = frozenset(
    {"dialect", "sampling_defaults", "allow_special_tokens", "allow_media_hosts", "log_level"}
)
_OWN = frozenset({"adapters", "kv_bits", "kv_scheme", "kv_disk", "kv_disk_size"})


def configured(
    model: str | Path | None, settings: Mapping[str, Any]
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configuration of a model's engine, and of what stands before it.

    Raises:
        TypeError: a setting is unknown.
        RequestError: no such KV format is offered.
    """
    if unknown := settings.keys() - _ENGINE - _SERVING - _OWN:
        raise TypeError(f"LLM() has no setting {min(unknown)!r}; see quire.llm.Settings")
    given = {name: value for name, value in settings.items() if value is not None}
    engine = EngineConfig(
        place(None if model is None else str(Path(model)) if isinstance(model, Path) else model),
        kv_format=_kv_format(given),
        disk=_disk(given),
        adapters=tuple(given.get("adapters", {}).items()),
        **{name: value for name, value in given.items() if name in _ENGINE},
    )
    serving = {name: value for name, value in given.items() if name in _SERVING}
    serving["adapters"] = tuple(given.get("adapters", {}))
    serving.setdefault("log_level", "warning")
    name = NAME if not model else str(model)
    return engine, ServerConfig(served_name=name, max_messages=1 << 20, **serving)


def _kv_format(given: Mapping[str, Any]) -> KVFormat:
    names = [each.name for each in offered(EngineConfig("").block_size, _GROUP)]
    return choose_format(names, given.get("kv_bits"), given.get("kv_scheme")) or KVFormat()


def _disk(given: Mapping[str, Any]) -> DiskConfig | None:
    if "kv_disk" not in given:
        return None
    return DiskConfig(str(given["kv_disk"]), given.get("kv_disk_size", 20 * 10**9))
