"""Functions of rows by segments have the bits of their own code."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.demo import MODEL_DIR
from quire.device.device import current_device, open_device
from quire.engine.draft_opening import open_drafters
from quire.executor.guessing import HeadGuesser
from quire.executor.segments.builder import Segment
from quire.executor.segments.rows import RowSegments
from quire.models.weights.loader import open_model


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    open_device("auto", threads=1)
    if current_device().kernels is None:
        pytest.skip("segments are made of the compiled kernels")
    yield
    open_device("auto")


def test_a_draft_head_is_one_segment_with_equal_bits() -> None:
    loaded = open_model(str(MODEL_DIR))
    guesser = open_drafters(loaded, EngineConfig(str(MODEL_DIR), kv_memory=64 << 20)).guesser
    assert isinstance(guesser, HeadGuesser)
    step, compute = guesser.guesser.step, guesser.guesser.compute
    assert isinstance(compute, RowSegments)
    (stage,) = compute.stages.order
    assert isinstance(stage, Segment)
    for rows in (1, 3, 40):
        state = mx.random.normal((rows, 256), key=mx.random.key(rows))
        followed = step.followed(mx.arange(rows) * 7)
        for ours, own in zip(compute(state, followed), step(state, followed), strict=True):
            assert mx.array_equal(ours, own).item()
