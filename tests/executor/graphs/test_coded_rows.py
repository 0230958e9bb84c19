"""Rows over codes as recorded steps compute them, emulated: values shorter than keys, latents, and
heads whose size is no power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest

from quire.attention.backend import Scoring
from quire.attention.reference import ReferenceBackend
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.executor.graphs.test_page_rows import (
    SCALE,
    STEPS,
    TABLES,
    Layer,
    assert_blocks_are_alike,
)
from tests.support.emulated_metal import why_not

ERROR = 1.5e-2


@dataclass(frozen=True)
class Case:
    """A kind of attention over a format."""

    spec: AttentionSpec
    heads: int
    format: KVFormat

    def __str__(self) -> str:
        kind = "latents" if self.spec.value_in_key else "heads"
        return f"{kind} {self.spec.head_dim}/{self.spec.value_dim} {self.format.name}"


SHORT = FullKV(2, 192, value_dim=128)
LATENTS = FullKV(1, 576, value_dim=512, value_in_key=True)
SMALL = FullKV(1, 288, value_dim=256, value_in_key=True)
EVERYDAY = Case(FullKV(1, 96, value_dim=64, value_in_key=True), 4, KVFormat("turbo", 3, 3))
FORMATS = [
    KVFormat("page", 4, 4),
    KVFormat("page", 3, 8),
    KVFormat("uniform", 4, 4),
    KVFormat("uniform", 8, 5),
    KVFormat("turbo", 4, 4),
    KVFormat("turbo", 3.5, 3.5),
]
CASES = [
    *(Case(SHORT, 4, each) for each in FORMATS),
    *(Case(LATENTS, 20, each) for each in FORMATS),
    *(Case(SMALL, 8, each) for each in FORMATS),
    *(Case(WindowKV(2, 96, 100), 6, each) for each in FORMATS[::2]),
    Case(FullKV(1, 320, value_dim=256, value_in_key=True), 4, KVFormat("turbo", 4, 4)),
]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "case", [EVERYDAY, *(pytest.param(each, marks=pytest.mark.slow) for each in CASES)], ids=str
)
def test_rows_see_what_the_format_says(case: Case) -> None:
    """Steps of some rows against the reference, a step at a time."""
    spec, heads = case.spec, {"q": case.heads, "k": case.spec.kv_heads, "v": case.spec.kv_heads}
    coded, expected = (Layer(spec, case.format) for _ in range(2))
    steps = STEPS if case.format.has_tail else STEPS[1:4]
    reached = [0] * len(TABLES)
    for number, counts in enumerate(steps):
        projected = {
            name: _normal((sum(counts), own, spec.head_dim), 3 * number + n)
            for n, (name, own) in enumerate(heads.items())
        }
        keys = projected["k"] if spec.value_in_key else projected["v"]
        projected["v"] = keys[..., : spec.value_dim]
        metadata = coded.metadata(reached, counts)
        found = coded.step(metadata, projected)
        written = expected.store.write(projected["k"], projected["v"], metadata.slots)
        prepared = ReferenceBackend().prepare(metadata)
        scoring = Scoring(SCALE, None, None)
        wanted = prepared.forward(projected["q"], expected.store, written, scoring)
        errors = _norms(found - wanted) / _norms(wanted)
        assert errors.max().item() < ERROR
        reached = [start + count for start, count in zip(reached, counts, strict=True)]
    if case.format.has_tail:
        assert_blocks_are_alike(coded.store, expected.store, reached)


def _norms(x: mx.array) -> mx.array:
    """Return the norms of rows `[T, heads, dim]`."""
    return mx.linalg.norm(x.astype(mx.float32), axis=(1, 2))


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16)
