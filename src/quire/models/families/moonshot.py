"""Kimi Linear (arXiv:2510.26692): delta nets that forget by channel, and latents without order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Mixer
from quire.models.families.common import (
    CORRECTION,
    Family,
    by_type,
    decoder,
    dense_by_type,
    mlp,
    rms,
    sigmoid_mixture,
    with_dense,
)
from quire.models.families.deepseek import latent_attention
from quire.models.kimi_delta import KimiDelta
from quire.models.latent_attention import LatentAttention
from quire.models.names import Names, Weights
from quire.models.settings import FULL, Settings

LINEAR = "linear_attention"

_KEYS = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
}
"""The publisher's names of what others call so."""


def kimi_linear(s: Settings) -> LanguageModel:
    s.only("mla_use_nope", True)
    s.only("moe_layer_freq", 1)
    s.only("use_grouped_topk", True)
    s.only("hidden_act", "silu")
    s = s.filled(**{ours: s.value(key) for key, ours in _KEYS.items() if s.has(key)})
    s = s.filled(rms_norm_eps=1e-5, routed_scaling_factor=2.446, n_shared_experts=1)
    s = s.filled(num_experts_per_tok=8)
    latents = replace(
        latent_attention(s.changed(rope_scaling=None, rope_parameters=None)), rope=None
    )
    mixers: dict[str, Mixer] = {FULL: latents, LINEAR: _delta(s)}
    layers = by_type(_types(s), mixers, sigmoid_mixture(s))
    first = s.integer("first_k_dense_replace", default=1, minimum=0)
    names = Names(
        renamed=CORRECTION
        | {
            "block_sparse_moe": "mlp",
            "shared_experts": "shared_expert",
            "w1": "gate_proj",
            "w2": "down_proj",
            "w3": "up_proj",
        },
        unused=("mtp.",),
        prepare=partial(_prepared, latents=latents),
    )
    return decoder(s, with_dense(layers, mlp(s, bias=False), dense_by_type(s, first)), names)


def _delta(s: Settings) -> KimiDelta:
    own = s.nested("linear_attn_config", needed=False)
    return KimiDelta(
        heads=own.integer("num_heads", default=s.integer("linear_num_heads", default=32)),
        head_dim=own.integer("head_dim", default=s.integer("linear_head_dim", default=128)),
        kernel=own.integer(
            "short_conv_kernel_size", default=s.integer("linear_conv_kernel_dim", default=4)
        ),
        eps=rms(s).eps,
    )


def _types(s: Settings) -> tuple[str, ...]:
    """What mixes tokens in each layer.

    Raises:
        ModelError: the lists of `linear_attn_config`, which count from one, do not name each layer
            once.
    """
    count, own = s.integer("num_hidden_layers"), s.nested("linear_attn_config", needed=False)
    usual = [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
    full, linear = own.integers("full_attn_layers"), own.integers("kda_layers")
    if full or linear:
        if sorted(full + linear) != list(range(1, count + 1)):
            raise own.error("kda_layers", f"which with full_attn_layers is not 1 to {count}")
        usual = [FULL if index + 1 in full else LINEAR for index in range(count)]
    return s.layer_types(usual, (FULL, LINEAR))


def _prepared(weights: Weights, latents: LatentAttention) -> Weights:
    """The three convolutions of a layer in one, channels last; rates and biases on one axis."""
    ready: Weights = {}
    for name, array in weights.items():
        path, _, part = name.partition(".self_attn.")
        part = part.removeprefix("forget_gate.")  # transformers'
        if part in ("A_log", "dt_bias"):
            array = array.flatten()
        elif part.endswith(("conv1d.weight", "_conv.conv.weight")):
            array = array if array.shape[-1] == 1 else array.swapaxes(-1, -2)
            part = part.replace("_conv.conv.", "_conv1d.")
        ready[f"{path}.self_attn.{part}" if part else name] = array
    for name in [name for name in ready if name.endswith(".self_attn.q_conv1d.weight")]:
        path = name.removesuffix("q_conv1d.weight")
        parts = [f"{path}{each}_conv1d.weight" for each in "qkv"]
        if all(part in ready for part in parts):
            ready[f"{path}conv1d.weight"] = mx.concatenate([ready.pop(part) for part in parts])
    return latents.absorbed(ready)


def _context(s: Settings) -> int:
    return s.integer("model_max_length", "max_position_embeddings", default=1 << 20)


FAMILIES = (Family("kimi_linear", "Kimi Linear", kimi_linear, _context),)
