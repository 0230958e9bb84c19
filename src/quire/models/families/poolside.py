"""Laguna."""

from __future__ import annotations

from dataclasses import replace

from quire.core.errors import ModelError
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Layer
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    decoder,
    dense_by_type,
    mlp,
    rms,
    softmax_mixture,
    with_dense,
)
from quire.models.layers.attention import Attention, OutputGate, QKNorm
from quire.models.layers.routers import SigmoidRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def laguna(s: Settings) -> LanguageModel:
    """Build Laguna, whose layers have their own numbers of heads and gated outputs."""
    s.only("moe_apply_router_weight_on_input", False)
    s.only("moe_router_score_func", "sigmoid")
    s.only("moe_router_use_sigmoid", True)
    s.only("norm_topk_prob", True)
    s.only("swa_attention_sink_enabled", False)
    s.only("qkv_bias", s.flag("attention_bias", default=False))
    s = s.filled(head_dim=128, num_key_value_heads=8, num_experts=256, num_experts_per_tok=8)
    router = SigmoidRouter(
        s.integer("num_experts_per_tok"),
        normalise=True,
        scale=s.number("moe_routed_scaling_factor", default=1.0),
        softcap=s.number("moe_router_logit_softcapping", default=0.0, minimum=0.0),
    )
    experts = softmax_mixture(
        s.filled(moe_intermediate_size=512),
        router=router,
        shared_width=s.integer("shared_expert_intermediate_size", default=512, minimum=0),
    )
    layers = tuple(Layer((mixer,), experts) for mixer in _mixers(s))
    names = Names(
        renamed=EXPERT_PARTS
        | {
            "experts.e_score_correction_bias": "e_score_correction_bias",
            "gate.proj": "gate",  # mlx-lm's
        }
    )
    return decoder(s, with_dense(layers, mlp(s, bias=False), dense_by_type(s, 1)), names)


def _mixers(s: Settings) -> tuple[Attention, ...]:
    """Return each layer's attention."""
    gating = s.value("gating", default=True)
    require("gating", gating, (True, "per-head", "per-element"))
    gate = OutputGate(by_head=gating != "per-element", softplus=True)
    usual = attention(s, qk_norm=QKNorm(rms(s)), rope=None, own_gate=gate)
    if not s.has("rope_parameters"):
        s = s.filled(rope_parameters=_ROTATIONS)
    full, sliding = s.rope_by_type(5e5, 1e4)
    count = s.integer("num_hidden_layers")
    heads = s.integers("num_attention_heads_per_layer") or (usual.heads,) * count
    if len(heads) != count or any(each < 1 for each in heads):
        raise ModelError(
            f"{s.file}: num_attention_heads_per_layer is not a number of heads for each of "
            f"{count} layers"
        )
    kinds = {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=s.window(512)),
    }
    types = s.layer_types([FULL] * count)
    return tuple(replace(kinds[kind], heads=own) for kind, own in zip(types, heads, strict=True))


_ROTATIONS = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Rotary settings if the configuration gives none."""

FAMILIES = (Family("laguna", "Laguna", laguna),)
