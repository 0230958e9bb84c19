"""Jais 2."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import (
    Family,
    activation,
    attention,
    decoder,
    mlp,
    uniform_layers,
)
from quire.models.settings import Settings


def jais2(s: Settings) -> LanguageModel:
    s = s.filled(attention_bias=True, mlp_bias=True)
    block = mlp(s, gated=False, activation=activation(s, "relu2"))
    norm = Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True)
    return decoder(s, uniform_layers(s, attention(s), block), norm=norm)


FAMILIES = (Family("jais2", "Jais 2", jais2),)
