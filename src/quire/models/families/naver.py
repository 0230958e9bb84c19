"""HyperCLOVA X SEED."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.description import NormPlacement
from quire.models.families.common import Family, attention, decoder, mlp, uniform_layers
from quire.models.settings import Settings
from quire.models.weights.names import Names


def hyperclovax(s: Settings) -> LanguageModel:
    """Build HyperCLOVA X SEED, which has Granite's factors, and norms behind the blocks, too."""
    usual = attention(s)
    if s.has("attention_multiplier"):
        usual = replace(usual, scale=s.number("attention_multiplier"))
    behind = s.flag("use_post_norm", default=True)
    return decoder(
        s,
        uniform_layers(s, usual, mlp(s)),
        Names(renamed=_NORMS) if behind else None,
        placement=NormPlacement.SANDWICH if behind else NormPlacement.PRE,
        embedding_multiplier=s.number("embedding_multiplier", default=1.0),
        residual_multiplier=s.number("residual_multiplier", default=1.0),
        head_multiplier=s.number("logits_scaling", default=1.0),
    )


_NORMS = {
    "post_norm1": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}

FAMILIES = (Family("hyperclovax", "HyperCLOVA X SEED", hyperclovax),)
