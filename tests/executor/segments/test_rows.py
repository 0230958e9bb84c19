"""Functions of rows by segments have the bits of their own code."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.demo import MODEL_DIR
from quire.device.device import current_device
from quire.device.operations import Operations
from quire.engine.draft_opening import open_drafters
from quire.executor.guessing import DraftHeadGuesser
from quire.executor.segments.builder import Segment
from quire.executor.segments.rows import LogitsSegment, RowSegments
from quire.executor.segments.runner import open_segments
from quire.models.draft_head import Guesses, TokenGuesser
from quire.models.weights.loader import open_model


def drafting_guesser() -> TokenGuesser:
    loaded = open_model(str(MODEL_DIR))
    guesser = open_drafters(loaded, EngineConfig(str(MODEL_DIR), kv_memory=64 << 20)).guesser
    assert isinstance(guesser, DraftHeadGuesser)
    return guesser.guesser


def test_several_guesses_of_a_head_are_one_segment_with_equal_bits() -> None:
    guesser = drafting_guesser()
    for count in (1, 4):
        compute = guesser.computing(count)
        assert isinstance(compute, RowSegments)
        (stage,) = compute.stages.order
        assert isinstance(stage, Segment)
        for rows in (1, 3, 40):
            state = mx.random.normal((rows, 256), key=mx.random.key(rows))
            tokens = (mx.arange(rows) * 7).astype(mx.int32)
            own, chances = Guesses(guesser.step, count)(state, tokens)
            assert own.shape == chances.shape == (rows, count)
            assert mx.array_equal(guesser(state, tokens, count), own).item()
            assert mx.allclose(compute(state, tokens)[1], chances).item()


def test_guesses_end_where_they_are_unlikely() -> None:
    guesses = mx.array([[5, 6, 7], [0, 1, 2], [3, 4, 5]], mx.int32)
    chances = mx.array([[0.9, 0.5, 0.9], [0.3, 1.0, 1.0], [1.0, 1.0, 0.4]])
    for operations in (current_device().operations, Operations()):
        found = operations.likely_only(guesses, chances, 0.4)
        assert found.tolist() == [[5, 6, 7], [~0, ~1, ~2], [3, 4, 5]]
        found = operations.likely_only(guesses, chances, 0.45)
        assert found.tolist() == [[5, 6, ~7], [~0, ~1, ~2], [3, 4, ~5]]


def test_rows_without_a_token_are_left_out() -> None:
    kernels = current_device().kernels
    assert kernels is not None
    segment = kernels.ops.Segment()
    tokens, x = segment.given(1, integers=True), segment.given(3)
    table = mx.arange(12, dtype=mx.float32).reshape(4, 3)
    row, total = segment.value(3), segment.value(3)
    segment.look_up(tokens, table, row)
    segment.binary("Add", row, [1], x, [1], total, [3])
    segment.output(total, [3])
    segment.leave_out_by(tokens)
    segment.finish()
    given = mx.array([3, -1, 0, -7, -4], mx.int32), mx.ones((5, 3))
    (found,) = segment.run(list(given))
    assert found.tolist() == [[10, 11, 12], [0, 0, 0], [1, 2, 3], [0, 0, 0], [0, 0, 0]]


def test_a_head_is_gated_by_the_kernel_of_gates() -> None:
    """MLX's sigmoid, element by element, took a third of the guesses' time."""
    compute = drafting_guesser().computing(2)
    assert isinstance(compute, RowSegments)
    kinds = Counter(node.kind for node in compute.stages.program.nodes)
    assert kinds["gated"] == 2
    assert kinds["Sigmoid"] == 0


def test_logits_are_one_segment_with_equal_bits() -> None:
    model = open_model(str(MODEL_DIR)).model
    segments = open_segments(model)
    assert segments is not None
    logits = segments.logits_of
    assert isinstance(logits, LogitsSegment)
    assert logits.rows is not None
    for rows in (1, 5, 40):
        hidden = mx.random.normal((rows, 256), key=mx.random.key(rows))
        assert mx.array_equal(logits(hidden), model.logits(hidden)).item()
