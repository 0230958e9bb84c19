"""Examples of media, by which a GPU loads the kernels of encoders at the start."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.models.registry import build
from tests.support.media_items import CONFIGS, encoders

KINDS = {encoder: case for case, encoder in reversed(encoders().items())}
"""The first configuration and media kind of each class of encoder."""


@pytest.mark.parametrize(("name", "kind"), sorted(KINDS.values()))
def test_encoders_take_their_examples(name: str, kind: str) -> None:
    encoder = build(CONFIGS[name]).encoders[kind]
    shape = encoder.example_shape
    rows, *_ = encoder(mx.zeros((encoder.feature_bytes(shape),), mx.uint8), shape)
    mx.eval(rows)
    assert len(rows) == (encoder.cross_keys(shape) or encoder.rows(shape))
