"""Reads a GGUF file's rotary settings into `rope_parameters`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.errors import ModelError
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import all_of
from quire.models.weights.gguf.tensors import lazy_rows

_YARN = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}


def rope_parameters(gguf: GGUF, theta: float = 10000.0) -> dict[str, Any]:
    """Return the rotary parameters of all layers, or of those without a window.

    Args:
        theta: default theta.

    Raises:
        ModelError: the scaling is not supported.
    """
    base = {"rope_theta": gguf.get("rope.freq_base", theta)} | _share(gguf)
    if "rope_freqs.weight" in gguf.tensors or "rope_factors_long.weight" in gguf.tensors:
        return base | _by_pair(gguf)
    kind = gguf.get("rope.scaling.type", "none")
    factor = gguf.get("rope.scaling.factor", gguf.get("rope.scale_linear", 1.0)) or 1.0
    if kind == "yarn":
        return base | _yarn(gguf) | {"factor": factor}
    if kind in ("none", "linear", "longrope"):
        return base | ({"rope_type": "default"} if factor == 1 else _linear(kind, factor))
    raise ModelError(f"{gguf.files[0]}: rope.scaling.type = {kind!r} is not supported")


def proportional(gguf: GGUF) -> dict[str, Any]:
    """Return the parameters of Gemma 4's full layers: pairs with factor one are rotated, the others
    are not.
    """
    gguf.tensor("rope_freqs.weight")
    factors = _numbers(lazy_rows(gguf)["rope_freqs.weight"])
    return {
        "rope_type": "proportional",
        "rope_theta": gguf.need("rope.freq_base"),
        "partial_rotary_factor": sum(factor == 1 for factor in factors) / len(factors),
    }


def _linear(kind: str, factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor} if kind != "none" else {"rope_type": "default"}


def _share(gguf: GGUF) -> dict[str, Any]:
    """Return the rotated share of a head; for latent attention, that of its rotated part."""
    rotated = gguf.get("rope.dimension_count")
    if rotated is None or gguf.get("attention.kv_lora_rank"):
        return {}
    heads = max(all_of(gguf, "attention.head_count")) or 1
    head = gguf.get("attention.key_length") or gguf.need("embedding_length") // heads or 1
    return {"partial_rotary_factor": rotated / head}


def _yarn(gguf: GGUF) -> dict[str, Any]:
    """Return YaRN's parameters; the file stores the multiplier of its logarithm times 0.1."""
    trained = gguf.get("rope.scaling.original_context_length", gguf.need("context_length"))
    given = {name: gguf.get(key) for name, key in _YARN.items() if gguf.get(key) is not None}
    multiplier = gguf.get("rope.scaling.yarn_log_multiplier")
    if multiplier:
        given |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier / 0.1, 6))
    return {"rope_type": "yarn", "original_max_position_embeddings": trained} | given


def _by_pair(gguf: GGUF) -> dict[str, Any]:
    """Return a factor per pair: LongRoPE's two lists, or Llama 3's scaling as factors."""
    longest = gguf.need("context_length")
    trained = gguf.get("rope.scaling.original_context_length", longest)
    given = lazy_rows(gguf)
    one = given.get("rope_freqs.weight")
    long, short = (given.get(f"rope_factors_{which}.weight", one) for which in ("long", "short"))
    if long is None or short is None:
        raise ModelError(f"{gguf.files[0]}: of rope_factors_long and _short one is missing")
    factors = {"long_factor": _numbers(long), "short_factor": _numbers(short)}
    scaling = {"attention_factor": gguf.get("rope.scaling.attn_factor", 1.0)}
    return {
        "rope_type": "longrope",
        "factor": longest / trained,
        "original_max_position_embeddings": trained,
        **factors,
        **scaling,
    }


def _numbers(factors: mx.array) -> list[float]:
    listed: list[float] = np.array(factors.astype(mx.float32)).tolist()
    return listed
