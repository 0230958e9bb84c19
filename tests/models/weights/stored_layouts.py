"""Lists how checkpoints' matrices are stored on CUDA, and what multiplies by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from quire.device.cuda.codes import readable
from quire.device.device import CUDA, current_device
from quire.device.weights import PackedWeight, Packing
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import ProductMatrix, UnsupportedNode
from quire.executor.graphs.recorder import Recorder
from quire.models.base import Module
from quire.models.layers.linear import matrix_of, use_device_products
from quire.models.weights.foreign_packing import from_foreign
from quire.models.weights.layouts import widen_codes
from quire.models.weights.quantization import pack_like
from tests.device.cuda.cards import H200
from tests.models.weights import test_foreign_packing as foreign
from tests.models.weights import test_gptq_awq as gptq_awq
from tests.support.packings import packed

OUTPUTS, INPUTS = 256, 512
FEW, MANY = 8, 2048
"""Rows of the steps for which kernels are looked up."""
HEADER = (
    "| Checkpoint | Stored as | 8 rows | 2,048 rows | Eagerly |\n| --- | --- | --- | --- | --- |"
)

Pack = Callable[[mx.array], tuple[dict[str, mx.array], dict[str, str]]]
"""Returns the tensors of matrix `m`, and their types as files name them."""


class Layout(NamedTuple):
    """A form of weights that a library writes.

    Attributes:
        method: the library's `quantization_config`.
    """

    pack: Pack
    method: dict[str, Any]


class _Layer(Module):
    """A model of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(INPUTS, OUTPUTS, bias=False)


def _foreign(name: str) -> Layout:
    """Return a layout of `test_foreign_packing`."""
    pack, method = foreign.PACKINGS[name]

    def tensors(matrix: mx.array) -> tuple[dict[str, mx.array], dict[str, str]]:
        found, _ = pack("m", matrix)
        kinds = foreign.kinds_of(name)
        types = {
            each: kind.decode()
            for each in found
            for end, kind in kinds.items()
            if found[each].dtype == mx.uint8 and re.search(end.decode() + "$", each)
        }
        return found, types

    return Layout(tensors, {"quantization_config": method})


def _gptq(name: str, group: int = 128) -> Layout:
    """Return a layout of `test_gptq_awq`, in groups of so many columns if they are in order."""
    pack, method, bits, groups, _ = gptq_awq.CASES[name]

    def tensors(matrix: mx.array) -> tuple[dict[str, mx.array], dict[str, str]]:
        ordered = "another" not in name
        number = np.arange(INPUTS) // group if ordered else groups(INPUTS)
        parts, _ = pack(np.array(matrix).T, bits, number)
        return {f"m.{part}": mx.array(each) for part, each in parts.items()}, {}

    return Layout(tensors, {"quantization_config": method | {"bits": bits}})


