"""GGUF files of small random models against the folders that they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from quire.models.registry import FAMILIES
from quire.models.weights.gguf.architectures import ARCHITECTURES, REFUSED
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS, HELD_AGAINST_MLX_LM
from tests.support.family_shapes import FULL, SLIDING
from tests.support.gguf_architectures import GGUF, NOT_FROM_GGUF
from tests.support.gguf_files import Kinds, write_gguf
from tests.support.tiny_models import qwen3_5_config, random_weights, tiny_model

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="the folders are transformers'")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]

# What the files say no word of, as their programs take it.
GEMMA = {"query_pre_attn_scalar": 16, "layer_types": [SLIDING, FULL, SLIDING]}
PATTERN = {
    "attention.sliding_window_pattern": [
        kind == SLIDING for kind in CONFIGS["afmoe"]["layer_types"]
    ]
}
EXPERTS = {"expert_shared_feed_forward_length": 96}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "mixtral": ({}, {}),
    "qwen2": ({}, {}),
    "qwen2_moe-sparse": ({}, {}),
    "qwen3": ({}, {}),
    "qwen3_moe": ({}, {}),
    "gemma": ({}, {}),
    "gemma2": (GEMMA, {}),
    "gemma3_text": (
        GEMMA,
        {"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "phi3": ({}, {"attention.key_length": None, "attention.sliding_window": 0}),
    "phi3-longrope": ({}, {"rope.scaling.attn_factor": 1.3416408}),
    "glm4": ({}, {"rope.dimension_count": 8}),
    "glm4_moe": ({}, {"rope.dimension_count": 8, "expert_gating_func": 2}),
    "granite": ({}, {}),
    "cohere": ({}, {}),
    "deepseek_v2": (
        {},
        {
            "attention.key_length": 40,
            "attention.value_length": 32,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 24,
        },
    ),
    "exaone": ({}, {}),
    "olmo": ({}, {"attention.layer_norm_epsilon": 1e-5}),
    "gpt_oss": ({}, {}),
    "granitemoehybrid": ({}, {}),
    "granitemoehybrid-experts": ({"position_embedding_type": None}, EXPERTS),
    "falcon_h1": ({"mamba_norm_before_gate": False}, {}),
    "falcon_h1-norm": ({"lm_head_multiplier": 4.0}, {}),
    "nemotron_h": ({}, {}),
    "nemotron_h-experts": (
        {"n_group": 1},
        {"expert_shared_feed_forward_length": 48, "feed_forward_length": [0, 32, 0, 32]},
    ),
    "mamba2": ({}, {"context_length": 1 << 20}),
    "mamba": ({}, {"context_length": 1 << 20}),
    "falcon_mamba": (
        {"mixer_rms_eps": 1e-5, "layer_norm_epsilon": 1e-5},
        {"context_length": 1 << 20, "ssm.dt_b_c_rms": True},
    ),
    "kimi_linear": (
        {},
        {
            "context_length": 512,
            "attention.head_count_kv": [0, 0, 1, 0],
            "ssm.conv_kernel": 3,
            "kda.head_dim": 16,
        }
        | {"attention.key_length": 40, "attention.key_length_mla": 24}
        | {"attention.value_length_mla": 24, "expert_shared_count": 2, "expert_used_count": 2}
        | {"expert_gating_func": 2},
    ),
    "jamba": ({}, {}),
    "gpt_neox": ({}, {"rope.dimension_count": 4, "use_parallel_residual": True}),
    "gpt_neox-serial": ({}, {"rope.dimension_count": 4, "use_parallel_residual": False}),
    "afmoe": (
        {},
        PATTERN
        | {"expert_shared_count": 2, "leading_dense_block_count": 1}
        | {"expert_weights_norm": True, "expert_weights_scale": 2.5},
    ),
    "apertus": ({}, {}),
    "exaone_moe": ({}, PATTERN | {"expert_shared_count": 2}),
    "cohere2_moe": (
        {},
        {"attention.sliding_window_pattern": [False, True, False, True]}
        | {"feed_forward_length": 96, "expert_feed_forward_length": 128}
        | {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_gating_func": 1},
    ),
    "cohere2_moe-sigmoid": (
        {"shared_expert_combination_strategy": "average"},
        PATTERN
        | {"expert_feed_forward_length": 128, "expert_shared_count": 1, "expert_gating_func": 2},
    ),
    "hunyuan_v1_moe": (
        {},
        {"expert_used_count": 2, "expert_shared_feed_forward_length": 128}
        | {"expert_feed_forward_length": 128},
    ),
    "ministral3": (
        {},
        {"attention.temperature_scale": 0.3, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "mimo_v2_flash": (
        {},
        {"attention.head_count_kv": [1, 2, 2], "attention.value_length": 16}
        | {"attention.sliding_window_pattern": [False, True, True], "rope.dimension_count": 8}
        | {"rope.freq_base_swa": 1e4, "attention.value_scale": 0.707},
    ),
    "mistral4": (
        {},
        {"attention.key_length": 40, "attention.value_length": 32}
        | {"attention.key_length_mla": 24, "attention.value_length_mla": 24}
        | {"attention.temperature_scale": 0.3, "attention.temperature_length": 64}
        | {"rope.scaling.yarn_log_multiplier": 0.1}
        | {"attention.head_count_kv": 1, "expert_gating_func": 1},
    ),
    "llama4_text": (
        {"attention_chunk_size": 8192, "floor_scale": 8192},
        {"interleave_moe_layer_step": 2, "feed_forward_length": 128}
        | {"expert_feed_forward_length": 64},
    ),
}
EVERYDAY = ("llama", "mixtral", "gemma3_text", "phi3-longrope", "glm4", "deepseek_v2", "gpt_oss")
EVERYDAY += ("granitemoehybrid-experts",)
FUSED = ("mistral4",)
"""Families whose experts' gates and up projections are one tensor."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def _folder(name: str, folder: Path) -> Path:
    changes, _ = CASES[name]
    config = AutoConfig.for_model(**(json.loads(json.dumps(CONFIGS[name])) | changes))
    oracle.save_random(config, folder)
    return folder


