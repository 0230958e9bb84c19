"""The pool class of each KV format."""

from __future__ import annotations

from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention.coded_pools import PagePool, TokenPool
from quire.executor.graphs.attention.pools import LayerPool, PlainPool

_KINDS: dict[str, type[LayerPool]] = {
    "plain": PlainPool,
    "page": PagePool,
    "uniform": TokenPool,
    "turbo": TokenPool,
}


def kind_of(format: KVFormat) -> type[LayerPool]:
    """Return the pool class for a layer's format; see `KVFormat.of_layer`."""
    return _KINDS[format.scheme]
