"""The LoRA adapters of an engine: loading, unloading, and their part in block keys."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.request import Request
from quire.device.device import current_device
from quire.executor.adapters import Adapters
from quire.models.weights.loader import LoadedModel

log = logging.getLogger("quire.engine")


class RequestAdapters:
    """The LoRA adapters that requests of an engine may name.

    Args:
        adapters: the adapters in memory.

    Raises:
        ModelError: an adapter of the configuration cannot be used by requests.
    """

    def __init__(
        self,
        adapters: Adapters,
        loaded: LoadedModel,
        config: EngineConfig,
    ) -> None:
        self._adapters = adapters
        self._loaded = loaded
        self._offered = not (config.batch_invariant and current_device().kernel_language)
        for name, place in config.adapters:
            self._add(name, place)

    def change(self, name: str, place: str | None) -> str:
        """Load an adapter, or unload it if `place` is None; no request may use it then.

        Returns:
            Why nothing was changed; empty on success.
        """
        try:
            if place is not None:
                self._add(name, place)
            elif name in self._adapters:
                self._adapters.remove(name)
        except ModelError as error:
            return str(error)
        except Exception as error:  # files of any kind, on any disk: streams must go on
            log.exception("the adapter %r cannot be loaded", name)
            return f"the adapter cannot be loaded: {type(error).__name__}: {str(error)[:200]}"
        return ""

    def _add(self, name: str, place: str) -> None:
        if not self._offered:
            raise ModelError("adapters of requests are not supported with batch-invariant on a GPU")
        self._adapters.add(name, self._loaded.read_adapter(place))

    def named(self, request: Request) -> Request:
        """Return the request with its adapter's identity in its block keys.

        Raises:
            RequestError: there is no adapter of this name.
        """
        if not request.adapter:
            return request
        if request.adapter not in self._adapters:
            raise RequestError(
                f"There is no adapter {request.adapter!r}.", param="model", code="no_adapter"
            )
        salt = json.dumps([self._adapters.identity(request.adapter), request.cache_salt])
        return replace(request, cache_salt=salt)
