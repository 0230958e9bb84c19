"""MiniCPM 1 and 2 (arXiv:2404.06395)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, mlp, uniform_layers
from quire.models.settings import Settings


def minicpm(s: Settings) -> LanguageModel:
    """Llama with multipliers that keep learning rates across sizes."""
    s.only("num_experts", 0)
    depth = s.number("scale_depth", default=1.0)
    return decoder(
        s,
        uniform_layers(s, attention(s), mlp(s)),
        tied=True,
        embedding_multiplier=s.number("scale_emb", default=1.0),
        residual_multiplier=depth / s.integer("num_hidden_layers") ** 0.5,
        head_multiplier=s.number("dim_model_base", default=1.0) / s.integer("hidden_size"),
    )


FAMILIES = (Family("minicpm", "MiniCPM 1 and 2", minicpm),)
