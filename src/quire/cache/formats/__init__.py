"""KV formats: how pages are stored, written and read. One module a scheme, one line here.

Adding a scheme: a module with a `LayerStore`, and its line in `SCHEMES`.
"""

from __future__ import annotations

from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.plain import PlainStore
from quire.cache.specs import KVFormat

SCHEMES: dict[str, type[LayerStore]] = {
    "plain": PlainStore,
}


def store_type(format: KVFormat, layer: int) -> type[LayerStore]:
    """The class that stores a layer's pages in a format; skipped layers stay plain."""
    return PlainStore if layer in format.skip_layers else SCHEMES[format.scheme]


__all__ = ["SCHEMES", "LayerShape", "LayerStore", "store_type"]
