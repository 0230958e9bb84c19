"""`EngineConfig.batch_invariant`: a request's logits have the same bits alone and in any batch.

The compiled CPU kernels give that anyway. On CUDA all rows, a prompt's too, go through recorded
steps, whose kernels add up each row's sums in one order.
"""

from __future__ import annotations

from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.device.device import current_device
from quire.engine.decode.served import MOST_ROWS

_FIELD = "batch-invariant"


def limited(config: EngineConfig) -> EngineConfig:
    """With steps no larger than can be computed so.

    Raises:
        ModelError: nothing on this device computes rows alike in any batch.
    """
    device = current_device()
    if not config.batch_invariant or device.kernels is not None:
        return config
    if device.kernel_language != "cuda":
        raise ModelError(f"{_FIELD}: needs an NVIDIA GPU, or a CPU with the compiled kernels")
    if config.kv_format.scheme != "plain" or config.kv_format.dtype:
        raise ModelError(f"{_FIELD}: the KV cache must be plain, not {config.kv_format.name}")
    return replace(
        config,
        max_step_tokens=min(MOST_ROWS, config.max_step_tokens),
        max_sequences=min(MOST_ROWS, config.max_sequences),
    )


def check_request(config: EngineConfig, request: Request, format: KVFormat) -> None:
    """Whether a request can be computed so.

    Raises:
        RequestError: it cannot; names the field.
    """
    if not config.batch_invariant or current_device().kernels is not None:
        return
    if request.media:
        raise RequestError(f"media: this server runs with --{_FIELD}, for text alone")
    if not request.task.samples:
        raise RequestError(f"this server runs with --{_FIELD}, which generates tokens alone")
    if format.scheme != "plain" or format.dtype:
        message = f"kv_bits: this server runs with --{_FIELD}, for plain KV caches alone"
        raise RequestError(message, param="kv_bits")
