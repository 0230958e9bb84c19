"""Which class serves which `model_type`. A new family is one line."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.gemma4 import Gemma4
from quire.models.llama import Llama
from quire.models.qwen3 import Qwen3, Qwen3MoE
from quire.models.qwen3_5 import Qwen35

FAMILIES: dict[str, type[LanguageModel]] = {
    "gemma4": Gemma4,
    "gemma4_text": Gemma4,
    "llama": Llama,
    "mistral": Llama,
    "qwen3": Qwen3,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35,
    "qwen3_5_moe_text": Qwen35,
    "qwen3_5_text": Qwen35,
    "qwen3_moe": Qwen3MoE,
}


def family(model_type: str) -> type[LanguageModel]:
    """The class for a `model_type` of `config.json`.

    Raises:
        ModelError: no family of that name.
    """
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model_type {model_type!r} is not supported (known: {known})")
    return FAMILIES[model_type]
