"""Llama 2 to 4, text (arXiv:2307.09288, arXiv:2407.21783; Llama 4's model card), CWM, and Muse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.description import Layer, NormPlacement
from quire.models.families.common import (
    Family,
    activation,
    attention,
    by_type,
    decoder,
    mlp,
    rms,
    text_of,
    uniform_layers,
    windows,
)
from quire.models.layers.attention import Attention, OutputGate, QKNorm, Temperature
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.routers import SigmoidRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names, Weights

CHUNKED = "chunked_attention"


def llama(s: Settings) -> LanguageModel:
    return decoder(s, uniform_layers(s, attention(s), mlp(s)))


def cwm(s: Settings) -> LanguageModel:
    """Build Code World Model (arXiv:2510.02387), whose layers are sliding, except every fourth."""
    s = s.filled(num_key_value_heads=8, head_dim=128)
    if not s.scaling().values:
        s = s.changed(rope_parameters=_CWM_ROPE)
    usual = attention(s, rope=s.rope(theta=1e6), qkv_bias=False, out_bias=False)
    types = s.layer_types(
        [SLIDING if i % 4 else FULL for i in range(s.integer("num_hidden_layers"))]
    )
    return decoder(s, by_type(types, windows(s, usual, 8192), mlp(s)), norm=rms(s, 1e-5))


_CWM_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""CWM's rotary settings, if the configuration gives none."""


def llama4_text(s: Settings) -> LanguageModel:
    """Build Llama 4's decoder. Rotated layers see a chunk; others see all, with queries scaled by
    position.
    """
    count, every = s.integer("num_hidden_layers"), s.integer("no_rope_layer_interval", default=4)
    rotated = s.integers("no_rope_layers") or tuple((i + 1) % every for i in range(count))
    if len(rotated) != count:
        raise ModelError(f"config.json: {len(rotated)} no_rope_layers for {count} layers")
    types = s.layer_types([CHUNKED if each else FULL for each in rotated], (CHUNKED, FULL))
    step = s.integer("interleave_moe_layer_step", default=1)
    mixed = s.integers("moe_layers") or tuple(range(step - 1, count, step))
    experts, dense = _experts(s), MLP(s.integer("intermediate_size_mlp"), activation(s))
    rotates, still = _attention(s)
    layers = tuple(
        Layer(
            (_chunked(s, rotates if rotated[index] else still, kind),),
            experts if index in mixed else dense,
        )
        for index, kind in enumerate(types)
    )
    names = Names(
        renamed={"feed_forward": "mlp", "router": "gate"},
        unused=("vision_model.", "multi_modal_projector."),
        prepare=_rows_first,
    )
    return decoder(s, layers, names, norm=rms(s, 1e-5))


def _attention(s: Settings) -> tuple[Attention, Attention]:
    """Return the attention of layers that rotate, and of layers without positions."""
    rope = replace(s.rope(theta=5e5), interleaved=True)
    usual = attention(s, rope=rope)
    norm = QKNorm(replace(rms(s, 1e-5), weighted=False), after_rotation=True)
    slope, step = s.number("attn_scale", default=0.1), s.integer("floor_scale", default=8192)
    grows = bool(s.values.get("attn_temperature_tuning", True))  # a number in early files
    return (
        replace(usual, qk_norm=norm if s.flag("use_qk_norm", default=True) else None),
        replace(usual, rope=None, temperature=Temperature(slope, step, 1) if grows else None),
    )


def _chunked(s: Settings, kind: Attention, layer_type: str) -> Attention:
    known = "attention_chunk_size" in s.values
    chunk = s.values["attention_chunk_size"] if known else 8192  # null means no chunks
    if layer_type == FULL or chunk is None:
        return kind
    return replace(kind, chunk=s.integer("attention_chunk_size", default=8192))


def _experts(s: Settings) -> Mixture:
    width = s.integer("intermediate_size")
    return Mixture(
        experts=s.integer("num_local_experts", default=16),
        width=width,
        activation=activation(s),
        router=SigmoidRouter(
            s.integer("num_experts_per_tok", default=1), normalise=False, corrected=False
        ),
        shared_width=width,
        weighted_input=True,
    )


def _rows_first(weights: Weights) -> Weights:
    """Transpose experts, which Hugging Face stores as `[experts, in, out]`."""
    return {
        name: array.swapaxes(-1, -2)
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        else array
        for name, array in weights.items()
    }


def muse_glimmer(s: Settings) -> LanguageModel:
    """Build Muse Glimmer for text; its encoder is left out. Every fourth layer, counted from the
    last, sees all and rotates nothing.
    """
    s = text_of(s).filled(head_dim=128, num_key_value_heads=2)
    norm = rms(s, 1e-5)
    bare = replace(norm, weighted=False)
    count = s.integer("num_hidden_layers")
    last = [(count - 1 - index) % 4 == 0 for index in range(count)]
    types = s.layer_types([FULL if each else SLIDING for each in last])
    usual = attention(s, rope=s.rope(), qk_norm=QKNorm(bare), own_gate=OutputGate())
    usual = replace(usual, scale=usual.scale * s.number("qk_scale_factor", default=3.87))
    kinds = windows(s, usual, 2048)
    thetas = s.numbers("layer_rope_theta", default=[float(not each) for each in last])
    if len(thetas) != count:
        raise ModelError(f"{s.file}: {len(thetas)} layer_rope_theta for {count} layers")
    mixers = (
        kinds[kind] if own else replace(kinds[kind], rope=None)
        for kind, own in zip(types, thetas, strict=True)
    )
    block = mlp(s, bias=False)
    return decoder(
        s,
        tuple(Layer((mixer,), block) for mixer in mixers),
        Names(
            renamed={"self_attn.gate_proj": "self_attn.g_proj"},
            unused=("vision_tower.", "vision_adapter.", "vision_projection."),
            less_one=("layernorm.weight",),
        ),
        norm=norm,
        after_norm=replace(norm, eps=s.number("post_norm_eps", default=1e-8, minimum=0.0)),
        embedding_norm=bare,
        placement=NormPlacement.SANDWICH,
        head_multiplier=s.number("output_multiplier", default=0.19611613513818404),
        logit_softcap=s.number("final_logit_softcapping", default=20.0),
    )


FAMILIES = (
    Family("cwm", "Code World Model", cwm),
    Family("llama", "Llama 2, 3, 3.1, 3.2 text, 3.3", llama),
    Family("llama4_text", "Llama 4, text", llama4_text),
    Family("muse_glimmer", "Muse Glimmer, text", muse_glimmer),
)
