"""dots.llm1 (arXiv:2506.05767)."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import Mixer
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    by_type,
    decoder,
    mlp,
    rms,
    sigmoid_mixture,
    with_dense,
)
from quire.models.layers.attention import QKNorm
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names


def dots1(s: Settings) -> LanguageModel:
    usual = attention(s, qk_norm=QKNorm(rms(s)))
    count, window = s.integer("num_hidden_layers"), s.window(4096)
    widest = count if window is None else s.integer("max_window_layers", default=62, minimum=0)
    types = s.layer_types([FULL if index < widest else SLIDING for index in range(count)])
    mixers: dict[str, Mixer] = {FULL: usual, SLIDING: replace(usual, window=window)}
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    experts = sigmoid_mixture(s.filled(norm_topk_prob=False))
    layers = with_dense(by_type(types, mixers, experts), mlp(s, bias=False), lambda i: i < first)
    return decoder(s, layers, Names(renamed=EXPERT_PARTS))


FAMILIES = (Family("dots1", "dots.llm1", dots1),)
