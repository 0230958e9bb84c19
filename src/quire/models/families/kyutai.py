"""Helium."""

from __future__ import annotations

from dataclasses import replace

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, mlp, rms, uniform_layers
from quire.models.settings import Settings


def helium(s: Settings) -> LanguageModel:
    rope = replace(s.rope(theta=1e5), interleaved=True)
    usual = attention(s.filled(head_dim=128), rope=rope, out_bias=False)
    return decoder(s, uniform_layers(s, usual, mlp(s)), norm=rms(s, 1e-8))


FAMILIES = (Family("helium", "Helium", helium),)
