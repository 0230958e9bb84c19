"""DRY against its definition, token by token in plain Python."""

from __future__ import annotations

from array import array

import mlx.core as mx
import numpy as np
import pytest

from quire.constraints.masks import mask_of
from quire.core.request import SamplingParams
from quire.sampling.adjust import adjust
from quire.sampling.history import RowState
from quire.sampling.rows import History, RowSampling
from tests.sampling.reference import dry_penalties

VOCAB = 12
SETTINGS = [
    SamplingParams(dry_multiplier=0.8),
    SamplingParams(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=1),
    SamplingParams(dry_multiplier=1.0, dry_allowed_length=0, dry_penalty_last_n=20),
    SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=1),
    SamplingParams(dry_multiplier=2.0, dry_breakers=(2, 5)),
    SamplingParams(dry_multiplier=2.0, dry_base=1.0, dry_allowed_length=4),
]


def rows_of(tokens: list[int], params: SamplingParams) -> tuple[RowSampling, RowSampling]:
    """Return a row twice: with its last token on the host, and on the device only."""
    prompt, answer = (np.array(part, dtype=np.int32) for part in (tokens[:15], tokens[15:]))
    early = RowSampling(params, 9, History(prompt, answer))
    late = RowSampling(params, 9, History(prompt, answer[:-1]), mx.array(tokens[-1:]))
    return early, late


@pytest.mark.parametrize("params", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("kinds", [2, 4, 14])
def test_penalties_are_those_of_the_definition(params: SamplingParams, kinds: int) -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(1))
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, kinds, 40).tolist()
        tokens[-1] %= VOCAB  # it was sampled
        early, late = rows_of(tokens, params)
        out = adjust(logits, [early])
        np.testing.assert_allclose(
            np.array(out[0]),
            np.array(logits[0]) - dry_penalties(tokens, params, VOCAB),
            rtol=1e-5,
            atol=1e-5,
        )
        assert mx.array_equal(adjust(logits, [late]), out), "a pending token counts as read"


def test_rows_alone_and_in_company_are_the_same() -> None:
    rows = []
    for seed, params in enumerate(SETTINGS):
        tokens = np.random.default_rng(seed).integers(0, 3, 30 + seed).tolist()
        rows += rows_of(tokens, params)
    rows.append(RowSampling(SamplingParams(), 3))
    logits = mx.random.normal((len(rows), VOCAB), key=mx.random.key(2))
    together = adjust(logits, rows)
    for i, row in enumerate(rows):
        assert mx.array_equal(adjust(logits[i : i + 1], [row])[0], together[i])


def test_a_long_repeat_leaves_a_mask_its_token() -> None:
    params = SamplingParams(dry_multiplier=100.0, dry_base=100.0)
    history = History(np.array([7] * 300, np.int32), np.array([], np.int32))
    row = RowSampling(params, 300, history, mask=mask_of({7}, VOCAB))
    out = adjust(mx.zeros((1, VOCAB)), [row])
    assert mx.isfinite(out[0]).tolist() == [token == 7 for token in range(VOCAB)]
    assert mx.argmax(out[0]).item() == 7


def test_short_contexts_have_no_penalty() -> None:
    for tokens in ([], [3]):
        history = History(np.array(tokens, np.int32), np.array([], np.int32))
        for pending in (None, mx.array([4], dtype=mx.int32)):
            row = RowSampling(SETTINGS[1], 1, history, pending)
            assert mx.array_equal(adjust(mx.ones((1, VOCAB)), [row]), mx.ones((1, VOCAB)))


def test_the_prompt_keeps_its_order() -> None:
    prompt = array("i", [5, 3, 5, 3, 9])
    state = RowState(SETTINGS[0], prompt)
    (first, second) = state.rows(prompt + array("i", [1]), 6, drafts=(2,))
    for row, answer in ((first, [1]), (second, [1, 2])):
        assert row.history is not None
        assert row.history.prompt.tolist() == list(prompt)
        assert row.history.generated.tolist() == answer
