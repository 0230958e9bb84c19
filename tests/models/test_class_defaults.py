"""Families are built from the defaults of transformers' classes, whole and in part."""

from __future__ import annotations

from collections.abc import Callable
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

SIZES = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size"),
        *("intermediate_size", "intermediate_size_mlp"),
        *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"),
        *("state_size", "num_heads", "layers_block_type", "d_model"),
        *("n_layers", "n_heads", "max_seq_len", "num_layers"),
        *("n_embd", "n_layer", "n_head", "n_positions"),
        *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
        *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
    }
)
"""Keys that files always have. Where a family has no default of one, its absence is refused."""
CONTEXT = {"max_position_embeddings", "max_seq_len"}
"""Keys that opening a model asks for."""
SHORT: dict[str, Any] = {"num_hidden_layers": 4}
WHOLE = ("gemma3n", "gemma3n_text", "gemma4", "gemma4_unified")
"""Families whose kinds of layers depend on the number of layers."""
NO_MODEL = {
    "aya_vision": "its encoder has 14 heads for a width of 1152",
    "deepseek_ocr2": "num_experts_per_tok has no default",
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
    "step3p7": "num_attention_groups has no default",
}
"""Default configurations that describe none."""
OTHERWISE = {
    "bailing_hybrid": "linear_head_dim",  # its class moves `head_dim` there, and changes that
    "qwen3_vl_moe": "tie_word_embeddings",  # its class for text ties, the one around that does not
}
"""Keys whose absence means something else than the whole default configuration says."""
KEPT = {"bailing_hybrid": {"layer_types"}, "qwen3_vl_moe": {"tie_word_embeddings"}}
"""Further keys that a default configuration must keep: its layers were made few, or `OTHERWISE`."""
CLASSES = sorted(FAMILIES.keys() & CONFIG_MAPPING.keys())


def _default(model_type: str) -> dict[str, Any]:
    """Return the whole default configuration of a class, with few layers where it may have few."""
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


def _without(config: dict[str, Any], left_out: Callable[[str], bool]) -> dict[str, Any]:
    """Leave out keys of the text's configuration."""
    text = config.get("text_config") or config
    part = {key: value for key, value in text.items() if not left_out(key)}
    return config | {"text_config": part} if "text_config" in config else part


@pytest.mark.parametrize("model_type", CLASSES)
def test_the_class_s_default_is_built_with_keys_and_without(model_type: str) -> None:
    config = _default(model_type)
    if model_type in NO_MODEL:
        with pytest.raises(ModelError):
            build(config)
        return
    kept = SIZES | KEPT.get(model_type, set())

    sizes = _without(config, lambda key: key not in kept)

    assert _described(sizes) == _described(config)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in CLASSES if each not in NO_MODEL])
def test_an_absent_key_changes_nothing_or_is_refused(model_type: str) -> None:
    config = _default(model_type)
    expected = _described(config)
    layers = {"num_hidden_layers", "layer_types"}  # the class has more of them by default
    for key in (config.get("text_config") or config).keys() - layers - CONTEXT:
        found = _built_or_refused(_without(config, lambda each, key=key: each == key))
        refused = isinstance(found, ModelError) and key in SIZES
        assert refused or found == expected or OTHERWISE.get(model_type) == key, (key, found)


def _built_or_refused(config: dict[str, Any]) -> Any:
    try:
        return _described(config)
    except ModelError as error:
        return error


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_the_table_is_that_of_the_classes(model_type: str) -> None:
    made = CONFIG_MAPPING[model_type]
    for key, value in DEFAULTS[model_type].items():
        owner = made() if isinstance(value, list) else made
        assert getattr(owner, key) == value, key


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
