"""Packed checkpoints, as MLX's own converters write them, against their unpacked twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from quire.core.errors import ModelError
from quire.device.device import current_device
from quire.device.weights import TILE, Packing
from quire.models.layers.linear import PackedLinear
from quire.models.layers.moe import PackedExpertLinear
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.tiny_models import CONFIGS, random_weights

PROMPT = [(11 * i + 5) % 256 for i in range(40)]
PACKINGS = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)] + [
    ("affine", 4, 64),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def _pack(
    name: str, array: mx.array, mode: str, bits: int, group: int
) -> tuple[dict[str, mx.array], mx.array]:
    """Return the tensors of one packed matrix, and the matrix that they stand for."""
    parts = mx.quantize(array, group_size=group, bits=bits, mode=mode)
    base = name.removesuffix(".weight")
    tensors = dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=False))
    plain = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode)
    return tensors, plain.astype(mx.float32)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _community_name(name: str) -> str:
    """Return a name as in the MLX community's Gemma 4 and Qwen3-MoE conversions."""
    if ".mlp.experts." in name:
        return name.replace(".experts.", ".switch_mlp.")
    return name.replace(".experts.", ".experts.switch_glu.")


@pytest.mark.parametrize(("mode", "bits", "group"), PACKINGS)
def test_packed_weights_compute_what_they_stand_for(
    mode: str, bits: int, group: int, tmp_path: Path
) -> None:
    # All widths are multiples of 64, so that every matrix can be packed in every way.
    sizes: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64}
    config = CONFIGS["gemma4_moe"](**sizes)
    packed, plain = {}, {}
    for name, array in random_weights(config).items():
        community = "language_model." + _community_name(name)
        if array.ndim >= 2 and array.shape[-1] % 64 == 0:
            tensors, plain[name] = _pack(community, array, mode, bits, group)
            packed |= tensors
        else:
            packed[community] = plain[name] = array
    quantization = {"group_size": group, "bits": bits, "mode": mode}
    packed_folder = _write(tmp_path / "packed", config | {"quantization": quantization}, packed)

    model = open_model(packed_folder).model
    theirs = solo_logits(open_model(_write(tmp_path / "plain", config, plain)).model, PROMPT)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    tiled = current_device().operations.reads_tiles(Packing(group, bits, mode))
    assert layers
    assert all(layer.tiled == (tiled and len(layer.weight) % TILE == 0) for layer in layers)
    experts = [module for module in model.modules() if isinstance(module, PackedExpertLinear)]
    assert {each.tiled for each in experts} == {tiled}
    for blas in ("mlx", "openblas", "auto"):
        current_device().choose_products(blas)
        # The kernels round rows to 16 bits beside codes, and this model magnifies it 70 times.
        most = 1e-4 if current_device().kernels is None else 5e-3
        assert mx.max(mx.abs(solo_logits(model, PROMPT) - theirs)).item() < most


