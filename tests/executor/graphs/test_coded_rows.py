"""Rows over codes as recorded steps compute them, emulated: values shorter than keys, latents, and
heads whose size is no power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.executor.graphs.layers import HeldLayer
from tests.executor.graphs.test_page_rows import (
    SCALE,
    STEPS,
    TABLES,
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
    layer = HeldLayer(case.spec, case.format, TABLES, blocks=5, tails=2)
    steps = STEPS if case.format.has_tail else STEPS[1:4]
    reached = [0] * len(TABLES)
    for number, counts in enumerate(steps):
        projected = layer.projected(sum(counts), case.heads, number)
        assert layer.error(layer.metadata(reached, counts), projected, SCALE) < ERROR
        reached = [start + count for start, count in zip(reached, counts, strict=True)]
    if case.format.has_tail:
        assert_blocks_are_alike(layer, reached)
