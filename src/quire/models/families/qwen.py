"""Qwen2 (arXiv:2407.10671), Qwen3 (arXiv:2505.09388) and Qwen3.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import FeedForward, Layer, Mixer
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    full_every,
    mlp,
    rms,
    softmax_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention, QKNorm
from quire.models.layers.gated_delta import GatedDelta
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import FULL, LINEAR, SLIDING, Settings
from quire.models.weights.names import HeadNames, Names, Weights


def qwen2(s: Settings) -> LanguageModel:
    return decoder(s, qwen2_layers(s))


def qwen2_layers(s: Settings) -> tuple[Layer, ...]:
    usual = attention(s, qkv_bias=True, out_bias=False)
    return _windowed(s, usual, mlp(s, bias=False), sliding=_behind(s))


def qwen2_moe(s: Settings) -> LanguageModel:
    usual = attention(s, qkv_bias=s.flag("qkv_bias", default=True), out_bias=False)
    experts = softmax_mixture(
        s, shared_width=s.integer("shared_expert_intermediate_size", minimum=0), shared_gate=True
    )
    last = s.integer("max_window_layers", default=28, minimum=0)
    layers = _windowed(s, usual, experts, sliding=lambda index: index % 2 == 0 and index < last)
    return decoder(s, _with_dense(s, layers))


def qwen3(s: Settings) -> LanguageModel:
    return decoder(s, qwen3_layers(s))


def qwen3_layers(s: Settings) -> tuple[Layer, ...]:
    return _windowed(
        s, attention(s, qk_norm=QKNorm(rms(s))), mlp(s, bias=False), sliding=_behind(s)
    )


def qwen3_moe(s: Settings) -> LanguageModel:
    return decoder(s, qwen3_moe_layers(s))


def qwen3_moe_layers(s: Settings) -> tuple[Layer, ...]:
    # If there is a window, all layers have it: `max_window_layers` has no effect.
    usual = attention(s, qk_norm=QKNorm(rms(s)), window=_window(s))
    return _with_dense(s, uniform_layers(s, usual, softmax_mixture(s)))


def _window(s: Settings) -> int | None:
    return s.window(4096) if s.flag("use_sliding_window", default=False) else None


def _behind(s: Settings) -> Callable[[int], bool]:
    """Return a test of whether a layer's index is at least `max_window_layers`."""
    first = s.integer("max_window_layers", default=28, minimum=0)
    return lambda index: index >= first


def _windowed(
    s: Settings, usual: Attention, block: FeedForward, sliding: Callable[[int], bool]
) -> tuple[Layer, ...]:
    """Return layers, with a window if there is one, by `layer_types` or else by `sliding`."""
    count, window = s.integer("num_hidden_layers"), _window(s)
    usually = [SLIDING if window and sliding(index) else FULL for index in range(count)]
    types = s.layer_types(usually)
    mixers: dict[str, Mixer] = {FULL: usual, SLIDING: replace(usual, window=window)}
    return by_type(types, mixers, block)


