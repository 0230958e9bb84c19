"""Random models in the shapes of published ones: in 4 bits, groups of 64, in bfloat16, in FP8, or
with experts in MXFP4.

`python benchmarks/gpu/shapes.py SHAPE FOLDER`: see `--help`. The folder opens in Quire and in
mlx-lm.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.device.weights import random_codes
from quire.models.base import named_parameters
from quire.models.registry import build

GROUP, BITS = 64, 4
BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` of FP8 checkpoints."""
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
"""`quantization` of models whose experts are in MXFP4."""
_SHARD = 4 << 30

_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}

_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "rope_parameters": _GEMMA_ROPE,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def _gemma_4(layers: int, **own: Any) -> dict[str, Any]:
    kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
    return {**_GEMMA_4, "num_hidden_layers": layers, "layer_types": kinds, **own}


def _llama(layers: int, **own: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        **own,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "gemma-4-26b-a4b": _gemma_4(
        30,
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-e4b": _gemma_4(
        42,
        hidden_size=2560,
        intermediate_size=10_240,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        attention_k_eq_v=False,
        sliding_window=512,
        num_kv_shared_layers=18,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
        enable_moe_block=False,
    ),
    "gemma-4-31b": _gemma_4(
        60,
        hidden_size=5376,
        intermediate_size=21_504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        enable_moe_block=False,
    ),
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": 12 * ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": 10 * [*3 * ["linear_attention"], "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
    "llama-3.1-8b": _llama(32, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32),
    "llama-3.1-70b": _llama(80, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64),
    "tiny": _llama(4, hidden_size=512, intermediate_size=1024, num_attention_heads=8),
}


def _seeing(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """Return Gemma 4 with its vision encoder around a decoder."""
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text | {"use_bidirectional_attention": "vision"},
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10_240,
            "use_clipped_linears": False,
            "standardize": True,
            **vision,
        },
        "audio_config": None,
        "boi_token_id": 255_999,
        "image_token_id": 258_880,
        "eoi_token_id": 258_882,
        "video_token_id": 258_884,
        "boa_token_id": 256_000,
        "audio_token_id": 258_881,
        "eoa_token_index": 258_883,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }


SHAPES["gemma-4-26b-a4b-pictures"] = _seeing(
    SHAPES["gemma-4-26b-a4b"],
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=72,
)
SHAPES["tiny-pictures"] = _seeing(
    _gemma_4(
        6,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        head_dim=64,
        global_head_dim=64,
        enable_moe_block=False,
    ),
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)

_ENCODERS = ("vision_tower.", "embed_vision.")
"""Beginnings of names of parameters that stay in bfloat16, as published models have them."""
_EXPERTS = {"qwen3-": "mlp.switch_mlp", "gemma": "experts.switch_glu"}
"""mlx-lm's names of experts, by a part of the shape's name."""


