"""FP8 and integers as other libraries write them, against the matrices that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.device.device import current_device
from quire.device.weights import DECODED_MODES, FP4, FP8
from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from quire.models.weights.small_floats import scale_numbers
from tests.models.solo import solo_logits
from tests.support.grown import grown
from tests.support.tiny_models import qwen3_moe_config, random_weights

PROMPT = [(11 * i + 5) % 256 for i in range(40)]
Packed = tuple[dict[str, mx.array], mx.array]
Pack = Callable[[str, mx.array], Packed]


def _blocks(path: str, matrix: mx.array) -> Packed:
    """DeepSeek's: a scale for each block of 48 x 32."""
    rows, columns = matrix.shape
    scale = mx.random.uniform(0.01, 0.02, (-(-rows // 48), -(-columns // 32)))
    wide = mx.repeat(mx.repeat(scale, 48, 0), 32, 1)[:rows, :columns]
    codes = mx.to_fp8(matrix / wide)
    tensors = {f"{path}.weight": codes, f"{path}.weight_scale_inv": scale}
    return tensors, mx.from_fp8(codes, mx.float32) * wide


def _exponents(high: int, wide: int) -> Pack:
    """Return scales that are powers of two, in bytes, of blocks; 0 is all columns."""

    def pack(path: str, matrix: mx.array) -> Packed:
        rows, columns = matrix.shape
        across = wide or columns
        scale = mx.random.randint(119, 123, (-(-rows // high), -(-columns // across)))
        numbers = mx.power(2.0, scale.astype(mx.float32) - 127)
        numbers = mx.repeat(mx.repeat(numbers, high, 0), across, 1)[:rows, :columns]
        codes = mx.to_fp8(matrix / numbers)
        name = f"{path}.weight_scale" + ("_inv" if high > 1 else "")
        tensors = {f"{path}.weight": codes, name: scale.astype(mx.uint8)}
        return tensors, mx.from_fp8(codes, mx.float32) * numbers

    return pack


def _one_scale(shape: Callable[[int], tuple[int, ...]]) -> Pack:
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
    scale = mx.max(mx.abs(groups), axis=-1, keepdims=True) / max(half - 1, 1)
    codes = mx.clip(mx.round(groups / scale), -half, half - 1)
    plain = (codes * scale).reshape(rows, columns)
    words = _words(np.array(codes).reshape(rows, columns) + half, bits)
    tensors = {
        f"{path}.weight_packed": mx.array(words),
        f"{path}.weight_scale": scale.squeeze(-1),
        f"{path}.weight_shape": mx.array([rows, columns]),
    }
    return tensors, plain


def _zero_points(bits: int, size: int, packed: bool, order: bool = False) -> Pack:
    """compressed-tensors: zero points, in words along the rows or a byte each.

    Args:
        size: of a group; 0 is a row.
        order: columns are in groups at random.
    """

    def pack(path: str, matrix: mx.array) -> Packed:
        rows, columns = matrix.shape
        numbers, half = np.array(matrix), 2 ** (bits - 1)
        group_of = np.arange(columns) // (size or columns)
        if order:
            group_of = np.random.default_rng(columns).permutation(group_of)
        parts = [numbers[:, group_of == group] for group in range(group_of.max() + 1)]
        low, high = (np.stack([f(p, axis=1) for p in parts], 1) for f in (np.min, np.max))
        scale = (high - low) / (2**bits - 1)
        zero = np.clip(np.round(-low / scale), 0, 2**bits - 1)
        wide, zeros = scale[:, group_of], zero[:, group_of]
        codes = np.clip(np.round(numbers / wide + zeros), 0, 2**bits - 1)
        tensors = {f"{path}.weight_scale": mx.array(scale)}
        if packed:
            tensors[f"{path}.weight_packed"] = mx.array(_words(codes, bits))
            tensors[f"{path}.weight_zero_point"] = mx.array(_words(zero.T, bits).T)
            tensors[f"{path}.weight_shape"] = mx.array([rows, columns])
        else:
            tensors[f"{path}.weight"] = mx.array((codes - half).astype(np.int8))
            tensors[f"{path}.weight_zero_point"] = mx.array((zero - half).astype(np.int8))
        if order:
            tensors[f"{path}.weight_g_idx"] = mx.array(group_of.astype(np.int32))
        return tensors, mx.array(((codes - zeros) * wide).astype(np.float32))

    return pack


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """`[..., n]` -> `[..., n * bits / 32]`, low bits first, the last word filled with zeros."""
    stream = ((codes.astype(np.int64)[..., None] >> np.arange(bits)) & 1).reshape(len(codes), -1)
    padded = np.pad(stream, [(0, 0), (0, -stream.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def _bytes(path: str, matrix: mx.array) -> Packed:
    """compressed-tensors: signed bytes with a scale for each row, and activations to be coded."""
    scale = mx.max(mx.abs(matrix), axis=-1, keepdims=True) / 127
    codes = mx.round(matrix / scale)
    tensors = {f"{path}.weight": codes.astype(mx.int8), f"{path}.weight_scale": scale}
    return tensors | {f"{path}.input_scale": mx.array([0.5])}, codes * scale


def _floats(mode: str, group: int) -> Pack:
    """compressed-tensors: E2M1 in bytes; NVIDIA's has a scale for the matrix, too."""

    def pack(path: str, matrix: mx.array) -> Packed:
        whole = 5.0
        factor = whole if mode == "nvfp4" else 1.0
        words, scales = mx.quantize(matrix * factor, group_size=group, bits=4, mode=mode)
        wide = mx.dequantize(words, scales, group_size=group, bits=4, mode=mode)
        codes = words.view(mx.uint8)
        tensors = {f"{path}.weight_packed": codes, f"{path}.weight_scale": scales}
        if mode == "nvfp4":
            tensors[f"{path}.weight_global_scale"] = mx.array([whole])
        return tensors, wide.astype(mx.float32) / factor

    return pack


def _quark_mxfp4(path: str, matrix: mx.array) -> Packed:
    tensors, plain = _floats("mxfp4", 32)(path, matrix)
    return {name.replace("_packed", ""): array for name, array in tensors.items()}, plain


def _group_scales(path: str, matrix: mx.array) -> Packed:
    """compressed-tensors: FP8 with a scale for every 16 columns."""
    rows, columns = matrix.shape
    scale = mx.random.uniform(0.01, 0.02, (rows, columns // 16))
    wide = mx.repeat(scale, 16, axis=1)
    codes = mx.to_fp8(matrix / wide)
    tensors = {f"{path}.weight": codes, f"{path}.weight_scale": scale}
    return tensors, mx.from_fp8(codes, mx.float32) * wide


def _scales_in_fp8(path: str, matrix: mx.array) -> Packed:
    """Return scales of the type that the weights have: no exponents."""
    rows, columns = matrix.shape
    scale = mx.to_fp8(mx.random.uniform(0.01, 0.02, (rows, columns // 32)))
    wide = mx.repeat(mx.from_fp8(scale, mx.float32), 32, axis=1)
    codes = mx.to_fp8(matrix / wide)
    tensors = {f"{path}.weight": codes, f"{path}.weight_scale": scale}
    return tensors, mx.from_fp8(codes, mx.float32) * wide


def _modelopt(inputs: bool) -> Pack:
    """ModelOpt's NVFP4: the scale for the matrix multiplies; with AWQ inputs have scales, too."""

    def pack(path: str, matrix: mx.array) -> Packed:
        whole, columns = 0.2, mx.random.uniform(0.5, 2, matrix.shape[-1:])
        factor = columns if inputs else mx.ones_like(columns)
        words, scales = mx.quantize(matrix / factor / whole, group_size=16, bits=4, mode="nvfp4")
        wide = mx.dequantize(words, scales, group_size=16, bits=4, mode="nvfp4")
        tensors = {f"{path}.weight": words.view(mx.uint8), f"{path}.weight_scale": scales}
        tensors |= {f"{path}.weight_scale_2": mx.array(whole), f"{path}.input_scale": mx.array(0.5)}
        if inputs:
            tensors[f"{path}.pre_quant_scale"] = columns
        return tensors, wide.astype(mx.float32) * whole * factor

    return pack


COMPRESSED = {"quant_method": "compressed-tensors"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
PACKINGS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "fp8-blocks": (_blocks, {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8-blocks-of-compressed-tensors": (
        _blocks,
        COMPRESSED
        | {
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"block_structure": [48, 32]}}},
        },
    ),
    "fp8-tensor-1x1": (_one_scale(lambda rows: (1, 1)), {"quant_method": "fp8"}),
    "fp8-tensor": (_one_scale(lambda rows: ()), {"quant_method": "modelopt"}),
    "fp8-rows": (_one_scale(lambda rows: (rows, 1)), COMPRESSED | {"format": "float-quantized"}),
    "fp8-exponents-of-blocks": (
        _exponents(48, 32),
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
    ),
    "fp8-exponents-of-rows": (_exponents(1, 0), {"quant_method": "quark"}),
    "fp8-exponents-of-groups": (_exponents(1, 16), {"quant_method": "quark"}),
    "mxfp8": (_exponents(1, 32), {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "mxfp8-of-quark": (_exponents(1, 32), {"quant_method": "quark"}),
    "mxfp4-of-quark": (_quark_mxfp4, {"quant_method": "quark"}),
    "mxfp8-of-compressed-tensors": (_exponents(1, 32), COMPRESSED | {"format": "mxfp8-quantized"}),
    "fp8-groups": (_group_scales, COMPRESSED | {"format": "float-quantized"}),
    "fp8-groups-with-scales-in-fp8": (_scales_in_fp8, {"quant_method": "quark"}),
    "int4": (_integers, COMPRESSED),
    **{f"int{bits}": (partial(_integers, bits=bits), COMPRESSED) for bits in (1, 2, 3, 5, 6, 7, 8)},
    "int3-zero-points": (_zero_points(3, 32, packed=True), COMPRESSED),
    "int6-zero-points-of-rows": (_zero_points(6, 0, packed=True), COMPRESSED),
    "int4-zero-points": (_zero_points(4, 32, packed=True), COMPRESSED),
    "int8-zero-points": (_zero_points(8, 32, packed=True), COMPRESSED),
    "int4-zero-points-of-rows": (_zero_points(4, 0, packed=True), COMPRESSED),
    "int4-in-another-order": (_zero_points(4, 32, packed=True, order=True), COMPRESSED),
    "int4-groups-of-16": (_zero_points(4, 16, packed=True), COMPRESSED),
    "bytes": (_bytes, COMPRESSED | {"format": "int-quantized"}),
    "bytes-zero-points": (
        _zero_points(8, 0, packed=False),
        COMPRESSED | {"format": "int-quantized"},
    ),
    "mxfp4": (_floats("mxfp4", 32), COMPRESSED | {"format": "mxfp4-pack-quantized"}),
    "nvfp4": (_floats("nvfp4", 16), COMPRESSED | {"format": "nvfp4-pack-quantized"}),
    "nvfp4-of-modelopt": (_modelopt(inputs=False), MODELOPT),
    # Older ones say so in hf_quant_config.json alone.
    "nvfp4-of-modelopt-with-awq": (_modelopt(inputs=True), {}),
}
UNPACKED = (
    *("int1", "int7", "int4-in-another-order", "int4-groups-of-16"),
    *("fp8-exponents-of-groups", "fp8-groups", "nvfp4-of-modelopt-with-awq"),
)


def _separate_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return one tensor an expert, as these libraries write them."""
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


def _as_fp8(file: Path, of: bytes = b"", kind: bytes = b"F8_E4M3") -> None:
    """Call bytes FP8 in the header, which MLX writes as U8, of tensors whose names end so."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    named = re.compile(rb'(%s":{[^}]*"dtype":)"U8"' % of)
    header, count = named.subn(rb'\1"%s"' % kind, content[8 : 8 + length])
    assert count, "no such bytes"
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def kinds_of(name: str) -> dict[bytes, bytes]:
    """Return what headers call the bytes of tensors, by the end of their names."""
    e4m3 = b"F8_E4M3"
    if name.startswith("fp8-exponents"):
        return {rb"\.weight": e4m3, rb"weight_scale(?:_inv)?": b"F8_E8M0"}
    if name.startswith("mxfp8"):  # scales stay U8
        return {rb"\.weight": e4m3}
    if name.startswith("fp8"):
        return {b"": e4m3}
    return {b"weight_scale": e4m3} if name.startswith("nvfp4") else {}


@pytest.mark.parametrize(
    ("name", "modes"),
    [*((name, DECODED_MODES) for name in PACKINGS), ("nvfp4", (FP8,)), ("nvfp4-of-modelopt", ())],
)
def test_packed_weights_compute_what_they_stand_for(
    name: str,
    modes: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scales of NVFP4 are rounded to bfloat16 where products read its codes."""
    monkeypatch.setattr(current_device(), "read_modes", frozenset(modes))
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
    for end, kind in kinds_of(name).items():
        _as_fp8(tmp_path / "packed" / "model.safetensors", end, kind)

    ours, theirs = open_model(folder), open_model(_write(tmp_path / "plain", config, plain))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    rounded = name.startswith("nvfp4") and name not in UNPACKED and FP4 in modes
    assert mx.max(mx.abs(difference)).item() < (3e-2 if rounded else 1e-4)
    parameters = named_parameters(ours.model).items()
    scales = [each for key, each in parameters if key.endswith(".scales")]
    same_bytes = (each.view(mx.uint8) for each in scales)  # buffers have no bfloat16
    assert all(memoryview(each).c_contiguous for each in same_bytes), "kernels read memory"
    unpacked = name in UNPACKED
    assert ("are unpacked" in caplog.text) == unpacked
    kept = not unpacked and (FP4 in modes or not name.startswith("nvfp4"))
    assert not kept or ours.parameter_bytes < theirs.parameter_bytes


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return folders of a model in FP8 as DeepSeek writes it, and of its numbers."""
    config, home = qwen3_moe_config(), tmp_path_factory.mktemp("fp8")
    packed, plain = {}, {}
    for key, array in _separate_experts(random_weights(config)).items():
        packed[key] = plain[key] = array
        if array.ndim == 2 and "embed" not in key and ".gate.weight" not in key:
            tensors, plain[key] = _blocks(key.removesuffix(".weight"), array)
            packed |= tensors
    method = PACKINGS["fp8-blocks"][1]
    folder = _write(home / "packed", config | {"quantization_config": method}, packed)
    _as_fp8(home / "packed" / "model.safetensors")
    return folder, _write(home / "plain", config, plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("reads", "room"), [(True, 1), (False, 1), (False, 0)])
def test_fp8_stays_fp8_in_memory(
    in_blocks: tuple[str, str],
    reads: bool,
    room: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is decoded where products do not read it and there is room: then they are faster."""
    device = current_device()
    monkeypatch.setattr(device, "read_modes", frozenset(DECODED_MODES if reads else ()))
    monkeypatch.setattr(device, "weight_memory", lambda: room << 40)
    ours, theirs = (open_model(folder, dtype=dtype) for folder in in_blocks)
    found = named_parameters(ours.model)
    for name, matrix in named_parameters(theirs.model).items():
        if "_proj." not in name:
            continue
        if room and not reads:
            assert found[name].dtype == matrix.dtype
            continue
        scales = found[name.replace("weight", "scales")]
        assert (found[name].dtype, scales.dtype) == (mx.uint32, mx.float32)
        assert found[name].nbytes + scales.nbytes == matrix.size + 4 * matrix.size // 32
    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < (1e-4 if dtype == "float32" else 0.1)


def test_fp8_that_a_family_takes_apart_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's `kv_b_proj` becomes matrices by head, the others stay."""
    monkeypatch.setattr(current_device(), "read_modes", frozenset(DECODED_MODES))
    config = grown("deepseek_v3")
    packed, plain = {}, {}
    for key, array in _separate_experts(random_weights(config)).items():
        packed[key] = plain[key] = array
        if array.ndim == 2 and key.endswith("_proj.weight") and array.shape[-1] % 32 == 0:
            tensors, plain[key] = _blocks(key.removesuffix(".weight"), array)
            packed |= tensors
    said = config | {"quantization_config": PACKINGS["fp8-blocks"][1]}
    folder = _write(tmp_path / "packed", said, packed)
    _as_fp8(tmp_path / "packed" / "model.safetensors")
    ours, theirs = open_model(folder), open_model(_write(tmp_path / "plain", config, plain))
    found = named_parameters(ours.model)
    assert found["model.layers.0.self_attn.o_proj.weight"].dtype == mx.uint32
    assert found["model.layers.0.self_attn.embed_q.weight"].dtype == mx.float32
    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4


@pytest.mark.parametrize("block", [None, [16, 32]], ids=str)
def test_stacked_experts_have_scales_of_their_own(block: list[int] | None, tmp_path: Path) -> None:
    """transformers saves FP8 with a scale a matrix, one for gate and one for up, or one a block."""
    method = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    config = qwen3_moe_config()
    plain = random_weights(config)
    packed = dict(plain)
    for path in [
        name.removesuffix(".gate_proj.weight") for name in plain if "experts.gate_" in name
    ]:
        gate, up = (packed.pop(f"{path}.{part}_proj.weight") for part in ("gate", "up"))
        down = packed.pop(f"{path}.down_proj.weight")
        for part, matrix in (("gate_up", mx.concatenate([gate, up], 1)), ("down", down)):
            experts, rows, columns = matrix.shape
            count = (1 + (part == "gate_up"), 1)
            if block is not None:
                count = (-(-rows // block[0]), -(-columns // block[1]))
            scale = mx.random.uniform(0.01, 0.02, (experts, *count))
            wide = mx.repeat(mx.repeat(scale, rows // count[0], 1), columns // count[1], 2)
            codes = mx.to_fp8(matrix / wide)
            packed[f"{path}.{part}_proj"] = codes
            packed[f"{path}.{part}_proj_scale_inv"] = scale
            packed[f"{path}.{part}_proj_activation_scale"] = mx.ones(experts)
            numbers = mx.from_fp8(codes, mx.float32) * wide
            if part == "down":
                plain[f"{path}.down_proj.weight"] = numbers
            else:
                halves = mx.split(numbers, 2, axis=1)
                plain |= zip(
                    (f"{path}.gate_proj.weight", f"{path}.up_proj.weight"), halves, strict=True
                )
    folder = _write(tmp_path / "packed", config | {"quantization_config": method}, packed)
    _as_fp8(tmp_path / "packed" / "model.safetensors")

    ours, theirs = open_model(folder), open_model(_write(tmp_path / "plain", config, plain))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4


@pytest.mark.parametrize("shape", [(8, 3, 1), (7, 2, 1), (8,)])
def test_scales_that_fit_no_stack_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "fp8"}}
    weights = random_weights(config)
    path = "model.layers.0.mlp.experts.down_proj"
    weights[path] = mx.zeros(weights.pop(f"{path}.weight").shape, mx.uint8)
    weights[f"{path}_scale_inv"] = mx.ones(shape)
    folder = _write(tmp_path / "model", config, weights)
    _as_fp8(tmp_path / "model" / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj_scale_inv': .* scales fit no FP8 weight of"):
        open_model(folder)


@pytest.mark.parametrize(
    ("method", "scale", "named"),
    [
        ({"weight_block_size": [48, 32]}, (4, 2), "blocks are \\[\\[48, 32\\]\\]"),
        ({"weight_block_size": [128, 128]}, (5, 7), "up_proj.weight_scale_inv': "),
        ({"weight_block_size": [48, 32]}, (1, 1), "up_proj.weight_scale_inv': "),
        ({"weight_block_size": [48]}, (3, 2), "weight_block_size = \\[48\\], which is not"),
        ({"weight_block_size": [-1, 2]}, (3, 2), "which is not the rows and columns"),
        ({"weight_block_size": "x"}, (3, 2), "weight_block_size = 'x' is of the wrong type"),
        ({"config_groups": {"g": {"weights": {"block_structure": [0, 1]}}}}, (3, 2), "config_gro"),
    ],
)
def test_scales_that_fit_no_block_are_refused(
    method: dict[str, Any], scale: tuple[int, int], named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "fp8"} | method}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    tensors, _ = _blocks(path, weights[f"{path}.weight"])
    tensors[f"{path}.weight_scale_inv"] = mx.ones(scale)
    folder = tmp_path / "model"
    _write(folder, config, weights | tensors)
    _as_fp8(folder / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (
            mx.full((128, 2), 255, mx.uint8),
            r"up_proj.weight_scale' holds a scale that is not a number",
        ),
        (
            mx.full((128, 1), 255, mx.uint8),
            r"up_proj.weight_scale' holds a scale that is not a number",
        ),
        (mx.ones((128, 1), mx.int32), "up_proj.weight_scale' holds int32, which is not a type"),
    ],
)
def test_scales_that_are_no_numbers_are_refused(
    scale: mx.array, named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "modelopt"}}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    tensors, _ = _exponents(1, 32)(path, weights[f"{path}.weight"])
    tensors[f"{path}.weight_scale"] = scale
    folder = _write(tmp_path / "model", config, weights | tensors)
    with pytest.raises(ModelError, match=named):
        open_model(folder)


def test_scales_are_powers_of_two_over_the_whole_range() -> None:
    codes = mx.array([0, 1, 126, 127, 128, 254], mx.uint8)
    expected = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert np.array(scale_numbers("x", codes)).tolist() == expected


@pytest.mark.parametrize(
    ("mode", "part", "value", "named"),
    [
        ("nvfp4", "weight_global_scale", None, "without a weight_global_scale do not fit"),
        ("nvfp4", "weight_global_scale", mx.ones(2), r"has shape \[2\], not one number"),
        ("nvfp4", "weight_scale", mx.ones((2, 2), mx.uint8), r"do not fit \[2, 2\] scales for 16"),
        ("nvfp4", "weight_scale", mx.ones(64, mx.uint8), r"do not fit \[64\] scales"),
        ("nvfp4", "weight_scale", mx.ones((128, 4)), "weight_scale' is .*float32, not 8 bits"),
        ("nvfp4", "weight_packed", mx.ones((128, 31), mx.uint8), r"\[128, 31\] bytes do not fit"),
        ("nvfp4", "weight_packed", mx.ones(128, mx.uint8), r"\[128\] bytes do not fit"),
        ("mxfp4", "weight_packed", mx.ones((128, 30), mx.uint8), r"\[128, 30\] bytes without"),
        ("mxfp4", "weight_scale", mx.ones((128, 4), mx.uint8), r"\[128, 4\] scales for 32"),
    ],
)
def test_parts_of_small_floats_that_do_not_fit_are_refused(
    mode: str, part: str, value: mx.array | None, named: str, tmp_path: Path
) -> None:
    form = {"format": f"{mode}-pack-quantized"}
    config = qwen3_moe_config() | {"quantization_config": COMPRESSED | form}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    tensors, _ = _floats(mode, 16 if mode == "nvfp4" else 32)(path, weights.pop(f"{path}.weight"))
    assert tensors[f"{path}.weight_packed"].shape == (128, 32)
    tensors.pop(f"{path}.{part}")
    if value is not None:
        tensors[f"{path}.{part}"] = value
    folder = tmp_path / "model"
    _write(folder, config, weights | tensors)
    with pytest.raises(ModelError, match=named):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("weight_scale", None, "weight_scale' is missing"),
        ("weight_scale", mx.ones((2, 2), mx.uint8), r"do not fit \[2, 2\] scales for 16"),
        ("weight_scale", mx.ones((128, 4)), "weight_scale' is .*float32, not 8 bits"),
        ("weight_scale_2", mx.ones(2), r"weight_scale_2' has shape \[2\], not one number"),
        ("weight", mx.ones((128, 64)), "weight' is .*float32, not bytes of two codes"),
        ("pre_quant_scale", mx.ones(3), r"has shape \[3\], the matrix 64 columns"),
    ],
)
def test_parts_of_modelopts_that_do_not_fit_are_refused(
    part: str, value: mx.array | None, named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": MODELOPT}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    tensors, _ = _modelopt(inputs=True)(path, weights.pop(f"{path}.weight"))
    tensors.pop(f"{path}.{part}")
    if value is not None:
        tensors[f"{path}.{part}"] = value
    folder = _write(tmp_path / "model", config, weights | tensors)
    with pytest.raises(ModelError, match=named):
        open_model(folder)


def test_scales_of_caches_are_left_out(tmp_path: Path) -> None:
    """llm-compressor writes them for packed caches, beside weights of any packing."""
    config = qwen3_moe_config() | {"quantization_config": COMPRESSED}
    weights, path = random_weights(config), "model.layers.1.self_attn"
    scales = {f"{path}.{name}_scale": mx.array([0.5]) for name in ("q", "k", "v")}
    plain = open_model(_write(tmp_path / "plain", config, weights))
    ours = open_model(_write(tmp_path / "scaled", config, weights | scales))
    assert mx.array_equal(solo_logits(ours.model, PROMPT), solo_logits(plain.model, PROMPT))


def test_a_packing_that_nothing_reads_is_named_with_the_tensor(tmp_path: Path) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "quanto"}}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    scale = {f"{path}.weight_scale": mx.ones(1)}
    with pytest.raises(ModelError, match=r"up_proj.weight_scale.*'quanto' is not supported"):
        open_model(_write(tmp_path / "model", config, weights | scale))


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ({}, {"weight_zero_point": mx.zeros((8, 4), dtype=mx.int32)}, "weight_zero_point"),
        ({}, {"weight_shape": None}, "weight_shape' is missing"),
        ({}, {"weight_shape": mx.array([128, 50])}, "no packing of 50 columns"),
        ({}, {"weight_scale": None}, "weight_scale' is missing"),
        ({"format": "marlin-24"}, {}, "format 'marlin-24'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    method: dict[str, Any], changes: dict[str, mx.array | None], named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": COMPRESSED | method}
    weights = random_weights(config)
    path = "model.layers.1.mlp.up_proj"
    tensors, _ = _integers(path, weights.pop(f"{path}.weight"))
    given = tensors | {f"{path}.{part}": array for part, array in changes.items()}
    kept = {name: array for name, array in given.items() if array is not None}
    with pytest.raises(ModelError, match=named):
        open_model(_write(tmp_path / "model", config, weights | kept))