def _factors(name: str) -> dict[str, Any]:
    """Return the rotations' own tensors: LongRoPE's factors, or Llama 3's, worked out."""
    rope = CONFIGS[name].get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    return _llama3(rope, 10000.0, 16) if rope.get("rope_type") == "llama3" else {}


def _llama3(rope: dict[str, Any], theta: float, rotated: int) -> dict[str, Any]:
    pairs = theta ** (-np.arange(0, rotated, 2) / rotated)
    turns = rope["original_max_position_embeddings"] * pairs / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    neutral = np.ones(8 - rotated // 2)  # of pairs that only other layers rotate
    return {"rope_freqs.weight": np.concatenate([factors, neutral]).astype(np.float32)}


@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_file_computes_what_the_folder_does(name: str, tmp_path: Path) -> None:
    folder, file = _folder(name, tmp_path / "published"), tmp_path / "model.gguf"
    fused = name in FUSED
    write_gguf(folder, file, more=CASES[name][1], tensors=_factors(name), fused=fused)

    ours = open_model(str(file))
    theirs = open_model(str(folder))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert ours.context_length == theirs.context_length
    assert 1 in ours.eos_ids


@pytest.mark.parametrize("name", ["gemma4", "gemma4_ple"])
def test_gemma_4_has_shapes_by_layer(name: str, tmp_path: Path) -> None:
    folder, file = tiny_model(tmp_path / "published", name), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text())
    slides = [kind == SLIDING for kind in config["layer_types"]]
    own = config["hidden_size_per_layer_input"]
    more = {
        "attention.key_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": own,
        "rope.freq_base_swa": 1e4,
    }
    if own:
        more["feed_forward_length"] = [128] * 3 + [256] * 3
    else:
        more["attention.head_count_kv"] = [2 if each else 1 for each in slides]
    factors = np.where(np.arange(16) < 4, 1.0, 1e30).astype(np.float32)
    write_gguf(folder, file, more=more, tensors={"rope_freqs.weight": factors})

    difference = solo_logits(open_model(str(file)).model, PROMPT) - solo_logits(
        open_model(str(folder)).model, PROMPT
    )

    assert mx.max(mx.abs(difference)).item() < 1e-4


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
def test_delta_nets_have_their_heads_by_key(kind: Type, tmp_path: Path) -> None:
    """Qwen3.5, whose output's columns move by whole groups where they are packed."""
    config = qwen3_5_config(linear_value_head_dim=32)
    folder, file = tmp_path / "published", tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(config))
    more = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": 32 * config["linear_num_value_heads"],
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
        "rope.dimension_count": 16,
    }
    stands_for = write_gguf(
        folder, file, more=more, kinds=lambda name: Type.F32 if "conv1d" in name else kind
    )
    write_gguf(folder, tmp_path / "plain.gguf", more=more, tensors=stands_for)
    others = str(folder) if kind is Type.F32 else str(tmp_path / "plain.gguf")

    difference = solo_logits(open_model(str(file)).model, PROMPT) - solo_logits(
        open_model(others).model, PROMPT
    )

    assert mx.max(mx.abs(difference)).item() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "more"),
    [
        (
            "bailing_moe",
            {"first_k_dense_replace": 0},
            {"rope.dimension_count": 16, "expert_shared_count": 2},
        ),
        ("internlm2", {"bias": False}, {"rope.dimension_count": 16}),
        (
            "step3p5",
            {"layer_types": [FULL, SLIDING, SLIDING, FULL], "num_key_value_heads": 2},
            {"attention.head_count": [4, 6, 6, 4], "attention.head_count_kv": [2, 3, 3, 2]}
            | {"attention.sliding_window_pattern": [False, True, True, False]}
            | {"rope.freq_base": 5e4, "rope.freq_base_swa": 1e4, "expert_count": 8}
            | {"attention.layer_norm_rms_epsilon": 1e-5}
            | {"expert_used_count": 2, "expert_shared_feed_forward_length": 48}
            | {"expert_weights_scale": 3.0, "expert_weights_norm": True}
            | {"swiglu_clamp_exp": [0.0, 0.5, 0.0, 0.0]}
            | {"swiglu_clamp_shexp": [0.4, 0.0, 0.3, 0.6]},
        ),
    ],
)
def test_families_of_their_own_code_compute_what_the_folder_does(
    name: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    config = HELD_AGAINST_MLX_LM[name] | changes
    assert config["hidden_size"] // config["num_attention_heads"] == 16
    folder, file = tmp_path / "published", tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(config))
    scaled = config.get("rope_scaling")
    write_gguf(folder, file, more=more, tensors=scaled and _llama3(scaled, 5e4, 8))

    difference = solo_logits(open_model(str(file)).model, PROMPT) - solo_logits(
        open_model(str(folder)).model, PROMPT
    )

    assert mx.max(mx.abs(difference)).item() < 1e-4


