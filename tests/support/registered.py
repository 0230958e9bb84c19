"""A small configuration or more of every `model_type` that is served."""

from __future__ import annotations

from typing import Any

from quire.core.original_configs import by_usual_keys
from tests.support.crossing import CONFIG as CROSSING
from tests.support.families import CONFIGS as DESCRIBED
from tests.support.families import HELD_AGAINST_MLX_LM
from tests.support.fused import CONFIG as FUSED
from tests.support.gemma3n import gemma3n_seeing_config
from tests.support.hunyuan import CONFIG as HUNYUAN
from tests.support.hybrid import CONFIG as HYBRID
from tests.support.moondream import CONFIG as MOONDREAM
from tests.support.moondream2 import CONFIG as MOONDREAM2
from tests.support.moondream2 import CONVERTED as CONVERTED2
from tests.support.ocr import CONFIGS as OCR
from tests.support.original import CONFIGS as ORIGINAL
from tests.support.perception import CONFIG as PERCEPTION
from tests.support.seeing import CONFIGS as SEEING
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.tiled import CONFIGS as TILED
from tests.support.tiled import OTHER_DECODERS
from tests.support.tiny_models import CONFIGS as TINY
from tests.support.unified import unified_config
from tests.support.whispering import CONFIG as WHISPERING


def _around(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a multimodal model around a text model's."""
    return {"model_type": model_type, "text_config": text}


_WHOLE: dict[str, dict[str, Any]] = {
    **OTHER_DECODERS,
    "gemma3, text": _around("gemma3", DESCRIBED["gemma3_text"]),
    "gemma3n": _around("gemma3n", DESCRIBED["gemma3n_text"]),
    "gemma3n, all": gemma3n_seeing_config(),
    "gemma4": _around("gemma4", TINY["gemma4"]()),
    "gemma4_unified": unified_config(),
    "llama4, text": _around("llama4", DESCRIBED["llama4_text"]),
    "mistral3, text": _around("mistral3", DESCRIBED["mistral"]),
    "mistral3, Mistral Small 4": _around("mistral3", DESCRIBED["mistral4"]),
    "deepseek_vl_hybrid": HYBRID,
    **OCR,
    "deepseekocr": OCR["deepseek_vl_v2"] | {"model_type": "deepseekocr"},
    "deepseekocr_2": OCR["deepseek_vl_v2-queries"] | {"model_type": "deepseekocr_2"},
    "deepseek_ocr2": by_usual_keys(OCR["deepseek_vl_v2-queries"]) | {"model_type": "deepseek_ocr2"},
    "falcon_ocr": FUSED,
    "falcon_perception": PERCEPTION,
    "hunyuan_vl": HUNYUAN,
    "lfm2-vl": SIGLIP["lfm2_vl"] | {"model_type": "lfm2-vl"},
    "moondream1": MOONDREAM2,
    "moondream2": CONVERTED2,
    "moondream3": MOONDREAM,
    "mllama": CROSSING,
    "whisper": WHISPERING,
    "youtu_llm": DESCRIBED["youtu"] | {"model_type": "youtu_llm"},
    "joyai_llm_flash": DESCRIBED["deepseek_v3"] | {"model_type": "joyai_llm_flash"},
    "kimi_k2": DESCRIBED["deepseek_v3"] | {"model_type": "kimi_k2"},
    "kimi_vl, text": _around("kimi_vl", DESCRIBED["deepseek_v3"]),
    "mimo_v2": DESCRIBED["mimo_v2_flash"] | {"model_type": "mimo_v2"},
    "step3p7": _around("step3p7", HELD_AGAINST_MLX_LM["step3p5"]),
    "ernie4_5_moe_vl": SEEING["ernie4_5_vl_moe"] | {"model_type": "ernie4_5_moe_vl"},
    "qwen3_omni_moe": {
        "model_type": "qwen3_omni_moe",
        "thinker_config": SEEING["qwen3_omni_moe_thinker"],
    },
}
_OWN = {f"{name}, text": config() for name, config in TINY.items()}

CONFIGS: dict[str, dict[str, Any]] = (
    DESCRIBED | HELD_AGAINST_MLX_LM | _OWN | SEEING | SIGLIP | TILED | ORIGINAL | _WHOLE
)
