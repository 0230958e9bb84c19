"""Defaults of absent configuration keys, by Hugging Face transformers' classes.

Only keys are listed for which families have no default of their own. The values are
transformers 5's; `tests/models/test_class_defaults.py` compares them with its classes. A null
does not count as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"head_dim": 128},
    "bailing_hybrid": {"num_key_value_heads": 32, "head_dim": 128},
    "bitnet": {"num_key_value_heads": 5},
    "cohere2_moe": {"head_dim": 128},
    "cwm": {"num_key_value_heads": 8, "head_dim": 128},
    "deepseek_v2": {"q_lora_rank": 1536},
    "deepseek_v3": {"num_key_value_heads": 128, "q_lora_rank": 1536},
    "deepseek_v32": {"num_key_value_heads": 128, "q_lora_rank": 1536},
    "dots1": {"num_key_value_heads": 32},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {"num_key_value_heads": 4, "moe_intermediate_size": [1536, 512]},
    "exaone": {"num_key_value_heads": 8},
    "exaone4": {"num_key_value_heads": 32},
    "exaone_moe": {"num_key_value_heads": 32},
    "falcon_h1": {"num_key_value_heads": 8},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256},
    "gemma3n_text": {"num_key_value_heads": 2, "head_dim": 256, "hidden_size_per_layer_input": 256},
    "gemma4_text": {"num_key_value_heads": 4, "head_dim": 256, "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {"num_key_value_heads": 4, "head_dim": 256},
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "glm4_moe_lite": {"num_key_value_heads": 20, "q_lora_rank": 768},
    "glm4v_moe_text": {"num_key_value_heads": 8},
    "glm4v_text": {"num_key_value_heads": 2},
    "glm_moe_dsa": {"num_key_value_heads": 64, "q_lora_rank": 2048},
    "glm_ocr_text": {"num_key_value_heads": 8},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
    "granite_swa": {"num_key_value_heads": 4},
    "helium": {"num_key_value_heads": 20, "head_dim": 128},
    "hy_v3": {"num_key_value_heads": 8, "head_dim": 128},
    "hy_v4": {"q_lora_rank": 1536},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128},
    "jamba": {"num_key_value_heads": 8},
    "kimi_linear": {"num_key_value_heads": 32},
    "laguna": {"num_key_value_heads": 8, "head_dim": 128},
    "lfm2": {"num_key_value_heads": 8},
    "lfm2_moe": {"num_key_value_heads": 8},
    "lfm3": {"num_key_value_heads": 4, "head_dim": 128},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128},
    "longcat_flash": {"q_lora_rank": 1536},
    "mellum": {"num_key_value_heads": 4, "head_dim": 128},
    "mamba2": {"head_dim": 64},
    "mimo_v2_flash": {"num_key_value_heads": 4, "head_dim": 192},
    "minicpm3": {"num_key_value_heads": 40, "q_lora_rank": 768},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "ministral": {"num_key_value_heads": 8},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8},
    "mistral4": {"num_key_value_heads": 32, "q_lora_rank": 1024},
    "mixtral": {"num_key_value_heads": 8},
    "mllama_text_model": {
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "paddleocr_vl_text": {"num_key_value_heads": 2, "head_dim": 128},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_5_vl_text": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen2_vl_text": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_omni_moe_text": {"num_key_value_heads": 4},
    "qwen3_vl_moe_text": {"num_key_value_heads": 16},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
    "sarvam_moe": {"num_key_value_heads": 4, "head_dim": 64},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4},
    "solar_open": {"num_key_value_heads": 8, "head_dim": 128},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2},
    "step3p5": {"num_key_value_heads": 8, "head_dim": 128},
    "vaultgemma": {"num_key_value_heads": 4, "head_dim": 256},
    "youtu": {"num_key_value_heads": 16, "q_lora_rank": 1536},
}

TEXT_TYPES: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "got_ocr2": "qwen2",
    "hunyuan_vl": "hunyuan_vl_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
"""The `model_type` of a multimodal model's text part, if the file does not say."""


def with_class_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with its class's defaults for absent keys."""
    model_type = str(config.get("model_type"))
    text = config.get("text_config")
    if not isinstance(text, dict):
        return {**_defaults(TEXT_TYPES.get(model_type, model_type)), **config}
    text_type = str(text.get("model_type") or TEXT_TYPES.get(model_type))
    return {**config, "text_config": {**_defaults(text_type), **text}}


def _defaults(model_type: str) -> Mapping[str, Any]:
    return DEFAULTS.get(model_type, {})
