"""IQuest-Coder."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family
from quire.models.families.meta import llama
from quire.models.settings import Settings


def iquestcoder(s: Settings) -> LanguageModel:
    s.only("use_sliding_window", False)
    return llama(s.filled(rms_norm_eps=1e-5))


FAMILIES = (Family("iquestcoder", "IQuest-Coder V1", iquestcoder),)
