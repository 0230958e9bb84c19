"""How much memory the KV cache may have, and how long a context that allows."""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx
import psutil

from quire.errors import ModelError

_GPU_SHARE = 0.85
_CPU_SHARE = 0.25
_SHORTEST_CONTEXT = 256
_CPU_CACHE = 64 << 20
_MALLOC = {-3: 32 << 20, -1: 64 << 20}
"""Options of mallopt(3): what is mapped apart from the heap (M_MMAP_THRESHOLD), and what free end
of the heap goes back to the system (M_TRIM_THRESHOLD)."""
_GPU_CACHE = 2 << 30


def kv_budget(wanted: int | None) -> int:
    """Bytes for KV pages: as asked, or a share of what is free now that the weights are loaded.

    Raises:
        ModelError: more was asked for than the machine has; names both numbers.
    """
    free = free_memory()
    if wanted is None:
        share = _CPU_SHARE if mx.default_device() == mx.cpu else _GPU_SHARE
        return int(free * share)
    if wanted > free:
        raise ModelError(f"kv-memory: {wanted:,} bytes were asked for, {free:,} are free")
    return wanted


def free_memory() -> int:
    """Bytes that the default device could still give to arrays."""
    if mx.default_device() == mx.cpu:
        return int(psutil.virtual_memory().available)
    info = mx.device_info()
    if isinstance(free := info.get("free_memory"), int):  # CUDA
        return free
    total = info.get("max_recommended_working_set_size")  # Metal
    if not isinstance(total, int):
        raise ModelError(f"the device does not say how much memory it has: {sorted(info)}")
    return total - mx.get_active_memory()


def use_recommended_limits() -> None:
    """Bounds what MLX keeps of freed buffers; on Metal, wires memory as far as MLX recommends.

    Kept buffers are no KV memory, but memory all the same. On a GPU allocating is slow, so there
    they may be many; steps differ in shape, so without a bound there would be ever more.
    """
    mx.set_cache_limit(_CPU_CACHE if mx.default_device() == mx.cpu else _GPU_CACHE)
    if sys.platform == "linux" and mx.default_device() == mx.cpu:
        # A step's larger arrays would be mapped and unmapped again and again: each time the system
        # clears their pages, which takes a fifth of reading a prompt.
        libc = ctypes.CDLL(None)
        for option, value in _MALLOC.items():
            libc.mallopt(option, value)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def check_context(tokens: int, wanted: int) -> int:
    """The context that the KV budget holds, if it is worth serving.

    Args:
        wanted: what was asked for, or the model allows.

    Raises:
        ModelError: the budget holds fewer tokens than any conversation needs.
    """
    least = min(_SHORTEST_CONTEXT, wanted)
    if tokens < least:
        raise ModelError(
            f"kv-memory: the budget holds a context of {tokens} tokens; at least {least} are needed"
        )
    return tokens
