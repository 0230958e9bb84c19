"""`EngineConfig.batch_invariant`: a request's logits have the same bits alone and in any batch.

The compiled CPU kernels give that anyway. On CUDA all rows, prompts included, run as graphs, whose
kernels add each row's sums in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.device.device import current_device
from quire.executor.graphs.graph_cache import MAX_ROWS

_FIELD = "batch_invariant"


def limited(config: EngineConfig) -> EngineConfig:
    """Return the settings with steps small enough to be batch-invariant.

    Raises:
        ModelError: no executor of this device is batch-invariant.
    """
    if not _runs_graphs(config):
        return config
    if current_device().kernel_language != "cuda":
        raise ModelError("needs an NVIDIA GPU, or a CPU with the compiled kernels", setting=_FIELD)
    return replace(
        config,
        max_step_tokens=min(MAX_ROWS, config.max_step_tokens),
        max_sequences=min(MAX_ROWS, config.max_sequences),
    )


def check_format(
    config: EngineConfig, format: KVFormat, graphed: Callable[[KVFormat], bool]
) -> None:
    """Raise `ModelError` if rows over the server's KV format cannot be batch-invariant.

    Args:
        graphed: returns whether CUDA graphs support a format.

    Raises:
        ModelError: they cannot.
    """
    if _runs_graphs(config) and not graphed(format):
        raise ModelError(f"not possible with a {format.name} KV cache on this GPU", setting=_FIELD)


def check_invariant(config: EngineConfig, request: Request) -> None:
    """Raise `RequestError`, naming the field, if a request's bits would depend on its batch."""
    if not _runs_graphs(config):
        return
    if request.media:
        raise RequestError(f"media: this server runs with --{_FIELD}, which supports text only")
    if not request.task.samples:
        raise RequestError(f"this server runs with --{_FIELD}, which supports no embeddings")
    # A graph is recorded for one format.
    if request.kv_format not in (None, config.kv_format):
        own = config.kv_format.name
        message = f"kv_bits: this server runs with --{_FIELD}, for its own KV format alone, {own}"
        raise RequestError(message, param="kv_bits")


def _runs_graphs(config: EngineConfig) -> bool:
    return config.batch_invariant and current_device().kernels is None
