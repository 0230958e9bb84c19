"""Every family against Hugging Face transformers: same folder, same logits, same tokens."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import (  # noqa: E402
    Gemma4Config,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models import oracle  # noqa: E402
from tests.support import families, tiny_models  # noqa: E402
from tests.support.everyday import everyday  # noqa: E402

LONG = [(7 * i * i + 3 * i) % 251 for i in range(145)]
PROMPT = LONG[:45]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LLAMA3 = families.LLAMA3["rope_parameters"]

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

FULL = tiny_models.FULL

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama-tied-linear": lambda: LlamaConfig(
        **SHAPE,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    ),
    "llama-yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=families.YARN),
    "llama-yarn-original-outside": lambda: LlamaConfig(
        **SHAPE,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama-partial-is-no-key-of-llama": lambda: LlamaConfig(
        **SHAPE,
        partial_rotary_factor=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=32),
    "qwen3": lambda: Qwen3Config(**tiny_models.qwen3_config()),
    "qwen3-window": lambda: Qwen3Config(**tiny_models.qwen3_config(use_sliding_window=True)),
    "qwen3-moe": lambda: Qwen3MoeConfig(**tiny_models.qwen3_moe_config()),
    "qwen3-moe-unnormalised": lambda: Qwen3MoeConfig(
        **tiny_models.qwen3_moe_config(norm_topk_prob=False)
    ),
    "qwen3-moe-window": lambda: Qwen3MoeConfig(
        **tiny_models.qwen3_moe_config(use_sliding_window=True, max_window_layers=2)
    ),
    "qwen3.5-full-layers": lambda: Qwen3_5TextConfig(
        **tiny_models.qwen3_5_config(layer_types=[FULL] * 4)
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(**tiny_models.qwen3_5_config()),
    "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(**tiny_models.qwen3_5_moe_config()),
    "gemma4-31b": lambda: Gemma4TextConfig(**tiny_models.gemma4_config()),
    "gemma4-26b-a4b": lambda: Gemma4TextConfig(**tiny_models.gemma4_moe_config()),
    "gemma4-e2b": lambda: Gemma4TextConfig(**tiny_models.gemma4_ple_config()),
    "gemma4-multimodal": lambda: Gemma4Config(
        text_config=tiny_models.gemma4_ple_config(),
        vision_config=VISION,
        audio_config=None,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match(name: str, tmp_path: Path) -> None:
    reference = oracle.save_random(CONFIGS[name](), tmp_path)
    loaded = open_model(str(tmp_path))

    for prompt in (LONG, PROMPT, PROMPT[:5]):  # few rows take another way through experts
        ours = solo_logits(loaded.model, prompt)
        theirs = oracle.reference_logits(reference, prompt)
        assert ours.dtype == mx.float32
        assert mx.max(mx.abs(ours - theirs)).item() < 1e-4
        assert len(set(mx.argmax(theirs, axis=-1).tolist())) > len(prompt) // 5, "a flat model"


@pytest.mark.parametrize(
    ("name", "dtype"),
    everyday(
        product(CONFIGS, ("bfloat16", "float16")),
        lambda name, dtype: name == "llama" or (list(CONFIGS).index(name) % 2) == (dtype[0] == "f"),
    ),
)
def test_checkpoints_of_narrow_types_are_computed_in_the_wide_one(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Every day each family has one of the types, in turn."""
    reference = oracle.save_random(CONFIGS[name](), tmp_path, dtype=getattr(torch, dtype))
    loaded = open_model(str(tmp_path))

    assert loaded.dtype == "float32"
    difference = solo_logits(loaded.model, PROMPT) - oracle.reference_logits(reference, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
