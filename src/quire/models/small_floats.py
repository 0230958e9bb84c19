"""E2M1 in bytes of two codes, with a scale of eight bits for every 16 or 32."""

from __future__ import annotations

import mlx.core as mx

from quire.core.errors import ModelError

_NVFP4_GROUP = 16


def nvfp4(name: str, codes: mx.array, scales: mx.array) -> mx.array:
    """What codes `[..., out, in / 2]` stand for without a scale for all: `[..., out, in]`, float32.

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
    """Codes as MLX has them.

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
