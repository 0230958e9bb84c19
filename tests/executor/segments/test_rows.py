"""Functions of rows by segments have the bits of their own code."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.demo import MODEL_DIR
from quire.engine.draft_opening import open_drafters
from quire.executor.guessing import HeadGuesser
from quire.executor.segments.builder import Segment
from quire.executor.segments.rows import LogitsSegment, RowSegments
from quire.executor.segments.runner import open_segments
from quire.models.draft_head import Guesses, TokenGuesser
from quire.models.weights.loader import open_model


def drafting_guesser() -> TokenGuesser:
    loaded = open_model(str(MODEL_DIR))
    guesser = open_drafters(loaded, EngineConfig(str(MODEL_DIR), kv_memory=64 << 20)).guesser
    assert isinstance(guesser, HeadGuesser)
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
            (own,) = Guesses(guesser.step, count)(state, tokens)
            assert own.shape == (rows, count)
            assert mx.array_equal(guesser(state, tokens, count), own).item()


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
