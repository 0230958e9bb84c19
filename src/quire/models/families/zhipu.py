"""GLM-4 and GLM-4.5 to 4.7 (arXiv:2406.12793, arXiv:2508.06471)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, NormPlacement
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    decoder,
    described,
    extra_layer,
    gate_up,
    mlp,
    rms,
    sigmoid_mixture,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention, QKNorm
from quire.models.settings import Settings
from quire.models.weights.names import Names


def glm(s: Settings) -> LanguageModel:
    names = Names(fused={"gate_up_proj": gate_up(s)})
    layers = uniform_layers(s, _attention(s.filled(head_dim=128), 0.5), mlp(s, bias=False))
    return decoder(s, layers, names, norm=rms(s, 1.5625e-07))


def glm4(s: Settings) -> LanguageModel:
    description = glm4_described(s.filled(head_dim=128))
    return DecoderModel(description, glm4_names(s))


def glm4_described(s: Settings, partial: float = 0.5) -> Description:
    """Describe a decoder with norms around both blocks. `partial` is the default rotated share of a
    head.
    """
    layers = uniform_layers(s, _attention(s, partial), mlp(s, bias=False))
    return described(s, layers, norm=rms(s, 1.5625e-07), placement=NormPlacement.SANDWICH)


def glm4_names(s: Settings) -> Names:
    parts = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    return Names(
        renamed=parts, fused={"gate_up_proj": gate_up(s)}, unused=_unused_layers(s, usual=0)
    )


def _attention(s: Settings, partial: float) -> Attention:
    rope = replace(s.rope(partial=partial), interleaved=True)
    bias = s.flag("attention_bias", default=True)
    return attention(s, rope=rope, qkv_bias=bias, out_bias=False)


def glm4_moe(s: Settings) -> LanguageModel:
    return DecoderModel(glm4_moe_described(s), glm4_moe_names(s))


def glm4_moe_described(s: Settings) -> Description:
    """Describe a decoder with dense layers followed by layers with experts."""
    s = s.filled(n_shared_experts=1)
    norm = rms(s, 1e-5)
    usual = attention(
        s,
        rope=s.rope(partial=0.5),
        out_bias=False,
        qk_norm=QKNorm(norm) if s.flag("use_qk_norm", default=False) else None,
    )
    first = s.integer("first_k_dense_replace", default=1, minimum=0)
    experts = uniform_layers(s, usual, sigmoid_mixture(s))
    layers = with_dense(experts, mlp(s, bias=False), lambda i: i < first)
    return described(s, layers, norm=norm, ahead=experts[0])


def glm4_moe_names(s: Settings) -> Names:
    unused, count = _unused_layers(s, usual=1), s.integer("num_hidden_layers")
    heads = tuple(extra_layer(count + index) for index in range(len(unused)))
    return Names(renamed=EXPERT_PARTS, unused=unused, heads=heads)


def _unused_layers(s: Settings, *, usual: int) -> tuple[str, ...]:
    """Return the names of layers for multi-token prediction."""
    count = s.integer("num_hidden_layers")
    guessing = s.integer("num_nextn_predict_layers", "num_mtp_layers", default=usual, minimum=0)
    return tuple(f"layers.{count + i}." for i in range(guessing))


FAMILIES = (
    Family("glm", "GLM-4 (9B)", glm),
    Family("glm4", "GLM-4 0414, GLM-Z1", glm4),
    Family("glm4_moe", "GLM-4.5, 4.6, 4.7", glm4_moe),
)
