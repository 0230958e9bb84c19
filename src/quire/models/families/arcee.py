"""Arcee Foundation Models."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    activation,
    attention,
    decoder,
    mlp,
    rms,
    uniform_layers,
)
from quire.models.settings import Settings


def arcee(s: Settings) -> LanguageModel:
    block = mlp(s, gated=False, activation=activation(s, "relu2"))
    return decoder(s, uniform_layers(s, attention(s), block), norm=rms(s, 1e-5))


FAMILIES = (Family("arcee", "AFM-4.5B", arcee),)
