"""Several backends in one step: each serves the rows that it can, the reference the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import (
    AttentionBackend,
    AttentionCase,
    Backends,
    PreparedAttention,
    Scoring,
)
from quire.attention.metadata import AttentionMetadata
from quire.attention.reference import ReferenceBackend
from quire.attention.step import Attention
from quire.cache.formats.base import LayerStore, WrittenBlocks
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVLayout, SharedKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows

SIZE, HEADS = 32, 4
LAYERS = (FullKV(2, 32), FullKV(2, 32), WindowKV(1, 64, 40, value_dim=32), SharedKV(0))
PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4, skip_layers=(1,))
Seen = tuple[str, int, tuple[int, ...]]
"""Record of what a backend computed: the format as stored, head size, rows of each sequence."""


@dataclass
class Other(AttentionBackend):
    """Computes as the reference does, for some cases, and notes what.

    Attributes:
        wants: the cases that it serves.
        prepared: metadata that it was given.
        seen: what it computed.
    """

    wants: Callable[[AttentionCase], bool]
    prepared: list[AttentionMetadata] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    __hash__ = object.__hash__

    def serves(self, case: AttentionCase) -> bool:
        return self.wants(case)

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        self.prepared.append(metadata)
        return OtherPrepared(metadata, self.seen)


class OtherPrepared(PreparedAttention):
    def __init__(self, metadata: AttentionMetadata, seen: list[Seen]) -> None:
        self._metadata = metadata
        self._seen = seen
        self._reference = ReferenceBackend().prepare(metadata)

    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        counts = tuple(self._metadata.counts.tolist())
        self._seen.append((store.format.name, q.shape[-1], counts))
        assert len(q) == sum(counts)
        if store.has_tail:
            chunks = 0 if written is None else written.chunks
            assert chunks == sum(count > 1 for count in counts)
        return self._reference.forward(q, store, written, scoring)


def rows() -> list[HandRows]:
    """Draw rows of both formats, single rows between chunks."""
    spans = [
        (PLAIN, 70, 1),
        (PLAIN, 10, 40),
        (PLAIN, 3, 1),
        (PAGE, 0, 70),
        (PAGE, 95, 1),
        (PAGE, 31, 1),
        (PAGE, 20, 3),
        (PAGE, 64, 33),
    ]
    return [
        HandRows(
            start, count, format, (range(4 * n, 4 * n + 4),) * 2, (n, n) if format.has_tail else ()
        )
        for n, (format, start, count) in enumerate(spans)
    ]


def run(backends: Sequence[AttentionBackend], softcap: float | None = None) -> list[np.ndarray]:
    """Run a step of all layers over blocks of zeros; return what each layer gets."""
    layout = KVLayout.of(LAYERS)
    pools = Pools(layout.groups, SIZE, mx.float32)
    for format in (PLAIN, PAGE):
        for group in layout.groups:
            pools.kv(group.index, format).resize(32, (), tails=False)
            pools.kv(group.index, format).resize(8, (), tails=True)
    step = Attention(layout, pools, Backends(backends)).step(rows())
    total = sum(each.count for each in rows())
    outs = []
    for layer, spec in enumerate((LAYERS[0], LAYERS[1], LAYERS[2], LAYERS[0])):
        assert spec.attention is not None
        heads, dim, value_dim = spec.attention.kv_heads, spec.attention.head_dim, spec.value_dim
        key = mx.random.key(layer)
        q = mx.random.normal((total, HEADS, dim), key=key)
        k = mx.random.normal((total, heads, dim), key=mx.random.split(key)[0])
        v = mx.random.normal((total, heads, value_dim), key=mx.random.split(key)[1])
        new = (None, None) if layer == 3 else (k, v)
        outs.append(np.array(step.attend(layer, q, *new, Scoring(dim**-0.5, softcap))))
        assert outs[-1].shape == (total, HEADS, value_dim)
    return outs


WANTS: dict[str, tuple[Callable[[AttentionCase], bool], set[Seen]]] = {
    "a format": (
        lambda case: case.format.scheme == "page",
        {("page-4", 32, (70, 1, 1, 3, 33)), ("page-4", 64, (70, 1, 1, 3, 33))},
    ),
    "a head size": (
        lambda case: case.spec.head_dim == 64 and case.spec.value_dim == 32,
        {("plain", 64, (1, 40, 1)), ("page-4", 64, (70, 1, 1, 3, 33))},
    ),
    "single rows of full attention": (
        lambda case: case.rows == 1 and case.spec.sees_all,
        {("plain", 32, (1,)), ("plain", 32, (1, 1)), ("page-4", 32, (1, 1))},
    ),
    "a few rows": (
        lambda case: case.rows <= 3,
        {
            *(("plain", dim, (1,)) for dim in (32, 64)),
            *(("page-4", dim, (1, 1, 3)) for dim in (32, 64)),
            ("plain", 32, (1, 1, 3)),  # the layer that the packed format skips
        },
    ),
    "nothing": (lambda case: False, set()),
}


@pytest.mark.parametrize(("wants", "seen"), WANTS.values(), ids=WANTS)
def test_each_backend_gets_what_it_serves(
    wants: Callable[[AttentionCase], bool], seen: set[Seen]
) -> None:
    other = Other(wants)
    got = run([other, ReferenceBackend()])
    assert set(other.seen) == seen
    for mine, alone in zip(got, run([ReferenceBackend()]), strict=True):
        np.testing.assert_array_equal(mine, alone)


def test_a_step_is_prepared_once_for_each_group_and_format() -> None:
    other = Other(lambda case: True)
    run([other])
    assert [(each.spec.head_dim, each.format) for each in other.prepared] == [
        (32, PLAIN),
        (32, PAGE),
        (64, PLAIN),
        (64, PAGE),
    ]
    assert len(other.seen) == 2 * len(LAYERS)


def test_a_backend_may_leave_capped_logits_to_the_reference() -> None:
    other = Other(lambda case: not case.softcap)
    run([other, ReferenceBackend()], softcap=2.0)
    assert not other.seen


def test_the_last_backend_must_serve_everything() -> None:
    with pytest.raises(LookupError, match="plain"):
        run([Other(lambda case: case.format.scheme != "plain")])