def test_modules_may_differ_in_bits(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"](moe_intermediate_size=64)
    packed, plain = {}, {}
    for name, array in random_weights(config).items():
        community = _community_name(name)
        bits = 8 if "down_proj" in name else 4
        if array.ndim >= 2 and "embed" not in name:
            tensors, plain[name] = _pack(community, array, "affine", bits, 32)
            packed |= tensors
        else:
            packed[community] = plain[name] = array
    quantization: dict[str, Any] = {"group_size": 32, "bits": 4}
    quantization["model.layers.0.mlp.switch_mlp.down_proj"] = {"group_size": 32, "bits": 8}
    quantization["model.embed_tokens"] = False
    # Left over from a checkpoint of another kind that was converted.
    leftover = {"quantization_config": {"quant_method": "fp8"}}
    config |= leftover | {"quantization": quantization}
    packed_folder = _write(tmp_path / "packed", config, packed)

    ours = open_model(packed_folder)
    theirs = open_model(_write(tmp_path / "plain", config, plain))

    current_device().choose_products("mlx")  # the kernels round rows to 16 bits beside codes
    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert ours.parameter_bytes < 0.5 * theirs.parameter_bytes


def test_scales_of_16_bits_stay_so(tmp_path: Path) -> None:
    config = CONFIGS["gemma4_moe"](intermediate_size=64, moe_intermediate_size=64)
    narrow: dict[str, mx.array] = {}
    for name, array in random_weights(config).items():
        if array.ndim >= 2 and array.shape[-1] % 64 == 0:
            tensors, _ = _pack(name, array, "affine", 4, 64)
            narrow |= {
                key: part if part.dtype == mx.uint32 else part.astype(mx.bfloat16)
                for key, part in tensors.items()
            }
        else:
            narrow[name] = array
    # No 16 bits hold all of these: scales stay as wide as they are.
    wide = {
        name: part.astype(mx.float32) * 1.001 if name.endswith((".scales", ".biases")) else part
        for name, part in narrow.items()
    }
    config |= {"quantization": {"group_size": 64, "bits": 4}}
    ours = open_model(_write(tmp_path / "narrow", config, narrow))
    theirs = open_model(_write(tmp_path / "wide", config, wide))
    scales = [
        {module["scales"].dtype for module in each.model.modules() if "scales" in module}
        for each in (ours, theirs)
    ]
    kernels = current_device().kernels is not None
    assert scales == [{mx.bfloat16 if kernels else mx.float32}, {mx.float32}]
    logits = solo_logits(ours.model, PROMPT)
    assert logits.dtype == mx.float32
    assert mx.allclose(logits, solo_logits(theirs.model, PROMPT), atol=0.02)


def test_foreign_packings_are_refused_by_name(tmp_path: Path) -> None:
    config = CONFIGS["llama"]() | {"quantization_config": {"quant_method": "hqq", "nbits": 4}}
    weights = random_weights(config)
    name = "model.layers.0.mlp.up_proj"
    del weights[f"{name}.weight"]
    with pytest.raises(ModelError, match="hqq"):
        open_model(_write(tmp_path / "hqq", config, weights | {f"{name}.W_q": mx.ones(2)}))
    config = CONFIGS["llama"]() | {"quantization": {"mode": "q4_k", "bits": 4}}
    with pytest.raises(ModelError, match="q4_k"):
        open_model(_write(tmp_path / "mode", config, {}))


def test_scales_that_fit_no_packing_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    weights = random_weights(config)
    name = "model.layers.0.mlp.up_proj"
    tensors, _ = _pack(f"{name}.weight", weights[f"{name}.weight"], "affine", 4, 32)
    tensors[f"{name}.scales"] = tensors[f"{name}.scales"][:, :1]
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:, :5]
    with pytest.raises(ModelError, match="up_proj"):
        open_model(_write(tmp_path / "odd", config, weights | tensors))


@pytest.mark.parametrize(
    ("bits", "group", "mode"),
    [(4, 64, "affine"), (6, 32, "affine"), (8, 64, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")],
)
def test_many_rows_are_multiplied_unpacked(bits: int, group: int, mode: str) -> None:
    linear = nn.Linear(128, 96).to_quantized(group_size=group, bits=bits, mode=mode)
    x = mx.random.normal((70, 128))
    codes = linear(x)
    mx.eval(codes)
    ours = PackedLinear(128, 96, group_size=group, bits=bits, mode=mode)
    ours.update(linear.parameters())
    current_device().choose_products("openblas")
    assert mx.abs(ours(x) - codes).max().item() < 1e-4
    current_device().choose_products("mlx")
    assert mx.array_equal(ours(x), codes)


@pytest.mark.parametrize("module", ["self_attn.q_proj", "experts.switch_glu.down_proj"])
@pytest.mark.parametrize(("mode", "bits"), [("mxfp4", 4), ("mxfp8", 8)])
def test_scales_that_kernels_cannot_compute_with_are_refused(
    mode: str, bits: int, module: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 64}
    config = CONFIGS["gemma4_moe"](**sizes)
    packed: dict[str, mx.array] = {}
    for name, array in random_weights(config).items():
        community = "language_model." + _community_name(name)
        packed[community] = array
        if array.ndim >= 2 and array.shape[-1] % 64 == 0:
            packed |= _pack(community, array, mode, bits, 32)[0]
    said = config | {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    (name,) = [each for each in packed if f".layers.1.{module}.scales" in each]
    scales = packed[name].flatten()
    for code in (127 + 65, 127 + 66, 255):
        scales[5] = code
        packed[name] = scales.reshape(packed[name].shape)
        folder = _write(tmp_path / str(code), said, packed)
        if code == 127 + 65:
            open_model(folder)
        else:
            with pytest.raises(ModelError, match=rf"layers\.1\..*scales' holds 2\^{code - 127}"):
                open_model(folder)
