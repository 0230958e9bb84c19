"""Apertus (arXiv:2509.14233)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, rms, uniform_layers
from quire.models.layers.attention import QKNorm
from quire.models.layers.feed_forward import XieluMLP
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights


def apertus(s: Settings) -> LanguageModel:
    s.only("hidden_act", "xielu")
    s.only("qk_norm", True)
    s.neutral({"mlp_bias": False, "post_norm": False})
    if not (s.has("rope_scaling") or s.has("rope_parameters") or s.has("rope_theta")):
        s = s.filled(rope_parameters=_LLAMA3)
    norm = rms(s, 1e-5)
    usual = attention(s, rope=s.rope(theta=12e6), qk_norm=QKNorm(norm))
    layers = uniform_layers(s, usual, XieluMLP(s.integer("intermediate_size")))
    return decoder(s, layers, Names(renamed=_PARTS, prepare=_flat), norm=norm)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rotary settings of the published models, used if the configuration gives none."""

_PARTS = {
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "post_attention_layernorm",
}


def _flat(weights: Weights) -> Weights:
    """Return the activations' parameters as vectors of one element; some files have scalars."""
    return {
        name: array.reshape(1) if ".act_fn." in name and array.size == 1 else array
        for name, array in weights.items()
    }


FAMILIES = (Family("apertus", "Apertus", apertus),)