def test_the_table_of_architectures_names_what_is_served() -> None:
    assert GGUF.keys() | NOT_FROM_GGUF.keys() <= FAMILIES.keys()
    assert set(GGUF.values()) <= ARCHITECTURES.keys()
    assert not REFUSED.keys() & ARCHITECTURES.keys()


def _all(kind: Type) -> Kinds:
    return lambda name: kind


def _mixed(name: str) -> Type:
    """Return the mix of types of a Q4_K_M file, as far as `gguf` can write them."""
    if name.startswith(("token_embd", "output")):
        return Type.Q8_0
    return Type.Q5_1 if "attn_v" in name else Type.Q4_0


CODES: dict[str, tuple[Kinds, bool]] = {
    "Q4_0": (_all(Type.Q4_0), True),
    "Q5_0": (_all(Type.Q5_0), True),
    "Q8_0": (_all(Type.Q8_0), True),
    "mixed": (_mixed, True),
    "BF16": (_all(Type.BF16), False),
}


@pytest.mark.parametrize("codes", CODES)
def test_codes_compute_what_they_stand_for(codes: str, tmp_path: Path) -> None:
    """Dense, whose rows are permuted, in float32: scales and codes are exact there."""
    kinds, packed = CODES[codes]
    folder = _folder("llama", tmp_path / "published")
    factors = _factors("llama")
    stands_for = write_gguf(folder, tmp_path / "codes.gguf", kinds=kinds, tensors=factors)
    write_gguf(folder, tmp_path / "plain.gguf", tensors=stands_for)

    ours = open_model(str(tmp_path / "codes.gguf"), dtype="float32")
    theirs = open_model(str(tmp_path / "plain.gguf"), dtype="float32")

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert (ours.parameter_bytes < 0.5 * theirs.parameter_bytes) == packed


def test_experts_in_mxfp4_stay_packed(tmp_path: Path) -> None:
    """gpt-oss as its makers' files have it."""
    folder = _folder("gpt_oss", tmp_path / "published")

    def kinds(name: str) -> Type:
        return Type.MXFP4 if "_exps.weight" in name else Type.F32

    stands_for = write_gguf(folder, tmp_path / "codes.gguf", kinds=kinds)
    write_gguf(folder, tmp_path / "plain.gguf", tensors=stands_for)

    ours = open_model(str(tmp_path / "codes.gguf"))
    theirs = open_model(str(tmp_path / "plain.gguf"))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert ours.parameter_bytes < theirs.parameter_bytes
