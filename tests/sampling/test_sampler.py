"""Draws against a float64 reference, against statistics, and against their neighbours."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from quire.constraints.masks import mask_of
from quire.core.request import SamplingParams
from quire.sampling.rows import History, RowSampling, Sampled
from quire.sampling.sampler import sample
from quire.sampling.uniforms import uniforms
from tests.sampling import reference

pytestmark = pytest.mark.usefixtures("way")

KINDS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=2.5),
    "cold": SamplingParams(temperature=0.05),
    "min_p": SamplingParams(min_p=0.2),
    "top_p": SamplingParams(top_p=0.7),
    "top_k": SamplingParams(top_k=7),
    "gemma": SamplingParams(top_k=64, top_p=0.95),
    "middle": SamplingParams(top_k=200, top_p=0.9, temperature=1.5),
    "wide": SamplingParams(top_k=300),
    "wider than the vocabulary": SamplingParams(top_k=10**6, temperature=0.7),
    "all": SamplingParams(temperature=0.8, min_p=0.02, top_k=40, top_p=0.9),
    "least top_p": SamplingParams(top_p=1e-9),
}


def tokens_of(logits: mx.array, rows: list[RowSampling]) -> list[int]:
    tokens: list[int] = sample(logits, rows).tokens.tolist()
    return tokens


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**{**fields, "seed": seed})


@pytest.mark.parametrize(
    "vocab", [5, 700, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 9001))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_draw_is_the_one_that_float64_makes(kind: str, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 2, (100, vocab)).astype(np.float32)
    rows = [RowSampling(seeded(KINDS[kind], i), 3 * i) for i in range(100)]
    for i, token in enumerate(tokens_of(mx.array(logits), rows)):
        p = reference.probabilities(logits[i].astype(np.float64), KINDS[kind])
        assert reference.could_draw(p, KINDS[kind], token, i, 3 * i), (i, token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vary", ["seed", pytest.param("position", marks=pytest.mark.slow)])
def test_frequencies_are_the_probabilities(kind: str, vary: str) -> None:
    row = np.random.default_rng(1).normal(0, 1.5, 300).astype(np.float32)
    draws = 4000
    rows = [
        RowSampling(seeded(KINDS[kind], i), 0)
        if vary == "seed"
        else RowSampling(seeded(KINDS[kind], 42), i)
        for i in range(draws)
    ]
    tokens = tokens_of(mx.broadcast_to(mx.array(row), (draws, 300)), rows)
    counts = np.bincount(tokens, minlength=300)
    p = reference.probabilities(row.astype(np.float64), KINDS[kind])
    assert counts[p == 0].sum() == 0
    assert reference.chi_square(counts, p) < 5


def test_the_statistic_notices_a_bias() -> None:
    counts = np.random.default_rng(0).multinomial(4000, [0.28, 0.24, 0.24, 0.24])
    assert reference.chi_square(counts, np.full(4, 0.25)) > 5


def test_unlikely_tokens_of_a_large_vocabulary_are_drawn_evenly() -> None:
    vocab, draws = 32768, 64
    row = np.zeros(vocab, dtype=np.float32)
    row[0] = math.log(vocab - 1)  # half of all
    tokens: list[int] = []
    for call in range(4):
        rows = [RowSampling(SamplingParams(seed=call), i) for i in range(draws)]
        tokens += tokens_of(mx.broadcast_to(mx.array(row), (draws, vocab)), rows)
    tail = np.array([t for t in tokens if t > 0])
    assert 128 - 40 < len(tail) < 128 + 40
    quarters = np.histogram(tail, bins=4, range=(0, vocab))[0]
    assert reference.chi_square(quarters, np.full(4, 0.25)) < 5
    assert len(set(tail % reference.BLOCK)) > 50


def test_uniforms_fill_the_square_and_do_not_follow_each_other() -> None:
    pairs = [uniforms(seed, position) for seed in range(64) for position in range(64)]
    assert all(0 <= u < 1 and float(np.float32(u)) == u for pair in pairs for u in pair)
    grid = np.array(pairs).reshape(64, 64, 2)
    for a, b in [
        (grid[..., 0], grid[..., 1]),
        (grid[1:, :, 0], grid[:-1, :, 0]),
        (grid[:, 1:, 0], grid[:, :-1, 0]),
        (grid[1:, :-1, 0], grid[:-1, 1:, 0]),
    ]:
        counts = np.histogram2d(a.ravel(), b.ravel(), bins=8, range=[(0, 1), (0, 1)])[0]
        assert reference.chi_square(counts.ravel().astype(np.int64), np.full(64, 1 / 64)) < 5


def test_seeds_outside_64_bits_still_give_uniforms() -> None:
    assert all(0 <= u < 1 for seed in (-1, 2**64 - 1, 2**70) for u in uniforms(seed, 10**9))
    assert uniforms(-1, 5) == uniforms(2**64 - 1, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [100, 9001])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(kind: str, vocab: int) -> None:
    lowest, highest = 0x64166969B3969A0A, 0xBE12FE39FBD63F3C  # found by inverting the mixer
    assert uniforms(lowest, 0) == (0, 0)
    assert uniforms(highest, 0) == (1 - 2**-24, 1 - 2**-24)
    logits = mx.random.normal((2, vocab), key=mx.random.key(1))
    logits[:, :3] = -math.inf
    logits[:, 40:] = -math.inf
    rows = [RowSampling(seeded(KINDS[kind], seed), 0) for seed in (lowest, highest)]
    tokens = tokens_of(logits, rows)
    assert all(3 <= token < 40 for token in tokens)
    if kind in ("plain", "hot"):
        assert tokens == [3, 39]


def mixed_rows() -> list[RowSampling]:
    """Return rows of all kinds of sampling, with every adjustment in one of them."""
    rows = [RowSampling(seeded(params, i), 11 + i) for i, params in enumerate(KINDS.values())]
    history = History(np.array([1, 2, 2], np.int32), np.array([3, 3], np.int32))
    pending = mx.array([4], dtype=mx.int32)
    extra = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=5),
        SamplingParams(frequency_penalty=0.5, top_k=90, logprobs=20),
        SamplingParams(presence_penalty=-1, logit_bias=((7, 3.0), (8, -100.0)), seed=3),
    ]
    rows += [RowSampling(p, 5, *((history, pending) if p.needs_history else ())) for p in extra]
    rows.append(RowSampling(SamplingParams(logprobs=2), 4, mask=mask_of([2, 70, 90], 97)))
    return rows


def results_of(sampled: Sampled, i: int, wanted: int | None) -> tuple[object, ...]:
    result: tuple[object, ...] = (sampled.tokens[i].item(),)
    if wanted is not None:
        assert sampled.logprobs is not None
        result += (sampled.logprobs[i].item(),)
    if wanted:
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        result += (sampled.top_ids[i, :wanted].tolist(), sampled.top_logprobs[i, :wanted].tolist())
    return result


@pytest.mark.parametrize("vocab", [97, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int, ties: bool) -> None:
    rows = mixed_rows()
    logits = np.random.default_rng(vocab).normal(0, 2, (len(rows), vocab)).astype(np.float32)
    logits = mx.array(np.round(logits * 2) / 2 if ties else logits)
    together = sample(logits, rows)
    order = np.random.default_rng(3).permutation(len(rows))[: len(rows) - 4]
    shuffled = sample(logits[mx.array(order)], [rows[i] for i in order])
    for i, row in enumerate(rows):
        wanted = row.params.logprobs
        alone = results_of(sample(logits[i : i + 1], [row]), 0, wanted)
        assert results_of(together, i, wanted) == alone
        for j in np.flatnonzero(order == i):
            assert results_of(shuffled, int(j), wanted) == alone


def test_greedy_rows_take_the_best_whatever_else_they_say() -> None:
    logits = mx.random.normal((4, 300), key=mx.random.key(0))
    best = mx.argmax(logits, axis=-1).tolist()
    greedy = [
        SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1),
        SamplingParams(temperature=2, top_k=1),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-4),
    ]
    assert tokens_of(logits, [RowSampling(p, 9) for p in greedy]) == best
    beside = [RowSampling(greedy[0], 9), *[RowSampling(SamplingParams(temperature=2), 9)] * 3]
    assert tokens_of(logits, beside)[0] == best[0]


def test_logprobs_are_those_of_the_model_before_anything_is_changed() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (2, 400)).astype(np.float32)
    row = RowSampling(SamplingParams(temperature=0, logit_bias=((17, 100.0),), logprobs=4), 0)
    sampled = sample(mx.array(logits), [row, RowSampling(SamplingParams(top_p=0.5, logprobs=1), 1)])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    tokens = sampled.tokens.tolist()
    assert tokens[0] == 17
    assert sampled.logprobs is not None
    np.testing.assert_allclose(sampled.logprobs, exact[[0, 1], tokens], atol=1e-5)
    assert sampled.top_ids is not None
    order = np.argsort(-exact, axis=-1)[:, :4]
    assert sampled.top_ids.tolist() == order.tolist()
    assert sampled.top_logprobs is not None
    best = np.take_along_axis(exact, order, axis=-1)
    np.testing.assert_allclose(sampled.top_logprobs, best, atol=1e-5)


def test_no_logprobs_unless_asked() -> None:
    logits = mx.zeros((1, 10))
    assert sample(logits, [RowSampling(SamplingParams(), 0)]).logprobs is None
    only_chosen = sample(logits, [RowSampling(SamplingParams(logprobs=0), 0)])
    assert only_chosen.logprobs is not None
    assert only_chosen.top_ids is None


@pytest.mark.parametrize("kind", [*KINDS, "greedy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_harm_no_neighbour(kind: str, bad: float) -> None:
    params = KINDS.get(kind, SamplingParams(temperature=0))
    logits = np.random.default_rng(2).normal(0, 2, (30, 9000)).astype(np.float32)
    rows = [RowSampling(seeded(params, i), i) for i in range(30)]
    clean = tokens_of(mx.array(logits), rows)
    logits[::4] = bad
    logits[2::4, 1::3] = bad
    tokens = tokens_of(mx.array(logits), rows)
    assert tokens[1::2] == clean[1::2]
    assert all(0 <= token < 9000 for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_logits_are_never_drawn(kind: str) -> None:
    logits = np.random.default_rng(2).normal(0, 2, (300, 9001)).astype(np.float32)
    logits[:, np.arange(9001) % 1000 != 0] = -math.inf
    rows = [RowSampling(seeded(KINDS[kind], i), i) for i in range(300)]
    assert all(token % 1000 == 0 for token in tokens_of(mx.array(logits), rows))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_any_number_gives_a_token_of_the_vocabulary(value: float) -> None:
    rows = [RowSampling(p, 1) for p in (*KINDS.values(), SamplingParams(temperature=0))]
    tokens = tokens_of(mx.full((len(rows), 50), value), rows)
    assert all(0 <= token < 50 for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokens_of_the_mask_are_drawn(kind: str) -> None:
    logits = np.random.default_rng(8).normal(0, 4, (300, 500)).astype(np.float32)
    allowed = {3, 130, 131, 499}
    mask = mask_of(allowed, 500)
    rows = [RowSampling(seeded(KINDS[kind], i), i, mask=mask) for i in range(300)]
    tokens = tokens_of(mx.array(logits), rows)
    assert set(tokens) <= allowed
    for i, token in enumerate(tokens):
        x = reference.adjusted(logits[i], KINDS[kind], allowed=allowed)
        p = reference.probabilities(x, KINDS[kind])
        assert reference.could_draw(p, KINDS[kind], token, i, i)


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = mx.array([[3e38, -3e38, 0.0], [1e4, 1e4 - 1, -1e4], [-3e38, -3e38, -3e38]])
    cold = [RowSampling(SamplingParams(temperature=2e-5, top_p=0.9), i) for i in range(3)]
    tokens = tokens_of(logits, cold)
    assert tokens[:2] == [0, 0]
    hot = [RowSampling(SamplingParams(temperature=1e30), i) for i in range(400)]
    drawn = tokens_of(mx.broadcast_to(logits[1], (400, 3)), hot)
    assert reference.chi_square(np.bincount(drawn, minlength=3), np.full(3, 1 / 3)) < 5