def _with_dense(s: Settings, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the layers with dense blocks where the configuration asks for them."""
    every, listed = s.integer("decoder_sparse_step", default=1), s.integers("mlp_only_layers")
    dense = mlp(s, bias=False)
    return with_dense(layers, dense, lambda i: i in listed or (i + 1) % every != 0)


_MTP = HeadNames(
    "mtp.layers.0.",
    {
        "mtp.fc": "fc",
        "mtp.pre_fc_norm_embedding": "embedding_norm",
        "mtp.pre_fc_norm_hidden": "hidden_norm",
        "mtp.norm": "norm",
    },
)


def qwen3_5(s: Settings) -> LanguageModel:
    names = replace(QWEN3_5_NAMES, unused=("visual.", "mtp."))
    return decoder(s, qwen3_5_layers(s), names, ahead=qwen3_5_ahead(s))


def qwen3_5_layers(s: Settings) -> tuple[Layer, ...]:
    """Return layers in groups of four: three with a gated delta net, one with gated attention."""
    mixers: dict[str, Mixer] = {FULL: _gated_attention(s), LINEAR: _delta(s)}
    return by_type(_hybrid_types(s), mixers, _qwen3_5_block(s))


def qwen3_5_ahead(s: Settings) -> Layer:
    """Return the layer that predicts the token after the next."""
    return Layer((_gated_attention(s),), _qwen3_5_block(s))


def _gated_attention(s: Settings) -> Attention:
    rope = with_axes(s, (11, 11, 10)).rope(partial=0.25)
    return attention(s, rope=rope, qk_norm=QKNorm(rms(s)), output_gate=True)


def qwen3_next(s: Settings) -> LanguageModel:
    """Build a Qwen3.5 decoder with other layouts of the projections and one position axis."""
    delta = _delta(s)
    full = attention(s, rope=s.rope(partial=0.25), qk_norm=QKNorm(rms(s)), output_gate=True)
    mixers: dict[str, Mixer] = {FULL: full, LINEAR: delta}
    layers = _with_dense(s, by_type(_hybrid_types(s), mixers, _shared_experts(s)))

    def prepare(weights: Weights) -> Weights:
        return _apart(_as_converted(weights), delta)

    names = Names(unused=("mtp.",), prepare=prepare, heads=(_MTP,))
    return decoder(s, layers, names, ahead=Layer((full,), _shared_experts(s)))


def _apart(weights: Weights, delta: GatedDelta) -> Weights:
    """Convert Qwen3-Next's projections, whose rows are grouped by key head, to Qwen3.5's layout."""
    values = delta.value_heads // delta.key_heads
    key_rows, value_rows = delta.key_dim, values * delta.value_dim
    cuts = {
        "in_proj_qkvz": [key_rows, 2 * key_rows, 2 * key_rows + value_rows],
        "in_proj_ba": [values],
    }
    singles = {
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
    ready: Weights = {}
    for name, array in weights.items():
        *path, module, kind = name.split(".")
        if module not in cuts:
            ready[name] = array
            continue
        heads = array.reshape(delta.key_heads, -1, *array.shape[1:])
        parts = [part.flatten(0, 1) for part in mx.split(heads, cuts[module], axis=1)]
        if module == "in_proj_qkvz":
            parts = [mx.concatenate(parts[:3]), parts[3]]
        for part, single in zip(parts, singles[module], strict=True):
            ready[".".join([*path, single, kind])] = part
    return ready


def with_axes(s: Settings, section: tuple[int, int, int], *, interleaved: bool = True) -> Settings:
    """Return the settings for positions of three axes, see `RopeParameters.mrope_section`.

    Args:
        section: default section.
    """
    kind = s.rope_type()
    rope = {"mrope_section": section} | s.scaling().values
    rope |= {
        "rope_type": "default" if kind == "mrope" else kind,
        "mrope_interleaved": interleaved,
    }
    return s.changed(rope_parameters=rope, rope_scaling=None)


def _delta(s: Settings) -> GatedDelta:
    s.only("hidden_act", "silu")
    return GatedDelta(
        key_heads=s.integer("linear_num_key_heads", default=16),
        value_heads=s.integer("linear_num_value_heads", default=32),
        key_dim=s.integer("linear_key_head_dim", default=128),
        value_dim=s.integer("linear_value_head_dim", default=128),
        kernel=s.integer("linear_conv_kernel_dim", default=4),
        eps=rms(s).eps,
    )


def _hybrid_types(s: Settings) -> tuple[str, ...]:
    every = s.integer("full_attention_interval", default=4)
    return s.layer_types(full_every(s, every, LINEAR), (FULL, LINEAR))


def _qwen3_5_block(s: Settings) -> FeedForward:
    return (
        _shared_experts(s) if s.integer("num_experts", default=0, minimum=0) else mlp(s, bias=False)
    )


def _shared_experts(s: Settings) -> FeedForward:
    return softmax_mixture(
        s,
        router=SoftmaxRouter(
            s.integer("num_experts_per_tok", default=8),
            normalise=s.flag("norm_topk_prob", default=True),
        ),
        shared_width=s.integer("shared_expert_intermediate_size", default=512, minimum=0),
        shared_gate=True,
    )


# Norms whose stored weights lack one. The norm of the delta net's output is not among them.
_LESS_ONE = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "model.norm.weight",
    "mtp.norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)


def _as_converted(weights: Weights) -> Weights:
    """Convert published weights as MLX conversions do: add one to norms, put channels last."""
    if _converted(weights):
        return weights
    ready = {}
    for name, array in weights.items():
        if name.endswith(".conv1d.weight"):
            ready[name] = array.swapaxes(-1, -2)
        else:
            ready[name] = array + 1.0 if name.endswith(_LESS_ONE) else array
    return ready


def _converted(weights: Weights) -> bool:
    for name, array in weights.items():
        if name.endswith(".conv1d.weight"):
            return bool(array.shape[-1] == 1)
    return any(name.startswith("language_model.model.") for name in weights)  # MLX's prefix


QWEN3_5_NAMES = Names(unused=("mtp.",), prepare=_as_converted, heads=(_MTP,))


FAMILIES = (
    Family("qwen2", "Qwen2, Qwen2.5, QwQ", qwen2),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", qwen2_moe),
    Family("qwen3", "Qwen3", qwen3),
    Family("qwen3_moe", "Qwen3-MoE, Qwen3-Coder", qwen3_moe),
    Family("qwen3_next", "Qwen3-Next, Qwen3-Coder-Next", qwen3_next),
    Family("qwen3_5_text", "Qwen3.5, text", qwen3_5),
    Family("qwen3_5_moe_text", "Qwen3.5-MoE, text", qwen3_5),
)
