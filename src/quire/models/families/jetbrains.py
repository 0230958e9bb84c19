"""Mellum 2, with experts."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import Mixer
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    dense_by_type,
    mlp,
    rms,
    softmax_mixture,
    with_dense,
)
from quire.models.layers.attention import QKNorm
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def mellum(s: Settings) -> LanguageModel:
    s = s.filled(head_dim=128, num_experts_per_tok=8, norm_topk_prob=True)
    usual = attention(s, qk_norm=QKNorm(rms(s)), rope=None)
    full, sliding = s.rope_by_type(5e5, 1e4)
    mixers: dict[str, Mixer] = {
        FULL: replace(usual, rope=full),
        SLIDING: replace(usual, rope=sliding, window=s.window(1024)),
    }
    types = s.layer_types([FULL] * s.integer("num_hidden_layers"))
    layers = by_type(types, mixers, softmax_mixture(s))
    layers = with_dense(layers, mlp(s, bias=False), dense_by_type(s, 0))
    return decoder(s, layers, Names(unused=("mtp.",)))


FAMILIES = (Family("mellum", "Mellum 2", mellum),)
