"""Maps a `model_type` to the function that builds its models. A new module is one line in
`_MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.core.errors import ModelError
from quire.core.original_configs import by_usual_keys
from quire.models.base import LanguageModel
from quire.models.class_defaults import with_class_defaults
from quire.models.families.common import Family
from quire.models.settings import Settings

_MODULES = (
    "ai21",
    "allenai",
    "arcee",
    "aya",
    "baidu",
    "baidu_vl",
    "bert",
    "bigcode",
    "bytedance",
    "cohere",
    "databricks",
    "deepseek",
    "deepseek_ocr",
    "deepseek_vl",
    "eleuther",
    "falcon_vl",
    "glm_vl",
    "google",
    "gpt2",
    "huggingface",
    "hunyuan_vl",
    "idefics",
    "ibm",
    "iflytek",
    "inception",
    "inclusion",
    "internlm",
    "iquest",
    "jetbrains",
    "karpathy",
    "kyutai",
    "lg",
    "lg_vl",
    "lighton",
    "liquid",
    "liquid_vl",
    "llama_vision",
    "llava",
    "mamba",
    "meituan",
    "meta",
    "meta_vl",
    "microsoft",
    "minimax",
    "mistral",
    "mistral_vl",
    "moondream",
    "moonshot",
    "naver",
    "nvidia",
    "olmo_hybrid",
    "openai",
    "openbmb",
    "openbmb_vl",
    "opengvlab",
    "phi_vl",
    "poolside",
    "qwen",
    "qwen_vl",
    "rednote",
    "rednote_vl",
    "sarvam",
    "stability",
    "stepfun",
    "stepfun_vl",
    "swiss_ai",
    "teleai",
    "tencent",
    "tii",
    "upstage",
    "whisper",
    "xiaomi",
    "youtu",
    "zhipu",
)
"""Names of the modules in `models.families`."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for name in _MODULES
    for family in import_module(f"quire.models.families.{name}").FAMILIES
}


_MOST_LAYERS = 10_000
"""The most layers of a model. A hundred take 0.1 s to build; a corrupt number must not
take hours.
"""


def build(config: dict[str, Any]) -> LanguageModel:
    """Build the model that a `config.json` describes, without its weights.

    Raises:
        ModelError: the `model_type` is unknown, or a value is missing or not supported.
    """
    model_type = Settings(config).word("model_type", default="")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model_type {model_type!r} is not supported (known: {known})")
    settings = Settings(with_class_defaults(by_usual_keys(config)))
    layers = settings.within("text_config").integer("num_hidden_layers", default=1)
    if layers > _MOST_LAYERS:
        raise ModelError(f"config.json: num_hidden_layers = {layers} is more than {_MOST_LAYERS}")
    return FAMILIES[model_type].build(settings)
