"""Falcon-H1 (arXiv:2507.22448): each layer has attention and a state space layer in parallel."""

from __future__ import annotations

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Layer
from quire.models.families.common import Family, attention, channels_last, decoder, mlp, rms
from quire.models.families.mamba import hybrid_mamba2
from quire.models.layers.mamba2 import Mamba2
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights

_PARTS = {
    "feed_forward": "mlp",
    "pre_ff_layernorm": "post_attention_layernorm",
    "final_layernorm": "norm",
}

Factors = dict[str, float | mx.array]
"""Factors of matrices by module name: a number, or one per row, `[rows, 1]`."""


def falcon_h1(s: Settings) -> LanguageModel:
    for bias in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        s.only(bias, False)  # multipliers apply to matrices, not to biases
    s = s.filled(mamba_d_ssm=1024, rms_norm_eps=1e-5)
    state_space = hybrid_mamba2(
        s,
        eps=rms(s).eps if s.flag("mamba_rms_norm", default=False) else None,
        norm_first=s.flag("mamba_norm_before_gate", default=True),
    )
    usual = attention(s)
    # Keys are multiplied before they are rotated, which is as good as multiplying the logits.
    usual = attention(s, scale=usual.scale * s.number("key_multiplier", default=1.0))
    layers = (Layer((state_space, usual), mlp(s)),) * s.integer("num_hidden_layers")
    factors = _factors(s, state_space)
    tied = s.flag("tie_word_embeddings", default=False)
    head = s.number("lm_head_multiplier", default=1.0)
    if not tied:
        factors["lm_head"] = head
    names = Names(
        renamed=_PARTS,
        unused=("lm_head.",) if tied else (),
        prepare=lambda weights: _multiplied(weights, factors),
    )
    # A tied head reads a table that was multiplied for the embedding.
    undone = head / s.positive("embedding_multiplier", default=1.0) if tied else 1.0
    return decoder(s, layers, names, head_multiplier=undone)


def _factors(s: Settings, state_space: Mamba2) -> Factors:
    gate, down = s.numbers("mlp_multipliers", (1.0, 1.0))
    inner = s.numbers("ssm_multipliers", (1.0,) * 5)
    groups = state_space.groups * state_space.state_dim
    rows = (state_space.width, state_space.width, groups, groups, state_space.heads)
    by_row = [mx.full((n, 1), each) for n, each in zip(rows, inner, strict=True)]
    into = s.number("attention_in_multiplier", default=1.0)
    return {
        "embed_tokens": s.number("embedding_multiplier", default=1.0),
        "q_proj": into,
        "k_proj": into,
        "v_proj": into,
        "o_proj": s.number("attention_out_multiplier", default=1.0),
        "in_proj": mx.concatenate(by_row) * s.number("ssm_in_multiplier", default=1.0),
        "out_proj": s.number("ssm_out_multiplier", default=1.0),
        "gate_proj": gate,
        "down_proj": down,
    }


def _multiplied(weights: Weights, factors: Factors) -> Weights:
    """Multiply matrices by the model's multipliers. Conversions to MLX lack only the values'
    factor.
    """
    converted = any(
        name.endswith(".conv1d.weight") and array.shape[-1] == 1 for name, array in weights.items()
    )
    missing = {"v_proj": factors["v_proj"]} if converted else factors

    def multiplied(name: str, array: mx.array) -> mx.array:
        *_, module, kind = name.split(".")
        packed = kind == "weight" and not mx.issubdtype(array.dtype, mx.floating)
        if module not in missing or kind not in ("weight", "scales", "biases") or packed:
            return array
        return (array * missing[module]).astype(array.dtype)

    return channels_last({name: multiplied(name, array) for name, array in weights.items()})


FAMILIES = (Family("falcon_h1", "Falcon-H1", falcon_h1),)
