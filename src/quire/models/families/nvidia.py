"""Nemotron 4 and Minitron (arXiv:2402.16819, arXiv:2407.14679)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family, activation, alike, attention, decoder, mlp
from quire.models.names import Names
from quire.models.settings import Settings


def nemotron(s: Settings) -> LanguageModel:
    usual = attention(s, rope=s.rope(partial=0.5))
    block = mlp(s, gated=False, activation=activation(s, "relu2"))
    norm = Norm(s.number("norm_eps", default=1e-5), centred=True, bias=True)
    return decoder(s, alike(s, usual, block), Names(less_one=("norm.weight",)), norm=norm)


FAMILIES = (Family("nemotron", "Nemotron 4, Minitron", nemotron),)
