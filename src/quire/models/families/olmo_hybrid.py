"""OLMo Hybrid: each three layers with a gated delta net are followed by one with attention."""

from __future__ import annotations

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Layer, NormPlacement
from quire.models.families.common import (
    Family,
    attention,
    channels_last,
    decoder,
    mlp,
    rms,
)
from quire.models.layers.attention import Over, QKNorm
from quire.models.layers.gated_delta import GatedDelta
from quire.models.settings import FULL, LINEAR, Settings
from quire.models.weights.names import Names, Weights
from quire.models.weights.quantization import unpacked


def olmo_hybrid(s: Settings) -> LanguageModel:
    """Build OLMo Hybrid, with norms before the blocks of delta nets and after those of
    attention.
    """
    s.only("hidden_act", "silu")
    norm, count = rms(s), s.integer("num_hidden_layers")
    usually = [FULL if index % 4 == 3 else LINEAR for index in range(count)]
    if FULL not in usually:
        usually[-1] = FULL
    unrotated = s.scaling().null("rope_theta") or s.null("rope_theta")
    full = attention(s, rope=None if unrotated else s.rope(), qk_norm=QKNorm(norm, Over.ALL_HEADS))
    block = mlp(s, bias=False)
    layers = {
        FULL: Layer((full,), block, NormPlacement.POST),
        LINEAR: Layer((_delta(s),), block, NormPlacement.PRE),
    }
    types = s.layer_types(usually, layers)
    hidden = s.integer("hidden_size")
    names = Names(renamed=_PARTS, prepare=lambda weights: _joined(weights, hidden))
    return decoder(s, tuple(layers[kind] for kind in types), names, norm=norm)


def _delta(s: Settings) -> GatedDelta:
    heads = s.integer("num_attention_heads")
    key_heads = s.integer("linear_num_key_heads", default=heads)
    dim = int(0.75 * s.integer("hidden_size") / key_heads)
    key_dim = s.integer("linear_key_head_dim", default=dim)
    return GatedDelta(
        key_heads=key_heads,
        value_heads=s.integer("linear_num_value_heads", default=heads),
        key_dim=key_dim,
        value_dim=s.integer("linear_value_head_dim", default=2 * key_dim),
        kernel=s.integer("linear_conv_kernel_dim", default=4),
        eps=s.number("layer_norm_epsilon", default=1e-5, minimum=0.0),
        most_correction=2.0 if s.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


_PARTS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "linear_attn.a_proj": "linear_attn.in_proj_a",
    "linear_attn.b_proj": "linear_attn.in_proj_b",
    "linear_attn.g_proj": "linear_attn.in_proj_z",
    "linear_attn.o_norm": "linear_attn.norm",
    "linear_attn.o_proj": "linear_attn.out_proj",
}


def _joined(weights: Weights, hidden: int) -> Weights:
    """Fuse queries, keys and values of a gated delta net into one matrix and one convolution."""
    ready = channels_last(
        {_conv(name): array for name, array in weights.items()}  # `.q.conv1d.weight`
    )
    for name in [name for name in ready if name.endswith("linear_attn.q_proj.weight")]:
        path = name.removesuffix(".q_proj.weight")
        singles = [f"{path}.{part}_proj" for part in "qkv"]
        kinds = [kind for kind in _KINDS if f"{singles[0]}.{kind}" in ready]
        if not _alike(ready, singles, kinds):
            for single in singles:
                ready[f"{single}.weight"] = unpacked(ready, single, hidden)
            kinds = ["weight"]
        for kind in kinds:
            parts = [ready.pop(f"{single}.{kind}") for single in singles]
            ready[f"{path}.in_proj_qkv.{kind}"] = mx.concatenate(parts)
        parts = [ready.pop(f"{path}.{part}.conv1d.weight") for part in "qkv"]
        ready[f"{path}.conv1d.weight"] = mx.concatenate(parts)
    return ready


_KINDS = ("weight", "scales", "biases")


def _conv(name: str) -> str:
    for part in "qkv":
        name = name.replace(f".{part}_conv1d.", f".{part}.conv1d.")
    return name


def _alike(weights: Weights, paths: list[str], kinds: list[str]) -> bool:
    """Return whether all matrices are quantised in the same way, or none is."""
    for kind in kinds:
        arrays = [weights.get(f"{path}.{kind}") for path in paths]
        if len({None if each is None else (each.dtype, *each.shape[1:]) for each in arrays}) > 1:
            return False
    return True


FAMILIES = (Family("olmo_hybrid", "OLMo Hybrid", olmo_hybrid),)
