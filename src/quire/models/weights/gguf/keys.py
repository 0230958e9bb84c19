"""Readers of GGUF keys that several architectures share."""

from __future__ import annotations

from typing import Any

from quire.core.errors import ModelError
from quire.models.settings import FULL, SLIDING
from quire.models.weights.gguf.file import GGUF

Config = dict[str, Any]


def layers(gguf: GGUF) -> int:
    """Return the number of layers, without those for multi-token prediction."""
    count = int(gguf.need("block_count"))
    if count > len(gguf.tensors):
        raise ModelError(
            f"{gguf.files[0]}: {gguf.architecture}.block_count = {count} for "
            f"{len(gguf.tensors)} tensors"
        )
    return count - int(gguf.get("nextn_predict_layers", 0))


def all_of(gguf: GGUF, key: str, default: Any = None) -> list[Any]:
    """Return the values of a key that may have one value per layer."""
    value = gguf.get(key, default) if default is not None else gguf.need(key)
    return value if isinstance(value, list) else [value]


def one_of(gguf: GGUF, key: str, default: Any = None) -> Any:
    """Return the value of a key that must be equal in all layers."""
    values = all_of(gguf, key, default)
    if len(set(values)) > 1:
        raise ModelError(
            f"{gguf.files[0]}: {key} = {values!r}: only one value for all layers is supported"
        )
    return values[0]


def has(gguf: GGUF, name: str) -> bool:
    return any(f"blk.{layer}.{name}" in gguf.tensors for layer in range(layers(gguf)))


def window(gguf: GGUF) -> Config:
    return {"sliding_window": gguf.get("attention.sliding_window") or None}


def layer_types(gguf: GGUF, every: int) -> Config:
    """Return layer types: unless the file lists them, all but each `every`-th have a window."""
    pattern = gguf.get("attention.sliding_window_pattern", every)
    count, window = layers(gguf), gguf.get("attention.sliding_window")
    if not isinstance(pattern, list):
        pattern = [bool((index + 1) % pattern) for index in range(count)]
    types = [SLIDING if slides and window else FULL for slides in pattern[:count]]
    return {"sliding_window": window or None, "layer_types": types}


def experts(gguf: GGUF, count: str = "num_experts") -> Config:
    width = gguf.get("expert_feed_forward_length", gguf.get("feed_forward_length"))
    return {
        count: gguf.need("expert_count"),
        "num_experts_per_tok": gguf.need("expert_used_count"),
        "moe_intermediate_size": width,
    }


def routed(gguf: GGUF) -> Config:
    """Return the keys of DeepSeek's mixture of experts and its successors'."""
    return experts(gguf, "n_routed_experts") | {
        "n_shared_experts": gguf.get("expert_shared_count", 0),
        "routed_scaling_factor": gguf.get("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": gguf.get("expert_weights_norm", False),
        "first_k_dense_replace": gguf.get("leading_dense_block_count", 0),
        "n_group": gguf.get("expert_group_count", 1) or 1,
        "topk_group": gguf.get("expert_group_used_count", 1) or 1,
        "num_nextn_predict_layers": gguf.get("nextn_predict_layers", 0),
    }
