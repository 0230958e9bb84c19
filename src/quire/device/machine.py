"""Properties of the device that MLX computes on."""

from __future__ import annotations

import mlx.core as mx

from quire.core.errors import ModelError


def device_number(name: str) -> int:
    """Return a device property such as "memory_size" in bytes.

    Raises:
        ModelError: MLX does not report it.
    """
    info = mx.device_info()
    if not isinstance(value := info.get(name), int):
        raise ModelError(f"the device does not report its memory size; it reports {sorted(info)}")
    return value


def computes_on_cuda() -> bool:
    """Return whether MLX computes on an NVIDIA GPU."""
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


def device_model() -> str:
    """Return name and architecture as MLX reports them: `NVIDIA H200, sm_90`."""
    info = mx.device_info()
    said = (info.get(name) for name in ("device_name", "architecture"))
    return ", ".join(str(each) for each in said if each) or str(mx.default_device())
