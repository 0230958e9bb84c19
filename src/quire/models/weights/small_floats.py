"""Scales in 8 bits (E8M0, E4M3), and their 4-bit codes (E2M1, two per byte)."""

from __future__ import annotations

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.weights import FP4, PackedWeight, Packing

_NVFP4_GROUP = 16
_NO_NUMBER = 255
_SMALLEST = 1 << 22  # the bits of 2**-127, which is subnormal


def scale_numbers(name: str, scale: mx.array) -> mx.array:
    """Return a tensor of scales as float32 factors.

    Bytes, whether typed U8 or F8_E8M0, are exponents of two plus 127 (E8M0 of the OCP microscaling
    specification).

    Raises:
        ModelError: the tensor holds neither floats nor bytes, or the code for NaN.
    """
    if mx.issubdtype(scale.dtype, mx.floating):
        return scale.astype(mx.float32)
    if scale.dtype != mx.uint8:
        kind = str(scale.dtype).removeprefix("mlx.core.")
        raise ModelError(f"tensor {name!r} holds {kind}, which is not a type of scales")
    check_exponents(name, scale)
    exponents = scale.astype(mx.uint32)
    bits = mx.where(exponents == 0, _SMALLEST, exponents << 23)
    numbers: mx.array = bits.view(mx.float32)
    return numbers


def check_exponents(name: str, scale: mx.array) -> None:
    """Raise `ModelError` if a tensor of E8M0 scales holds the code for NaN."""
    if (scale == _NO_NUMBER).any().item():
        raise ModelError(f"tensor {name!r} holds a scale that is not a number (E8M0 code 255)")


def nvfp4(name: str, codes: mx.array, scales: mx.array, whole: mx.array) -> PackedWeight:
    """Return codes `[..., out, in / 2]` with a global scale in the form of `FP4`.

    Args:
        name: name of the tensor of codes.
        scales: `[..., out, in / 16]`, E4M3.
        whole: the factor of all scales of a matrix, float32, as an array that broadcasts to them.

    Raises:
        ModelError: shapes do not match.
    """
    words = small_float_words(name, codes, scales, group=_NVFP4_GROUP)
    numbers = mx.from_fp8(scales, mx.float32) * whole
    return PackedWeight(words, numbers, biases=None, packing=Packing(_NVFP4_GROUP, 4, FP4))


def small_float_words(
    name: str, codes: mx.array, scales: mx.array, group: int, lack: str = ""
) -> mx.array:
    """Return codes in MLX's form.

    Args:
        group: number of codes per scale.
        lack: text for the error, on what another format would have.

    Raises:
        ModelError: shapes of codes and scales do not match.
    """
    if codes.dtype != mx.uint8:
        raise ModelError(f"tensor '{name}' is {codes.dtype}, not bytes of two codes")
    groups, rest = divmod(codes.shape[-1] * 2, group) if codes.ndim else (0, 1)
    if rest or codes.ndim < 2 or scales.shape != (*codes.shape[:-1], groups):
        raise ModelError(
            f"tensor '{name}': {list(codes.shape)} bytes{lack} do not fit {list(scales.shape)} "
            f"scales for {group} codes each"
        )
    if scales.dtype != mx.uint8:
        scale = name.removesuffix("_packed") + "_scale"
        raise ModelError(f"tensor '{scale}' is {scales.dtype}, not 8 bits")
    return codes.view(mx.uint32)
