"""Scales of eight bits, and the codes of four (E2M1, two a byte) that they multiply."""

from __future__ import annotations

import mlx.core as mx

from quire.core.errors import ModelError

_NVFP4_GROUP = 16
_NO_NUMBER = 255
_SMALLEST = 1 << 22  # the bits of 2**-127, which is subnormal


def scale_numbers(name: str, scale: mx.array) -> mx.array:
    """Return the numbers, in float32, by which a tensor of scales multiplies.

    Bytes are exponents of two plus 127 (E8M0 of the OCP microscaling specification), whether the
    file calls them U8 or F8_E8M0.

    Raises:
        ModelError: the tensor holds neither floats nor bytes, or the code of no number.
    """
    if mx.issubdtype(scale.dtype, mx.floating):
        return scale.astype(mx.float32)
    if scale.dtype != mx.uint8:
        kind = str(scale.dtype).removeprefix("mlx.core.")
        raise ModelError(f"tensor {name!r} holds {kind}, which is no type of scales")
    check_exponents(name, scale)
    exponents = scale.astype(mx.uint32)
    bits = mx.where(exponents == 0, _SMALLEST, exponents << 23)
    numbers: mx.array = bits.view(mx.float32)
    return numbers


def check_exponents(name: str, scale: mx.array) -> None:
    """Raise `ModelError` where a tensor of E8M0 scales holds the code of no number."""
    if (scale == _NO_NUMBER).any().item():
        raise ModelError(f"tensor {name!r} holds a scale that is no number (E8M0 code 255)")


def nvfp4(name: str, codes: mx.array, scales: mx.array) -> mx.array:
    """Decode `[..., out, in / 2]` codes without a global scale to float32 `[..., out, in]`.

    Args:
        name: of the tensor of codes.
        scales: `[..., out, in / 16]`, E4M3.

    Raises:
        ModelError: they do not fit each other.
    """
    words = small_float_words(name, codes, scales, _NVFP4_GROUP)
    found = mx.dequantize(words, scales, group_size=_NVFP4_GROUP, bits=4, mode="nvfp4")
    return found.astype(mx.float32)


def small_float_words(
    name: str, codes: mx.array, scales: mx.array, group: int, lack: str = ""
) -> mx.array:
    """Return codes as MLX has them.

    Args:
        group: codes with one scale.
        lack: what another packing would have besides, for the error.

    Raises:
        ModelError: codes and scales do not fit each other.
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
