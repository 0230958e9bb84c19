"""Families are built from the defaults of transformers' classes, whole and in part."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.models.base import named_parameters
from quire.models.class_defaults import DEFAULTS, TEXT_TYPES, with_class_defaults
from quire.models.registry import FAMILIES, build

pytestmark = pytest.mark.oracle
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import CONFIG_MAPPING, AutoConfig  # noqa: E402

KEYS = ("num_key_value_heads", "head_dim", "q_lora_rank", "hidden_size_per_layer_input")
SHORT: dict[str, Any] = {"num_hidden_layers": 4}
WHOLE = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_unified")
"""Their layers depend on how many there are."""
NO_MODEL = {
    "aya_vision": "its encoder has 14 heads for a width of 1152",
    "deepseek_v2": "num_experts_per_tok has no default",
    "dots1": "n_routed_experts has no default",
    "gemma3": "its pictures are smaller than what is joined",
    "glm46v": "its rotations are not of its heads",
    "glm4_moe": "half a head is no whole number of pairs",
    "glm4v": "its rotations are not of its heads",
    "glm4v_moe": "half a head is no whole number of pairs",
    "glm_ocr": "its rotations are not of its heads",
    "hunyuan_vl": "xdrope_section has no default",
    "idefics3": "its tiles cannot be cut",
    "qwen3_omni_moe": "its heads have an odd size",
    "qwen3_omni_moe_thinker": "its heads have an odd size",
    "smolvlm": "its tiles cannot be cut",
    "step3p5": "num_attention_groups has no default",
}
"""Default configurations that describe none."""
CLASSES = sorted(FAMILIES.keys() & CONFIG_MAPPING.keys())


def _default(model_type: str) -> dict[str, Any]:
    """The whole default configuration of a class, with few layers where it may have few."""
    text = TEXT_TYPES.get(model_type)
    changes = {"text_config": SHORT | {"model_type": text}} if text else dict(SHORT)
    if model_type in (*WHOLE, "qwen3_omni_moe"):
        changes = {}
    whole: dict[str, Any] = AutoConfig.for_model(model_type, **changes).to_dict()
    return whole


def _described(config: dict[str, Any]) -> Any:
    model = build(deepcopy(config))
    shapes = {name: array.shape for name, array in named_parameters(model).items()}
    return repr(getattr(model, "description", None)), shapes


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_class_s_default_is_built_with_keys_and_without(model_type: str) -> None:
    config = _default(model_type)
    if model_type in NO_MODEL:
        with pytest.raises(ModelError):
            build(config)
        return
    expected = _described(config)
    text = config.get("text_config") or config
    for key in KEYS:
        if text.get(key) is not None:
            part = {name: value for name, value in text.items() if name != key}
            without = config | {"text_config": part} if "text_config" in config else part
            assert _described(without) == expected, key


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_the_table_is_that_of_the_classes(model_type: str) -> None:
    made = CONFIG_MAPPING[model_type]
    for key, value in DEFAULTS[model_type].items():
        assert getattr(made, key) == value, key


def test_parts_for_text_have_the_defaults_of_their_own_type() -> None:
    assert with_class_defaults({"model_type": "gemma3n", "text_config": {}})["text_config"] == {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
    }
    text = {"model_type": "qwen3", "head_dim": None}
    filled = with_class_defaults({"model_type": "llava", "text_config": text})["text_config"]
    assert filled == text | {"num_key_value_heads": 32}  # a null is no absent key
    flat = with_class_defaults({"model_type": "qwen2_5_vl"})
    assert flat["num_key_value_heads"] == 8
    assert with_class_defaults({"model_type": "deepseek_v2"})["q_lora_rank"] == 1536
