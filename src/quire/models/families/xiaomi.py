"""MiMo (arXiv:2505.07608), MiMo V2 Flash (arXiv:2601.02780) and MiMo V2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Layer, Mixer
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    by_type,
    decoder,
    dense_by_type,
    head_names,
    mlp,
    rms,
    sigmoid_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention
from quire.models.layers.rope import RopeParameters
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names, Weights

_HEADS = 3
"""Most layers for multi-token prediction; `config.json` does not say how many there are."""


def mimo(s: Settings) -> LanguageModel:
    """Build MiMo 7B. Its layers for multi-token prediction are left out."""
    s.only("use_sliding_window", False)
    usual = attention(s, qkv_bias=True, out_bias=False)
    layers = uniform_layers(s, usual, mlp(s, bias=False))
    return decoder(s, layers, Names(unused=("mtp_layers.",)))


def mimo_v2_flash(s: Settings) -> LanguageModel:
    """Build MiMo V2 Flash, whose sliding layers have sinks and twice as many KV heads as
    full ones.
    """
    return _mimo_v2(s)


def mimo_v2(s: Settings) -> LanguageModel:
    """Build MiMo V2 for text: MiMo V2 Flash with joined projections. Its encoders are left out."""
    s.only("attention_projection_layout", "fused_qkv", "split")
    return _mimo_v2(s, ("visual.", "vision_tower.", "audio_encoder.", "speech_embeddings."))


def _mimo_v2(s: Settings, encoders: tuple[str, ...] = ()) -> LanguageModel:
    """Build the decoder. Tensors whose names begin as `encoders` are dropped."""
    s = _renamed(s)
    norm, count = rms(s, 1e-5), s.integer("num_hidden_layers")
    full = _attention(s)
    every = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    sliding, types = _sliding(s, full), s.layer_types(every)
    mixers: dict[str, Mixer] = {FULL: full, SLIDING: sliding}
    experts = by_type(types, mixers, sigmoid_mixture(s))
    names = Names(
        renamed=EXPERT_PARTS
        | {"attention_sink_bias": "sinks", "pre_mlp_layernorm": "post_attention_layernorm"},
        unused=("mtp.", *encoders),
        prepare=partial(_split, kinds=[full if kind == FULL else sliding for kind in types]),
        heads=tuple(
            head_names(f"mtp.layers.{number}.", norm="final_layernorm") for number in range(_HEADS)
        ),
    )
    ahead = Layer((sliding,), mlp(s, bias=False))
    layers = with_dense(experts, mlp(s, bias=False), dense_by_type(s, 1))
    return decoder(s, layers, names, norm=norm, ahead=ahead)


_JOINED = re.compile(r"(.*\blayers\.(\d+)\.self_attn\.)qkv_proj\.(\w+)")


def _split(weights: Weights, kinds: Sequence[Attention]) -> Weights:
    """Split joined projections. Those in FP8 are joined for each rank by itself, of which there are
    as many as full layers have KV heads; layers that guess several tokens ahead slide.
    """
    ready: Weights = {}
    sliding = next((kind for kind in kinds if kind.window is not None), kinds[0])
    ranks = min(kind.kv_heads for kind in kinds)
    for name, array in weights.items():
        if (match := _JOINED.fullmatch(name)) is None:
            ready[name] = array
            continue
        path, number, suffix = match.groups()
        kind = sliding if ".mtp." in path else kinds[int(number)]
        scales = weights.get(f"{path}qkv_proj.scales")
        packed = f"{path}qkv_proj.biases" in weights
        parts = 1 if scales is None or packed else ranks
        of_rank = array.reshape(parts, -1, *array.shape[1:])
        widths = (
            kind.heads * kind.head_dim,
            kind.kv_heads * kind.head_dim,
            kind.kv_heads * (kind.value_dim or kind.head_dim),
        )
        ends = [sum(widths[:end]) // parts for end in (1, 2)]
        for part, each in zip("qkv", mx.split(of_rank, ends, axis=1), strict=True):
            ready[f"{path}{part}_proj.{suffix}"] = each.flatten(0, 1)
    return ready


def _renamed(s: Settings) -> Settings:
    """Translate the published file's keys to transformers' keys."""
    pattern, blocks = s.integers("hybrid_layer_pattern"), s.value("moe_layer_freq")
    if pattern:
        s = s.filled(layer_types=[SLIDING if each == 1 else FULL for each in pattern])
    if isinstance(blocks, list):
        s = s.filled(mlp_layer_types=["sparse" if each == 1 else "dense" for each in blocks])
    else:
        s.only("moe_layer_freq", [])
    if s.has("layernorm_epsilon"):
        s = s.filled(rms_norm_eps=s.number("layernorm_epsilon"))
    s.has("attention_chunk_size")  # the window again, which the published code does not read
    if s.has("sliding_window_size"):  # of tokens before the query
        s = s.changed(sliding_window=s.integer("sliding_window_size") + 1)
    return s.filled(head_dim=192, v_head_dim=128, num_key_value_heads=4, num_experts_per_tok=8)


def _attention(s: Settings) -> Attention:
    """Return the attention of full layers."""
    rope, _ = _rotations(s)
    scale = s.number(
        "attention_value_scale", default=1.0 if s.null("attention_value_scale") else 0.707
    )
    return attention(
        s,
        rope=rope,
        out_bias=False,
        value_dim=s.integer("v_head_dim"),
        value_scale=scale,
        sinks=s.flag("add_full_attention_sink_bias", default=False),
    )


def _sliding(s: Settings, full: Attention) -> Attention:
    _, rope = _rotations(s)
    head_dim = s.integer("swa_head_dim", default=full.head_dim)
    return replace(
        full,
        heads=s.integer("swa_num_attention_heads", default=full.heads),
        kv_heads=s.integer("swa_num_key_value_heads", default=2 * full.kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        value_dim=s.integer("swa_v_head_dim", default=full.value_dim),
        rope=rope,
        window=s.window(129),
        sinks=s.flag("add_swa_attention_sink_bias", default=True),
    )


def _rotations(s: Settings) -> tuple[RopeParameters, RopeParameters]:
    """Return the rotations of full and of sliding layers."""
    partial = s.number("partial_rotary_factor", default=0.334)
    return s.rope_by_type(5e6, s.number("swa_rope_theta", default=1e4), partial)


FAMILIES = (
    Family("mimo", "MiMo 7B", mimo),
    Family("mimo_v2", "MiMo V2, text", mimo_v2),
    Family("mimo_v2_flash", "MiMo V2 Flash", mimo_v2_flash),
)
