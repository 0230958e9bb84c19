"""Solar Open (arXiv:2601.07022)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    attention,
    decoder,
    rms,
    sigmoid_mixture,
    uniform_layers,
)
from quire.models.settings import Settings
from quire.models.weights.names import Names


def solar_open(s: Settings) -> LanguageModel:
    """Build Solar Open, with experts in every layer."""
    s.only("use_qk_norm", False)
    s.only("first_k_dense_replace", 0)
    s = s.filled(head_dim=128, num_key_value_heads=8, num_experts_per_tok=8, n_shared_experts=1)
    usual = attention(s, rope=s.rope(theta=1e6, partial=1.0), out_bias=False)
    names = Names(renamed=EXPERT_PARTS)
    return decoder(s, uniform_layers(s, usual, sigmoid_mixture(s)), names, norm=rms(s, 1e-5))


FAMILIES = (Family("solar_open", "Solar Open", solar_open),)