def write(
    shape: str,
    folder: Path,
    layers: int | None = None,
    *,
    weights: str = "4 bits",
    repeated: bool = False,
) -> None:
    """Writes a model of a shape.

    Args:
        layers: only so many, for a quick look.
        weights: one of `WEIGHTS`.
        repeated: all layers have the numbers of the first of their shape, which stand in the file
            once: a model of 60 GB takes seconds to write. Not every reader opens such a file.
    """
    config = configuration(shape, layers, weights)
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, mx.array] = {}
    index: dict[str, str] = {}
    count = 0

    def flush() -> None:
        nonlocal count
        name = f"model-{count:05d}.safetensors"
        mx.save_safetensors(str(folder / name), shard, {"format": "mlx"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()
        count += 1

    mx.random.seed(0)
    copies: dict[str, str] = {}
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    experts = next((name for kind, name in _EXPERTS.items() if kind in shape), "mlp.experts")
    for name, place in named_parameters(build(config)).items():
        name = re.sub(r"(mlp\.)?experts\.(?=(gate|up|down)_proj)", f"{experts}.", name)
        alike = re.sub(r"layers\.\d+\.", "", name), tuple(place.shape)
        made = _made(
            name, tuple(place.shape), "bfloat16" if name.startswith(_ENCODERS) else weights
        )
        if repeated and first.setdefault(alike, name) != name:
            before, here = (each.removesuffix(".weight") for each in (first[alike], name))
            copies |= {each: each.replace(here, before) for each in made}
            continue
        shard |= made
        mx.eval(list(shard.values()))
        if sum(each.nbytes for each in shard.values()) > _SHARD:
            flush()
    if shard:
        flush()
    for name in sorted(set(index.values())):
        _repeat(folder / name, {copy: own for copy, own in copies.items() if index[own] == name})
    index |= {copy: index[own] for copy, own in copies.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


WEIGHTS: dict[str, dict[str, Any]] = {
    "4 bits": {"quantization": {"group_size": GROUP, "bits": BITS}},
    "bfloat16": {},
    "fp8": {"quantization_config": FP8},
    "mxfp4": {"quantization": MXFP4},
}
"""What `config.json` says of matrices. In `fp8`, matrices of layers have a scale for each block of
128 x 128, as DeepSeek writes them; in `mxfp4`, experts are in MXFP4 and the rest in bfloat16.
"""


def configuration(shape: str, layers: int | None = None, weights: str = "4 bits") -> dict[str, Any]:
    """Return the `config.json` of a shape.

    Args:
        layers: the decoder has only so many, for a quick look.
        weights: one of `WEIGHTS`.
    """
    config = SHAPES[shape] | WEIGHTS[weights]
    if not layers:
        return config
    text = dict(config.get("text_config", config)) | {"num_hidden_layers": layers}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][-layers:]  # the last one is full
    return config | {"text_config": text} if "text_config" in config else text


def _repeat(path: Path, copies: dict[str, str]) -> None:
    """Give tensors of a safetensors file further names, by entries of its header."""
    if not copies:
        return
    old = path.with_suffix(".once")
    path.rename(old)
    with old.open("rb") as source, path.open("wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        entries = json.dumps(header | {copy: header[own] for copy, own in copies.items()}).encode()
        entries += b" " * (-len(entries) % 8)
        target.write(len(entries).to_bytes(8, "little") + entries)
        shutil.copyfileobj(source, target, 1 << 24)
    old.unlink()


_AFTER_LAYERS = 0.1
"""Weight of norms whose names say "post", alike for all weights, so that all have one routing.
With 1, sixty layers of random weights turn rounding into other results (relative difference 0.7),
and graphs do not agree with the model.
"""


def _made(name: str, shape: tuple[int, ...], weights: str) -> dict[str, mx.array]:
    """Return a parameter as files of these weights have it."""
    if weights == "fp8" and name.endswith("_proj.weight"):
        return _in_fp8(name, shape)
    if weights == "mxfp4" and len(shape) == 3 and name.endswith("_proj.weight"):
        return _in_mxfp4(name, shape)
    return _tensors(name, shape, packed=weights == "4 bits")


def _tensors(name: str, shape: tuple[int, ...], *, packed: bool) -> dict[str, mx.array]:
    """Return a parameter as files have it; codes of matrices are drawn as such, so that it is
    quick.
    """
    if len(shape) < 2 or not name.endswith(".weight") or shape[-1] % GROUP:
        is_one = "norm" in name or name.endswith(("scale", "scalar"))
        fill = _AFTER_LAYERS if "post_" in name else float(is_one)
        return {name: mx.full(shape, fill, dtype=mx.bfloat16)}
    *lead, width = shape
    if not packed:
        return {name: mx.random.normal(shape, dtype=mx.bfloat16, scale=1 / math.sqrt(width))}
    words = (*lead, width * BITS // 32)
    codes = random_codes(words)
    # The deviation of 16 equally frequent codes is 4.6.
    step = mx.full((*lead, width // GROUP), 1 / (4.6 * math.sqrt(width)), dtype=mx.bfloat16)
    base = name.removesuffix(".weight")
    return {f"{base}.weight": codes, f"{base}.scales": step, f"{base}.biases": -7.5 * step}


def _in_fp8(name: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """Return a matrix, or a stack of experts, as FP8 codes and scales of blocks."""
    *lead, rows, width = shape
    codes = mx.to_fp8(mx.random.normal(shape, dtype=mx.bfloat16, scale=64))
    blocks = (*lead, -(-rows // BLOCK), -(-width // BLOCK))
    return {name: codes, f"{name}_scale_inv": mx.full(blocks, 1 / (64 * math.sqrt(width)))}


def _in_mxfp4(name: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """Return a stack of experts as codes of 4 bits and exponents of groups of 32."""
    *lead, width = shape
    group = int(MXFP4["group_size"])
    codes = random_codes((*lead, width // 8))
    # The deviation of 16 equally frequent codes is 2.9.
    exponent = 127 - round(math.log2(2.9 * math.sqrt(width)))
    scales = mx.full((*lead, width // group), exponent, dtype=mx.uint8)
    return {name: codes, f"{name.removesuffix('.weight')}.scales": scales}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", default="4 bits", choices=list(WEIGHTS))
    parser.add_argument("--layers", type=int, help="only so many, for a quick look")
    parser.add_argument("--repeated", action="store_true", help="all layers have the same numbers")
    parser.add_argument("--config-only", action="store_true", help="config.json, no weights")
    asked = parser.parse_args()
    if asked.config_only:
        asked.folder.mkdir(parents=True, exist_ok=True)
        own = configuration(asked.shape, asked.layers, asked.weights)
        (asked.folder / "config.json").write_text(json.dumps(own, indent=1))
    else:
        write(
            asked.shape,
            asked.folder,
            asked.layers,
            weights=asked.weights,
            repeated=asked.repeated,
        )
