"""Logit bias, penalties and masks, against the float64 reference."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from quire.constraints.masks import mask_of
from quire.core.request import SamplingParams
from quire.sampling.adjust import adjust
from quire.sampling.rows import History, RowSampling
from tests.sampling import reference

VOCAB = 90
PROMPT = [5, 5, 6, 7, 0]
ANSWER = [6, 8, 8, 8, 89]


def history(prompt: list[int] = PROMPT, answer: list[int] = ANSWER) -> History:
    return History(np.array(prompt, np.int32), np.array(answer, np.int32))


def some_logits(rows: int = 1) -> mx.array:
    return mx.random.normal((rows, VOCAB), key=mx.random.key(4)) * 3


CHANGES = [
    SamplingParams(logit_bias=((3, 2.5), (89, -100.0), (3, 1.0))),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.25),
    SamplingParams(frequency_penalty=-0.5, presence_penalty=-2),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.5, frequency_penalty=1, logit_bias=((8, -3.0),)),
]


@pytest.mark.parametrize("pending", [None, 8, 42])
def test_each_change_is_the_references(pending: int | None) -> None:
    logits = some_logits(len(CHANGES))
    token = None if pending is None else mx.array([pending], dtype=mx.int32)
    rows = [
        RowSampling(p, 9, history(), token) if p.needs_history else RowSampling(p, 9)
        for p in CHANGES
    ]
    out = np.array(adjust(logits, rows))
    for i, params in enumerate(CHANGES):
        past = history() if params.needs_history else None
        want = reference.adjusted(np.array(logits[i]), params, past, pending)
        np.testing.assert_allclose(out[i], want, atol=1e-5)


def test_a_pending_token_counts_as_if_it_had_been_read() -> None:
    params = SamplingParams(frequency_penalty=0.3, repetition_penalty=1.2)
    late = RowSampling(params, 9, history(), mx.array([8], dtype=mx.int32))
    early = RowSampling(params, 9, history(answer=[*ANSWER, 8]))
    logits = some_logits()
    assert mx.array_equal(adjust(logits, [late]), adjust(logits, [early]))


def test_rows_that_ask_for_nothing_are_left_as_they_are() -> None:
    logits = some_logits(3)
    plain = RowSampling(SamplingParams(top_p=0.5), 0)
    assert adjust(logits, [plain] * 3) is logits
    changed = RowSampling(CHANGES[5], 1, history())
    out = adjust(logits, [plain, changed, RowSampling(plain.params, 0, mask=mask_of([1], VOCAB))])
    assert mx.array_equal(out[0], logits[0])
    assert not mx.array_equal(out[1], logits[1])
    assert mx.isfinite(out[2]).sum().item() == 1


def test_tokens_without_a_logit_are_passed_over() -> None:
    params = SamplingParams(repetition_penalty=2, presence_penalty=1)
    odd = RowSampling(params, 0, history([-1, VOCAB, 10**6, 5], [VOCAB + 3]))
    even = RowSampling(params, 0, history([5], []))
    logits = some_logits()
    assert mx.array_equal(adjust(logits, [odd]), adjust(logits, [even]))


def test_an_empty_history_changes_nothing() -> None:
    row = RowSampling(SamplingParams(repetition_penalty=2), 0, history([], []))
    logits = some_logits()
    assert mx.array_equal(adjust(logits, [row]), logits)


def test_penalties_leave_impossible_tokens_impossible() -> None:
    logits = mx.full((1, VOCAB), -math.inf)
    out = adjust(logits, [RowSampling(CHANGES[5], 0, history())])
    assert mx.all(out == -math.inf).item()


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_never_reaches_the_device(token: int) -> None:
    row = RowSampling(SamplingParams(logit_bias=((token, 1.0),)), 0)
    with pytest.raises(IndexError, match="logit_bias"):
        adjust(some_logits(), [row])


def test_penalties_need_the_history() -> None:
    with pytest.raises(ValueError, match="history"):
        adjust(some_logits(), [RowSampling(SamplingParams(presence_penalty=1), 0)])


@pytest.mark.parametrize("words_for", [64, VOCAB, VOCAB + 100])
def test_a_mask_allows_its_tokens_and_none_past_its_end(words_for: int) -> None:
    allowed = [0, 31, 32, 63] + ([89] if words_for >= VOCAB else [])
    logits = some_logits()
    mask = mask_of(allowed, words_for)
    out = np.array(adjust(logits, [RowSampling(SamplingParams(), 0, mask=mask)]))[0]
    assert np.flatnonzero(np.isfinite(out)).tolist() == allowed
    assert out[allowed].tolist() == np.array(logits)[0, allowed].tolist()
