"""Rows that see keys in no block beside those in blocks, whatever other rows a step has."""

from __future__ import annotations

import mlx.core as mx

from quire.attention.backend import KeysBeside, Scoring
from quire.attention.metadata import build_metadata
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows

SIZE, HEADS, DIM = 4, 4, 64
LENGTHS = (10, 90, 6, 200, 220)
"""Some have many blocks, so that rows are attended to in several batches."""


def test_each_row_sees_its_own_keys_beside() -> None:
    spec, format = FullKV(2, DIM), KVFormat()
    store = make_store(LayerShape(2, DIM, DIM, SIZE, mx.float32), format)
    store.resize(60, ())
    mx.random.seed(2)
    for each in store.arrays():
        each[:] = mx.random.normal(each.shape)
    q = mx.random.normal((len(LENGTHS), HEADS, DIM))
    keys, values = (mx.random.normal((len(LENGTHS), 2, 3, DIM)) for _ in range(2))

    def attended(which: slice) -> mx.array:
        rows = [
            HandRows(length - 1, 1, format, (range(-(-length // SIZE)),), (0,))
            for length in LENGTHS[which]
        ]
        prepared = ReferenceBackend().prepare(build_metadata(0, spec, rows, SIZE))
        beside = KeysBeside(keys[which], values[which])
        return prepared.forward(q[which], store, None, scoring=Scoring(0.125, beside=beside))

    whole = attended(slice(0, len(LENGTHS)))
    for number in range(len(LENGTHS)):
        own = attended(slice(number, number + 1))
        assert mx.allclose(whole[number : number + 1], own, atol=1e-5)
