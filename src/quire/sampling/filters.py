"""Filters of tokens that are ranked, best first: top_k, typical_p, top_p and XTC.

Sums are running sums along a row, whose length does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from quire.core.request import SamplingParams
from quire.device.device import current_device
from quire.sampling.adjust import column
from quire.sampling.rows import RowSampling
from quire.sampling.uniforms import excludes_top_choices


def filtered(weights: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Return `weights` `[R, N]`, best first, with those of tokens that are dropped set to 0."""
    params = [row.params for row in rows]
    n = weights.shape[-1]
    k = mx.array([min(p.top_k or n, n) for p in params])[:, None]
    weights = weights * (mx.arange(n) < k)
    if any(p.typical_p < 1 for p in params):
        weights = _typical(weights, params)
    if any(p.top_p < 1 for p in params):
        sums = mx.cumsum(weights, axis=-1)
        share = column([p.top_p if p.top_p < 1 else math.inf for p in params])
        # A token stays while those before it hold less than top_p of the whole.
        weights = weights * (sums - weights < share * sums.max(axis=-1, keepdims=True))
    excluding = [
        excludes_top_choices(row.params.seed, row.position, row.params.xtc_probability)
        for row in rows
    ]
    if any(excluding):
        weights = _without_top_choices(weights, params, excluding)
    return weights


def _typical(weights: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Keep the tokens whose surprise is nearest to the entropy (arXiv:2202.00666)."""
    whole = mx.cumsum(weights, axis=-1).max(axis=-1, keepdims=True)
    possible = weights > 0
    surprise = mx.where(possible, mx.log(whole) - mx.log(mx.where(possible, weights, 1.0)), 0.0)
    entropy = mx.cumsum(weights / whole * surprise, axis=-1)[:, -1:]
    distance = mx.where(possible, mx.abs(surprise - entropy), math.inf)
    nearest = mx.argsort(distance, axis=-1)
    of_rows = current_device().operations.of_rows
    ranked = of_rows(weights, nearest)
    before = mx.cumsum(ranked, axis=-1) - ranked
    kept = before < column([p.typical_p for p in params]) * whole
    furthest = mx.where(kept, of_rows(distance, nearest), -math.inf).max(axis=-1, keepdims=True)
    off = mx.array([p.typical_p >= 1 for p in params])[:, None]
    return weights * (off | (distance <= furthest))


def _without_top_choices(
    weights: mx.array, params: Sequence[SamplingParams], excluding: Sequence[bool]
) -> mx.array:
    """Drop all tokens of at least a row's threshold but the least likely of them."""
    whole = mx.cumsum(weights, axis=-1).max(axis=-1, keepdims=True)
    likely = (weights > 0) & (weights >= column([p.xtc_threshold for p in params]) * whole)
    number = mx.cumsum(likely.astype(mx.int32), axis=-1)
    dropped = likely & (number < number[:, -1:]) & mx.array(list(excluding))[:, None]
    return mx.where(dropped, 0.0, weights)
