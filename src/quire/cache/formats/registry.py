"""The schemes by name. A new one: a module with a `LayerStore`, a line here and one in `choose`."""

from __future__ import annotations

from quire.cache.formats.base import LayerStore
from quire.cache.formats.page import PageStore
from quire.cache.formats.plain import PlainStore
from quire.cache.formats.turbo import TurboStore
from quire.cache.formats.uniform import UniformStore
from quire.core.kv_format import KVFormat

SCHEMES: dict[str, type[LayerStore]] = {
    "plain": PlainStore,
    "page": PageStore,
    "uniform": UniformStore,
    "turbo": TurboStore,
}


def store_type(format: KVFormat, layer: int) -> type[LayerStore]:
    """The class that stores a layer's pages in a format; skipped layers stay plain."""
    return PlainStore if layer in format.skip_layers else SCHEMES[format.scheme]
