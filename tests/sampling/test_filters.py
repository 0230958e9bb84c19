"""Locally typical sampling and XTC against float64 numpy, written from their definitions."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from quire.core.request import SamplingParams
from quire.sampling.rows import RowSampling
from quire.sampling.sampler import sample
from quire.sampling.uniforms import excludes_top_choices, uniforms
from tests.sampling import reference

pytestmark = pytest.mark.usefixtures("way")

KINDS = {
    "typical": SamplingParams(typical_p=0.3),
    "least typical": SamplingParams(typical_p=1e-7),
    "typical of few": SamplingParams(typical_p=0.5, top_k=20, temperature=1.5),
    "typical and top_p": SamplingParams(typical_p=0.8, top_p=0.6, min_p=0.01),
    "xtc": SamplingParams(xtc_probability=1.0, xtc_threshold=0.05),
    "xtc at times": SamplingParams(xtc_probability=0.5, xtc_threshold=0.03),
    "xtc above a half": SamplingParams(xtc_probability=1.0, xtc_threshold=0.6),
    "all": SamplingParams(typical_p=0.9, top_p=0.9, xtc_probability=0.7, xtc_threshold=0.1),
}
ROWS = 60


def typical(p: reference.Floats, mass: float) -> reference.Floats:
    """Return the tokens nearest to the expected surprise, up to a mass."""
    ids = np.flatnonzero(p)
    surprise = -np.log(p[ids])
    nearest = ids[np.argsort(np.abs(surprise - (p[ids] * surprise).sum()), kind="stable")]
    kept = np.zeros_like(p)
    for token in nearest:
        if kept.sum() >= mass:
            break
        kept[token] = p[token]
    return kept


def probabilities(x: reference.Floats, row: RowSampling) -> reference.Floats:
    params = row.params
    p = reference.probabilities(x, replace(params, top_p=1.0))
    if params.typical_p < 1:
        p = typical(p, params.typical_p)
        p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        p /= p.sum()
    likely = np.flatnonzero(p >= params.xtc_threshold)
    if len(likely) > 1 and excludes_top_choices(params.seed, row.position, params.xtc_probability):
        p[np.delete(likely, np.argmin(p[likely]))] = 0
    return p / p.sum()


def rows_of(params: SamplingParams) -> list[RowSampling]:
    return [RowSampling(replace(params, seed=seed), 3 * seed) for seed in range(ROWS)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_draw_is_the_one_that_float64_makes(kind: str) -> None:
    vocab = 90
    logits = np.random.default_rng(5).normal(0, 2, (ROWS, vocab)).astype(np.float32)
    rows = rows_of(KINDS[kind])
    tokens = sample(mx.array(logits), rows).tokens.tolist()
    for x, row, token in zip(logits.astype(np.float64), rows, tokens, strict=True):
        p = probabilities(x, row)
        seed, position = row.params.seed, row.position
        assert reference.could_draw(p, replace(row.params, top_p=0.5), token, seed, position)


def test_rows_alone_and_in_company_are_the_same() -> None:
    rows = [row for kind in KINDS.values() for row in rows_of(kind)[:4]]
    rows += [RowSampling(SamplingParams(seed=1), 4), RowSampling(SamplingParams(temperature=0), 4)]
    logits = mx.random.normal((len(rows), 700), key=mx.random.key(3)) * 2
    together = sample(logits, rows).tokens.tolist()
    alone = [sample(logits[i : i + 1], [row]).tokens.item() for i, row in enumerate(rows)]
    assert together == alone


def test_xtc_is_decided_as_often_as_asked_and_apart_from_the_draw() -> None:
    places = [(seed, position) for seed in range(40) for position in range(40)]
    decided = np.array([excludes_top_choices(*each, 0.3) for each in places])
    assert abs(decided.mean() - 0.3) < 0.04
    first = np.array([uniforms(*each)[0] for each in places])
    assert abs(first[decided].mean() - 0.5) < 0.05
    assert not any(excludes_top_choices(*each, 0.0) for each in places)
    assert all(excludes_top_choices(*each, 1.0) for each in places)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_no_numbers_give_a_token_and_harm_no_neighbour(
    kind: str, value: float
) -> None:
    logits = np.random.default_rng(2).normal(0, 2, (8, 50)).astype(np.float32)
    rows = rows_of(KINDS[kind])[:8]
    clean = sample(mx.array(logits), rows).tokens.tolist()
    logits[::2] = value
    tokens = sample(mx.array(logits), rows).tokens.tolist()
    assert tokens[1::2] == clean[1::2]
    assert all(0 <= token < 50 for token in tokens)
