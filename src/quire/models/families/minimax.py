"""MiniMax M2."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    decoder,
    rms,
    softmax_mixture,
    uniform_layers,
)
from quire.models.layers.attention import Over, QKNorm
from quire.models.layers.routers import SigmoidRouter
from quire.models.settings import Settings
from quire.models.weights.names import Names


def minimax_m2(s: Settings) -> LanguageModel:
    s.only("scoring_func", "sigmoid")
    s.only("shared_intermediate_size", 0)
    s.only("qk_norm_type", "per_layer")
    s = s.filled(head_dim=128, use_qk_norm=True)
    share = s.integer("rotary_dim", default=s.integer("head_dim")) / s.integer("head_dim")
    norm = QKNorm(rms(s), Over.ALL_HEADS) if s.flag("use_qk_norm") else None
    usual = attention(
        s, rope=s.rope(theta=5e6, partial=share), qk_norm=norm, qkv_bias=False, out_bias=False
    )
    experts = softmax_mixture(
        s,
        width=s.integer("intermediate_size"),
        router=SigmoidRouter(s.integer("num_experts_per_tok"), normalise=True),
    )
    parts = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    names = Names(renamed=parts, unused=("mtp.",))
    return decoder(s, uniform_layers(s, usual, experts), names)


FAMILIES = (Family("minimax_m2", "MiniMax M2", minimax_m2),)
