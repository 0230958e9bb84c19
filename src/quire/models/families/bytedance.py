"""Seed-OSS."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family, attention, decoder, mlp, uniform_layers
from quire.models.settings import Settings


def seed_oss(s: Settings) -> LanguageModel:
    usual = attention(
        s.filled(head_dim=128),
        qkv_bias=s.flag("attention_bias", default=True),
        out_bias=s.flag("attention_out_bias", default=False),
    )
    return decoder(s, uniform_layers(s, usual, mlp(s)))


FAMILIES = (Family("seed_oss", "Seed-OSS", seed_oss),)
