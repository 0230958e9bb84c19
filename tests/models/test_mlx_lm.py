"""Conversions to MLX, plain and packed, by the library that makes them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from quire.core.config import EngineConfig
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS, HELD_AGAINST_MLX_LM
from tests.support.family_shapes import FULL, LINEAR, SLIDING
from tests.support.parity import TOLERANCE, Company, prompts
from tests.support.registered import CONFIGS as REGISTERED
from tests.support.tiny_models import CONFIGS as TINY

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
for library in ("torch", "transformers", "mlx_lm"):
    pytest.importorskip(library, reason=f"the oracle needs {library}")

from mlx_lm.utils import (  # noqa: E402
    MODEL_REMAPPING,
    _get_classes,
    dequantize_model,
    load_model,
    quantize_model,
)
from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]
NEEDED = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "is_moe_layer": [False, True, True],
}
"""Keys that mlx-lm's argument classes ask for and new configurations do not have."""

NEEDED_BY: dict[str, dict[str, Any]] = {
    "minimax_m2": {"shared_intermediate_size": 0},
    "minicpm3": {"rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
    },
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "gpt_neox": {"rotary_emb_base": 10000.0, "rotary_pct": 0.25},
    "exaone": {"num_layers": 3, "layer_norm_epsilon": 1e-5},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 23,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
    },
}
"""Further keys that mlx-lm needs, by family."""

NOT_THERE = {
    "phi-qk-norm": "mlx-lm has no such norm",
    "cohere-qk-norm": "mlx-lm has no such norm",
    "gemma3_text": "mlx-lm wants all six layers of a pattern",
    "glm_moe_dsa-shared": "mlx-lm's layers all have indexers",
    "olmo": "mlx-lm reads its first layout only",
    "gpt_neox-serial": "mlx-lm's projections have biases",
    "mellum-dense": "mlx-lm has no dense layers",
    "laguna-elements": "mlx-lm has gates of heads only",
    "gpt_oss": "mlx-lm reads it packed only",
    "nanochat-biased": "mlx-lm has no biases and always a softcap",
    "bitnet": "mlx-lm reads it packed only, by a kernel for Metal",
    "gpt2-scaled": "mlx-lm scales all layers alike",
    "bailing_hybrid-unbounded": "mlx-lm's gates are bounded",
    "kimi_linear-groups": "mlx-lm's queries have no latent",
    "llama4_text": "mlx-lm's has no experts; its `llama4` is held below",
    "llama4_text-several": "mlx-lm's has no experts; its `llama4` is held below",
    "qwen2_moe": "mlx-lm has no dense layers",
    "qwen2_moe-normalised": "mlx-lm has no dense layers",
}
CHANGED = {"ernie4_5_moe"}  # mlx-lm leaves out what corrects the router's choice


def _known(name: str) -> bool:
    model_type = CONFIGS[name]["model_type"]
    model_type = MODEL_REMAPPING.get(model_type, model_type)
    return importlib.util.find_spec(f"mlx_lm.models.{model_type}") is not None


def _olmo_hybrid(path: Path) -> None:
    """Names and convolutions as published: transformers writes others, and three of equal size."""
    parts = {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    }
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    mx.eval(weights)
    named = {
        ".".join(parts.get(part, part) for part in name.split(".")): array
        for name, array in weights.items()
    }
    for name in [name for name in named if name.endswith(".q_conv1d.weight")]:
        paths = [name.replace(".q_conv1d.", f".{part}_conv1d.") for part in "qkv"]
        whole = mx.concatenate([named[each] for each in paths])
        at = 0
        for each in paths:
            rows = len(named[each.replace("conv1d", "proj")])
            named[each], at = whole[at : at + rows], at + rows
    mx.save_safetensors(str(path), named, {"format": "pt"})


def _rewritten(path: Path, name_of: Callable[[str], str | None]) -> None:
    """Rename a file's tensors; those whose new name is None are left out."""
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    mx.eval(weights)
    named = {name_of(name): array for name, array in weights.items()}
    kept = {name: array for name, array in named.items() if name is not None}
    mx.save_safetensors(str(path), kept, {"format": "pt"})


def _gpt2(name: str) -> str:
    """Return the published name of a tensor, which transformers puts `transformer.` before."""
    return name.removeprefix("transformer.")


def _longcat(name: str) -> str | None:
    """Leave out matrices of experts that are identities, which transformers has in vain."""
    number = re.search(r"\.experts\.(\d+)\.", name)
    count = CONFIGS["longcat_flash"]["n_routed_experts"]
    return None if number is not None and int(number[1]) >= count else name


