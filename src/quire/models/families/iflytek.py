"""Spark 2.5."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    activation,
    attention,
    by_type,
    decoder,
    full_every,
    mlp,
    query_key_value,
)
from quire.models.layers.attention import OutputGate
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def spark2_5(s: Settings) -> LanguageModel:
    """Build Spark 2.5, which gates the heads' outputs."""
    s.only("attention_bias", False)
    s.only("headwise_attn_output_gate", True)
    s.only("gate_attn_act_mode", "sigmoid")
    full, sliding = s.rope_by_type(1e4, 1e4)
    usual = attention(s, rope=full, own_gate=OutputGate(by_head=True))
    kinds = {FULL: usual, SLIDING: replace(usual, rope=sliding, window=s.window())}
    layers = by_type(
        s.layer_types(full_every(s, 4)), kinds, mlp(s, activation=activation(s, "gelu"))
    )
    names = Names(
        renamed={"embedding": "embed_tokens", "out_proj": "o_proj"},
        fused={"q_k_v_proj": query_key_value(usual)},
    )
    return decoder(s, layers, names, tied=True)


FAMILIES = (Family("spark2_5", "Spark 2.5", spark2_5),)
