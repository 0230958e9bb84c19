"""The schemes by name. A new one needs a `LayerStore`, a line here and its bits in
`core.kv_choice`.
"""

from __future__ import annotations

from quire.cache.formats.base import LayerShape, LayerStore
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


def store_type(format: KVFormat) -> type[LayerStore]:
    """Return the class that stores a layer in a format, see `KVFormat.of_layer`."""
    return SCHEMES[format.scheme]


def block_bytes(shape: LayerShape, format: KVFormat) -> int:
    """Return the bytes of one block of a layer, an indexer's keys included."""
    size = store_type(format).block_bytes(shape, format)
    return size if shape.index is None else size + PlainStore.block_bytes(shape.index, KVFormat())


def make_store(shape: LayerShape, format: KVFormat) -> LayerStore:
    """Return an empty store of a layer."""
    return store_type(format)(shape, format)


def make_index_store(shape: LayerShape) -> LayerStore | None:
    """Return an empty store of an indexer's keys in the layer's blocks; None without one."""
    return None if shape.index is None else PlainStore(shape.index, KVFormat())