def _nanochat(name: str) -> str:
    """Return the first name of a tensor, which transformers has renamed."""
    parts = {
        "model": "transformer",
        "embed_tokens": "wte",
        "layers": "h",
        "self_attn": "attn",
        **{f"{part}_proj": f"c_{part}" for part in "qkv"},
        "o_proj": "c_proj",
        "fc1": "c_fc",
        "fc2": "c_proj",
    }
    return ".".join(parts.get(part, part) for part in name.split("."))


AS_PUBLISHED: dict[str, Callable[[str], str | None]] = {
    "gpt2": _gpt2,
    "longcat_flash": _longcat,
    "nanochat": _nanochat,
}
"""The names of a file that mlx-lm reads."""


def _save(model: nn.Module, folder: Path, config: dict[str, Any], **more: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | more))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


def _with_published_outputs(path: Path) -> None:
    """Transformers saves the last projection of Ling 3.0's delta nets by that of its attention."""
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    mx.eval(weights)
    ready = {}
    for name, array in weights.items():
        layer, _, part = name.partition(".attention.")
        delta = f"{layer}.attention.A_log" in weights and part == "dense.weight"
        ready[f"{layer}.attention.o_proj.weight" if delta else name] = array
    mx.save_safetensors(str(path), ready, {"format": "pt"})


OTHERS = {
    f"{name}, text": TINY[name]() for name in ("qwen3_moe", "gemma4", "gemma4_moe", "gemma4_ple")
}
"""Families that other tests hold against transformers."""


@pytest.mark.parametrize("name", [*(name for name in CONFIGS if _known(name)), *OTHERS])
def test_conversions_compute_the_same(name: str, tmp_path: Path) -> None:
    if name in NOT_THERE:
        pytest.skip(NOT_THERE[name])
    given = (CONFIGS | OTHERS)[name]
    original = tmp_path / "original"
    reference = oracle.save_random(AutoConfig.for_model(**deepcopy(given)), original)
    config = json.loads((original / "config.json").read_text())
    if config["model_type"] == "olmo_hybrid":
        _olmo_hybrid(original / "model.safetensors")
    if name_of := AS_PUBLISHED.get(config["model_type"]):
        _rewritten(original / "model.safetensors", name_of)
    needed = NEEDED | deepcopy(given) | NEEDED_BY.get(given["model_type"], {})
    if config["model_type"] == "deepseek_v2":  # mlx-lm wants its published rotation
        needed["rope_scaling"] = {"type": "yarn", "factor": 40, "mscale_all_dim": 0.7}
    if config["model_type"] == "bailing_hybrid":  # which has another model of that name, too
        needed["architectures"] = ["BailingMoeV3ForCausalLM"]
        needed["moe_shared_expert_intermediate_size"] = given["moe_intermediate_size"]
        needed["q_lora_rank"] = None
        _with_published_outputs(original / "model.safetensors")
    if config["model_type"] == "granitemoehybrid":  # which knows the first names only
        first = {LINEAR: "mamba", FULL: "attention"}
        needed["layer_types"] = [first[kind] for kind in config["layer_types"]]
    model, _ = load_model(original, model_config=needed)

    plain = open_model(_save(model, tmp_path / "plain", config)).model
    packed_model, packing = quantize_model(model, dict(config), group_size=32, bits=8)
    packed = open_model(_save(packed_model, tmp_path / "packed", packing)).model
    unpacked_model = dequantize_model(packed_model)
    unpacked = open_model(_save(unpacked_model, tmp_path / "unpacked", config)).model

    if name not in CHANGED:
        theirs = oracle.reference_logits(reference, PROMPT)
        largest = mx.max(mx.abs(theirs)).item()
        assert mx.max(mx.abs(solo_logits(plain, PROMPT) - theirs)).item() < TOLERANCE * largest
    difference = solo_logits(packed, PROMPT) - solo_logits(unpacked, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-3
    assert any("scales" in path for path, _ in tree_flatten(packed.parameters()))


LLAMA4 = {
    "model_type": "llama4",
    "text_config": CONFIGS["llama4_text"]
    | {
        "attention_bias": False,
        "attention_chunk_size": 64,
        "num_experts_per_tok": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "rope_parameters": None,
        "use_qk_norm": True,
    },
}


FLAT = {"rope_theta": 10000.0, "rope_scaling": None}
GEMMA3 = {
    "rope_parameters": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "num_hidden_layers": 6,
    "sliding_window_pattern": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
}
ROUTED_AS_V3 = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
ONLY_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []}