def _fp8_blocks(matrix: mx.array) -> tuple[dict[str, mx.array], dict[str, str]]:
    scales = mx.full((OUTPUTS // 128, INPUTS // 128), 0.01)
    tensors = {"m.weight": mx.to_fp8(matrix * 100), "m.weight_scale_inv": scales}
    return tensors, {"m.weight": "F8_E4M3"}


def _mlx(matrix: mx.array, packing: Packing) -> tuple[dict[str, mx.array], dict[str, str]]:
    weight = packed(matrix.astype(mx.bfloat16), packing)
    parts = {"weight": weight.codes, "scales": weight.scales, "biases": weight.biases}
    return {f"m.{name}": each for name, each in parts.items() if each is not None}, {}


def _of_mlx(group: int, bits: int, mode: str = "affine") -> Layout:
    return Layout(partial(_mlx, packing=Packing(group, bits, mode)), {})


LAYOUTS: Mapping[str, Layout] = {
    "bfloat16, float16": Layout(lambda matrix: ({"m.weight": matrix.astype(mx.float16)}, {}), {}),
    "MLX, 4 bits, groups of 32": _of_mlx(32, 4),
    "MLX, 4 bits, groups of 64": _of_mlx(64, 4),
    "MLX, 8 bits": _of_mlx(64, 8),
    "MLX, 2 or 3 bits": _of_mlx(64, 3),
    "MLX, 5 or 6 bits": _of_mlx(64, 6),
    "MLX, MXFP4": _of_mlx(32, 4, "mxfp4"),
    "MLX, NVFP4": _of_mlx(16, 4, "nvfp4"),
    "MLX, MXFP8": _of_mlx(32, 8, "mxfp8"),
    "GPTQ, 4 bits": _gptq("gptq-4"),
    "GPTQ, 8 bits": _gptq("gptq-8-groups-of-64"),
    "GPTQ, 3 bits": _gptq("gptq-3"),
    "GPTQ, columns in another order": _gptq("gptq-in-another-order"),
    "AWQ, 4 bits": _gptq("awq"),
    "compressed-tensors, 4 bits": _foreign("int4"),
    "compressed-tensors, 4 bits, zero points": _foreign("int4-zero-points"),
    "compressed-tensors, 8 bits a row (W8A8)": _foreign("bytes"),
    "FP8, blocks of 128 x 128 (DeepSeek)": Layout(
        _fp8_blocks, {"quantization_config": {"quant_method": "fp8"}}
    ),
    "FP8, a scale a row (compressed-tensors)": _foreign("fp8-rows"),
    "FP8, a scale a tensor (ModelOpt)": _foreign("fp8-tensor"),
    "MXFP8 (ModelOpt, Quark)": _foreign("mxfp8"),
    "MXFP4 (compressed-tensors, Quark)": _foreign("mxfp4"),
    "NVFP4 (compressed-tensors)": _foreign("nvfp4"),
    "NVFP4 (ModelOpt)": _foreign("nvfp4-of-modelopt"),
}


def row(name: str) -> str:
    """Return the table's line of a layout."""
    layout = LAYOUTS[name]
    mx.random.seed(0)
    tensors, types = layout.pack(mx.random.normal((OUTPUTS, INPUTS)) * INPUTS**-0.5)
    read = from_foreign(tensors, layout.method, None, types)
    weights = {
        key: each.astype(mx.bfloat16) if _is_narrowed(key, each, read) else each
        for key, each in read.items()
    }
    model, device = _Layer(), current_device()
    with (
        patch.object(device, "weight_code_bits", CUDA.weight_code_bits),
        patch.object(device, "read_modes", CUDA.read_modes),
    ):
        widen_codes(model, weights)
    pack_like(model, weights)
    use_device_products(model)
    model.load_weights(list(weights.items()))
    weight = matrix_of(model.m).weight
    cells = [name, _described(weight), *(_in_graphs(weight, rows) for rows in (FEW, MANY))]
    return f"| {' | '.join([*cells, _eagerly(weight)])} |"


def _is_narrowed(key: str, array: mx.array, read: Mapping[str, mx.array]) -> bool:
    is_fp8 = key.endswith(".scales") and "m.biases" not in read
    return mx.issubdtype(array.dtype, mx.floating) and not is_fp8


def _described(weight: mx.array | PackedWeight) -> str:
    if isinstance(weight, mx.array):
        return str(weight.dtype).removeprefix("mlx.core.")
    packing = weight.packing
    kind = f"{packing.bits} bits" if packing.mode == "affine" else packing.mode
    return f"{kind}, groups of {packing.group_size}"


def _in_graphs(weight: mx.array | PackedWeight, rows: int) -> str:
    """Return the kernel that computes the product within graphs."""
    try:
        matrix = ProductMatrix.of(weight)
    except UnsupportedNode:
        return "MLX between graphs"
    recorder = Recorder(rows, id, InputLayout(1, rows, 1, id), H200)
    gemm = recorder.gemm(matrix, matrix.outputs, sharing=True)
    assert gemm.fits, f"{gemm} does not fit the card"
    return f"`{gemm.source.removesuffix('.cuh')}`"


def _eagerly(weight: mx.array | PackedWeight) -> str:
    """Return what multiplies outside of graphs."""
    if isinstance(weight, mx.array):
        return "MLX"
    return "own kernels" if readable(weight) else "decoded for each product"


def table() -> str:
    """Return the whole table."""
    return "\n".join([HEADER, *map(row, LAYOUTS)])
