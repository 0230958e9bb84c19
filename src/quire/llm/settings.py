"""Settings of an `LLM`: the settings of `quire serve` that apply without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from quire.core.config import DiskConfig, EngineConfig, ServerConfig
from quire.core.kv_choice import choose_format, offered
from quire.core.kv_format import KVFormat
from quire.core.speculation import speculation_of
from quire.demo import NAME, place


class Settings(TypedDict, total=False):
    """Settings of `LLM`, all optional. They have the names of `quire serve`'s options.

    Attributes:
        dtype: "float32", "float16" or "bfloat16"; the default depends on the device.
        adapter: folder or hub id of a LoRA adapter, merged into the weights.
        adapters: folders or hub ids of LoRA adapters by name; a request chooses one by
            `model=NAME`.
        kv_memory: bytes for KV blocks; by default a share of free memory.
        kv_bits, kv_scheme: KV format, as in `--kv-bits 8/4`.
        kv_group_size: elements that share a scale in the uniform scheme: 64 or 32.
        kv_skip_layers: layers that packed formats leave plain, by index; default: the last
            full-attention layer.
        kv_disk: folder for evicted KV blocks.
        kv_disk_size: the most bytes of evicted KV blocks.
        max_context: the most tokens of prompt and answer together.
        max_sequences: the most sequences that run at once; others wait.
        step_ms: target time in milliseconds of a step that only reads prompts.
        prefix_cache: whether prompts share common prefixes; default: true.
        kernels, threads, blas: CPU kernels, threads, and library for matrix products.
        batch_invariant: whether logits are bitwise equal alone and in any batch.
        stop_on_loop: number of repetitions of a cycle of tokens that end an answer; 0 means never.
        speculate: the drafter of speculative decoding: "auto", "off", "ngram", "mtp", or
            "draft=MODEL" with a folder or hub id.
        dialect: notation of reasoning and tool calls; by default chosen by the model.
        sampling_defaults: whether the model's or OpenAI's sampling defaults apply.
        allow_special_tokens: whether control tokens spelled in messages become tokens.
        allow_media_hosts: whether http(s) URLs in messages are fetched.
        log_level: log level of the engine's process; default: "warning".
    """

    dtype: Literal["float32", "float16", "bfloat16"]
    adapter: str
    adapters: Mapping[str, str]
    kv_memory: int
    kv_bits: float | str
    kv_scheme: str
    kv_group_size: Literal[64, 32]
    kv_skip_layers: tuple[int, ...]
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
    speculate: str
    dialect: str
    sampling_defaults: Literal["model", "openai"]
    allow_special_tokens: bool
    allow_media_hosts: bool
    log_level: str


_ENGINE = frozenset(
    {
        *("dtype", "adapter", "kv_memory", "max_context", "max_sequences", "step_ms"),
        *(
            "kv_skip_layers",
            "prefix_cache",
            "kernels",
            "threads",
            "blas",
            "batch_invariant",
            "stop_on_loop",
        ),
    }
)
_SERVING = frozenset(
    {"dialect", "sampling_defaults", "allow_special_tokens", "allow_media_hosts", "log_level"}
)
_OWN = frozenset(
    {
        *("adapters", "kv_bits", "kv_scheme", "kv_group_size", "kv_disk", "kv_disk_size"),
        "speculate",
    }
)


def configured(
    model: str | Path | None, settings: Mapping[str, Any]
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of a model's engine and of the serving side.

    Raises:
        TypeError: a setting is unknown.
        RequestError: the KV format does not exist.
        ValueError: `speculate` is no mode.
    """
    if unknown := settings.keys() - _ENGINE - _SERVING - _OWN:
        raise TypeError(f"LLM() has no setting {min(unknown)!r}; see quire.llm.Settings")
    given = {name: value for name, value in settings.items() if value is not None}
    speculate, draft_model = speculation_of(given.get("speculate", "auto"))
    engine = EngineConfig(
        place(None if model is None else str(Path(model)) if isinstance(model, Path) else model),
        kv_format=_kv_format(given),
        disk=_disk(given),
        adapters=tuple(given.get("adapters", {}).items()),
        speculate=speculate,
        draft_model=draft_model,
        **{name: value for name, value in given.items() if name in _ENGINE},
    )
    serving = {name: value for name, value in given.items() if name in _SERVING}
    serving["adapters"] = tuple(given.get("adapters", {}))
    serving.setdefault("log_level", "warning")
    name = NAME if not model else str(model)
    return engine, ServerConfig(served_name=name, max_messages=1 << 20, **serving)


def _kv_format(given: Mapping[str, Any]) -> KVFormat:
    size = given.get("kv_group_size", 64)
    names = [each.name for each in offered(EngineConfig("").block_size, size)]
    return choose_format(names, given.get("kv_bits"), given.get("kv_scheme")) or KVFormat()


def _disk(given: Mapping[str, Any]) -> DiskConfig | None:
    if "kv_disk" not in given:
        return None
    return DiskConfig(str(given["kv_disk"]), given.get("kv_disk_size", 20 * 10**9))