def _with_text(whole: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return whole | {"text_config": whole["text_config"] | changes}


WHOLE: dict[str, dict[str, Any]] = {
    "llama4": LLAMA4,
    "gemma3": _with_text(REGISTERED["gemma3"] | {"vocab_size": 256}, **GEMMA3),
    "gemma4": REGISTERED["gemma4"] | {"vocab_size": 256},
    "gemma4_unified": _with_text(
        REGISTERED["gemma4_unified"] | {"vocab_size": 256},
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
    "mistral3": _with_text(
        REGISTERED["mistral3, text"],
        **FLAT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        sliding_window=None,
    ),
    "mistral3, Mistral Small 4": _with_text(
        REGISTERED["mistral3, Mistral Small 4"], n_group=1, topk_group=1, rms_norm_eps=1e-6
    ),
    "kimi_k25": _with_text(REGISTERED["kimi_k25"], **FLAT, **ROUTED_AS_V3),
    "kimi_vl": _with_text(
        REGISTERED["kimi_vl, text"], **FLAT, **ROUTED_AS_V3, rope_parameters=None
    ),
    "qwen3_5": _with_text(REGISTERED["qwen3_5"], full_attention_interval=3),
    "qwen3_5_moe": _with_text(REGISTERED["qwen3_5_moe"], full_attention_interval=3),
    "qwen2_vl": _with_text(REGISTERED["qwen2_vl"], **FLAT),
    "qwen3_vl": REGISTERED["qwen3_vl"],
    "qwen3_vl_moe": _with_text(REGISTERED["qwen3_vl_moe"], **FLAT, **ONLY_EXPERTS),
}
"""Multimodal models, of which mlx-lm has the text."""


def _drawn(config: dict[str, Any], dtype: mx.Dtype) -> nn.Module:
    """Return mlx-lm's model in float32 with weights as a checkpoint in `dtype` has them."""
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(deepcopy(config)))
    if config["model_type"] == "gemma3":  # tied, which mlx-lm learns from a checkpoint
        model.language_model.tie_word_embeddings = True
        model.language_model.pop("lm_head")
    key = mx.random.key(0)
    drawn = []
    for path, place in tree_flatten(model.parameters()):
        key, draw = mx.random.split(key)
        noise = mx.random.normal(place.shape, key=draw)
        spread = 0.04 if "embed" in path else 1.5 * place.shape[-1] ** -0.5
        value = 1.0 + 0.1 * noise if place.ndim == 1 else spread * noise
        drawn.append((path, value.astype(dtype).astype(mx.float32)))
    model.load_weights(drawn)
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_text_of_multimodal_models_computes_as_in_mlx_lm(name: str, tmp_path: Path) -> None:
    model = _drawn(WHOLE[name], mx.float32)
    loaded = open_model(_save(model, tmp_path / "model", WHOLE[name]))
    theirs = model(mx.array([PROMPT]))[0]
    difference = solo_logits(loaded.model, PROMPT) - theirs
    assert mx.max(mx.abs(difference)).item() < TOLERANCE * mx.max(mx.abs(theirs)).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("name", HELD_AGAINST_MLX_LM)
def test_what_transformers_lacks_computes_as_in_mlx_lm(
    name: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """Prompts of checkpoints in `dtype` are read at once, and nine tokens a step."""
    config = HELD_AGAINST_MLX_LM[name]
    model = _drawn(config, dtype)
    folder = _save(model, tmp_path / "model", config)
    path = str(tmp_path / "model" / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    mx.save_safetensors(path, {key: each.astype(dtype) for key, each in weights.items()})
    loaded = open_model(folder)
    assert loaded.dtype == "float32"

    (request,) = prompts([1], tokens=20)
    small = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=9)
    company = Company(loaded, small)
    chunked = company.run([replace(request, prompt=tuple(PROMPT))])[request.id]
    tokens = PROMPT + chunked.tokens
    theirs = model(mx.array([tokens]))[0]

    bound = TOLERANCE * mx.max(mx.abs(theirs)).item()
    assert mx.max(mx.abs(solo_logits(loaded.model, tokens) - theirs)).item() < bound
    assert mx.argmax(theirs, axis=-1).tolist()[len(PROMPT) - 1 : -1] == chunked.tokens
    for position, logits in chunked.logits.items():
        assert mx.max(mx.abs(logits - theirs[position - 1])).item() < bound
