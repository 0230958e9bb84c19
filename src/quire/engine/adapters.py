"""The adapters that requests name: read at the start, and part of the identity of blocks."""

from __future__ import annotations

import json
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.request import Request
from quire.device.device import current_device
from quire.executor.adapters import Adapters
from quire.models.weights.loader import LoadedModel


def read_adapters(adapters: Adapters, loaded: LoadedModel, config: EngineConfig) -> None:
    """Mutates: read the adapters of the configuration into memory.

    Raises:
        ModelError: one cannot be used by requests.
    """
    if config.adapters and config.batch_invariant and current_device().kernel_language:
        raise ModelError("adapters of requests are not offered with batch-invariant on a GPU")
    for name, place in config.adapters:
        adapters.add(name, loaded.read_adapter(place))


def with_adapter(request: Request, adapters: Adapters) -> Request:
    """Return the request with its adapter in the identity of its blocks.

    Raises:
        RequestError: there is no adapter of this name.
    """
    if not request.adapter:
        return request
    if request.adapter not in adapters:
        raise RequestError(
            f"There is no adapter {request.adapter!r} here.", param="model", code="no_adapter"
        )
    salt = json.dumps([adapters.identity(request.adapter), request.cache_salt])
    return replace(request, cache_salt=salt)
