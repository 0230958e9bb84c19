"""Llama 2, 3, 3.1, 3.2 and 3.3 text (arXiv:2307.09288, arXiv:2407.21783)."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family, alike, attention, decoder, mlp
from quire.models.settings import Settings


def llama(s: Settings) -> LanguageModel:
    return decoder(s, alike(s, attention(s), mlp(s)))


FAMILIES = (Family("llama", "Llama 2, 3, 3.1, 3.2 text, 3.3", llama),)
