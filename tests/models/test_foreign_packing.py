"""FP8 and integers as other libraries write them, against the matrices that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.models.loader import open_model
from tests.models.solo import solo_logits
from tests.support.tiny_models import qwen3_moe_config, random_weights

PROMPT = [(11 * i + 5) % 256 for i in range(40)]
Packed = tuple[dict[str, mx.array], mx.array]


def _blocks(path: str, matrix: mx.array) -> Packed:
    """DeepSeek's: a scale for each block of 48 x 32."""
    rows, columns = matrix.shape
    scale = mx.random.uniform(0.01, 0.02, (-(-rows // 48), -(-columns // 32)))
    wide = mx.repeat(mx.repeat(scale, 48, 0), 32, 1)[:rows, :columns]
    codes = mx.to_fp8(matrix / wide)
    tensors = {f"{path}.weight": codes, f"{path}.weight_scale_inv": scale}
    return tensors, mx.from_fp8(codes, mx.float32) * wide


def _one_scale(shape: Callable[[int], tuple[int, ...]]) -> Callable[[str, mx.array], Packed]:
    def pack(path: str, matrix: mx.array) -> Packed:
        scale = mx.full(shape(matrix.shape[0]), 0.015)
        codes = mx.to_fp8(matrix / scale)
        side = {f"{path}.input_scale": mx.array(1.0)}
        tensors = {f"{path}.weight": codes, f"{path}.weight_scale": scale} | side
        return tensors, mx.from_fp8(codes, mx.float32) * scale

    return pack


def _integers(path: str, matrix: mx.array, bits: int = 4) -> Packed:
    """compressed-tensors: groups of 32, symmetric, eight codes of 4 bits a word."""
    rows, columns = matrix.shape
    half = 2 ** (bits - 1)
    groups = matrix.reshape(rows, -1, 32)
    scale = mx.max(mx.abs(groups), axis=-1, keepdims=True) / (half - 1)
    codes = mx.clip(mx.round(groups / scale), -half, half - 1)
    plain = (codes * scale).reshape(rows, columns)
    each = 32 // bits
    places = np.array(codes).astype(np.int64).reshape(rows, -1, each) + half
    words = (places << (bits * np.arange(each))).sum(-1).astype(np.uint32).view(np.int32)
    tensors = {
        f"{path}.weight_packed": mx.array(words),
        f"{path}.weight_scale": scale.squeeze(-1),
        f"{path}.weight_shape": mx.array([rows, columns]),
    }
    return tensors, plain


PACKINGS: dict[str, tuple[Callable[[str, mx.array], Packed], dict[str, Any]]] = {
    "fp8-blocks": (_blocks, {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8-tensor": (_one_scale(lambda rows: ()), {"quant_method": "modelopt"}),
    "fp8-rows": (_one_scale(lambda rows: (rows, 1)), {"quant_method": "compressed-tensors"}),
    "int4": (_integers, {"quant_method": "compressed-tensors"}),
    "int8": (
        lambda path, matrix: _integers(path, matrix, bits=8),
        {"quant_method": "compressed-tensors"},
    ),
}


def _separate_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """One tensor an expert, as these libraries write them."""
    ready = {}
    for name, array in weights.items():
        if ".experts." not in name:
            ready[name] = array
            continue
        path, _, rest = name.partition(".experts.")
        ready |= {f"{path}.experts.{i}.{rest}": array[i] for i in range(array.shape[0])}
    return ready


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _as_fp8(file: Path) -> None:
    """Says in the header that bytes are FP8, which MLX writes as U8."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"U8"', b'"F8_E4M3"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_weights_compute_what_they_stand_for(name: str, tmp_path: Path) -> None:
    pack, method = PACKINGS[name]
    config = qwen3_moe_config(intermediate_size=96)
    packed, plain = {}, {}
    for key, array in _separate_experts(random_weights(config)).items():
        if array.ndim == 2 and "embed" not in key and ".gate.weight" not in key:
            tensors, plain[key] = pack(key.removesuffix(".weight"), array)
            packed |= tensors
        else:
            packed[key] = plain[key] = array
    folder = _write(tmp_path / "packed", config | {"quantization_config": method}, packed)
    if name.startswith("fp8"):
        _as_fp8(tmp_path / "packed" / "model.safetensors")

    ours = solo_logits(open_model(folder).model, PROMPT)
    theirs = solo_logits(open_model(_write(tmp_path / "plain", config, plain)).model, PROMPT)

    assert mx.max(mx.abs(ours - theirs)).item() < 1e-4


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "compressed-tensors"}}
    weights = random_weights(config)
    path = "model.layers.1.mlp.up_proj"
    tensors, _ = _integers(path, weights.pop(f"{path}.weight"))
    tensors[f"{path}.weight_zero_point"] = mx.zeros((8, 4), dtype=mx.int32)
    with pytest.raises(ModelError, match="weight_zero_point"):
        open_model(_write(tmp_path / "model", config, weights | tensors))
