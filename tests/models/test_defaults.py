"""Fields that a configuration leaves out have the defaults of Hugging Face transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from quire.models.registry import build
from tests.support.families import CONFIGS
from tests.support.seeing import CONFIGS as SEEING

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

SKIPPED = {
    "head_dim": "tensors would have other shapes, which is refused",
    "num_key_value_heads": "likewise",
    "q_lora_rank": "likewise",
    "max_position_embeddings": "opening a model asks for it",
    "max_seq_len": "likewise",
    "rope_parameters.full_attention": "no file names one kind of layer alone",
    "rope_parameters.original_max_position_embeddings": "of a dictionary that is there, all counts",
    "rope_parameters.rope_type": "likewise",
}
OWN = {
    ("ministral3", "rope_parameters.rope_theta"): "single keys of it are filled in, too",
    ("qwen3_5_moe", "num_experts"): "its decoder is one family with the dense one",
}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("glm4_moe", "n_shared_experts"),
        ("glm4_moe_lite", "rms_norm_eps"),
        ("glm4v", "text_config.rms_norm_eps"),
        ("glm_ocr", "text_config.rms_norm_eps"),
        ("gpt_oss", "rope_parameters"),
        ("granitemoehybrid", "num_local_experts"),
        ("granitemoehybrid-experts", "shared_intermediate_size"),
        ("hunyuan_v1_moe", "moe_topk"),
        ("llama4_text", "attention_chunk_size"),
        ("ministral3", "rms_norm_eps"),
        ("qwen2_5_vl", "text_config.rms_norm_eps"),
        ("qwen2_5_vl", "vision_config.fullatt_block_indexes"),
        ("qwen2_vl", "text_config.rms_norm_eps"),
    ],
)
def test_a_key_that_is_left_out(name: str, key: str) -> None:
    config = _without(name, key)
    assert _described(config) == _described(_filled(config))


@pytest.mark.parametrize("name", ["dots1", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
def test_which_layers_have_a_window(name: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = CONFIGS[name] | window | {"layer_types": None}
    assert _described(config) == _described(_filled(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("phi3")])
def test_any_key_that_is_left_out(name: str) -> None:
    """Is as there, or asked for. (Phi-3 has a length of training there that changes nothing.)"""
    compared = 0
    for key in _keys(CONFIGS[name]):
        if key in SKIPPED or (name, key) in OWN:
            continue
        config = _without(name, key)
        try:
            ours, filled = _described(config), _filled(config)
        except Exception:  # it is asked for, by us or by transformers, whose errors are many
            continue
        assert ours == _described(filled), key
        compared += 1
    assert compared > 3


def _keys(config: dict[str, Any]) -> list[str]:
    inner = [
        f"{name}.{key}" for name, part in config.items() if isinstance(part, dict) for key in part
    ]
    return [name for name in config if name != "model_type"] + inner


def _without(name: str, key: str) -> dict[str, Any]:
    config = deepcopy((CONFIGS | SEEING)[name])
    *path, last = key.split(".")
    part = config
    for each in path:
        part = part[each]
    part.pop(last, None)
    return config


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with transformers' defaults in place of absent keys."""
    filled: dict[str, Any] = AutoConfig.for_model(**deepcopy(config)).to_dict()
    return filled


def _described(config: dict[str, Any]) -> Any:
    model = build(config)
    return getattr(model, "description", None), getattr(
        getattr(model, "visual", None), "kind", None
    )
