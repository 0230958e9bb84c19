"""Codes of GGUF against the numbers that llama.cpp's own library makes of them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from gguf.constants import GGMLQuantizationType as Type

from quire.models.weights.gguf.codes import decode
from tests.models.weights.gguf.make_dequantised import FILE, FUNCTIONS


@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.name)
def test_codes_stand_for_llama_cpps_numbers(kind: Type) -> None:
    golden = mx.load(str(FILE))
    assert isinstance(golden, dict)
    expected = golden[f"{kind.name}.numbers"]

    parts = decode(kind, golden[f"{kind.name}.codes"].reshape(1, -1))

    numbers = parts["weight"]
    if "scales" in parts:
        bits = numbers.shape[-1] * 32 // expected.size
        mode = "affine" if "biases" in parts else "mxfp4"
        numbers = mx.dequantize(
            numbers, parts["scales"], parts.get("biases"), group_size=32, bits=bits, mode=mode
        )
    assert numbers.size == expected.size
    error = mx.abs(numbers.astype(mx.float32).flatten() - expected).max()
    assert error.item() <= 2e-7 * mx.abs(expected).max().item()
