"""Draws the next token of every row in one lazy graph.

The order of operations is vLLM's: logit bias, repetition, frequency and presence penalties, the
grammar mask, then (for rows that are not greedy) temperature, min_p, top_k, top_p. Reported
log-probabilities come from the logits as the model gave them, before any of this.

A row's result depends on its own logits, parameters and position only. What is computed is either
elementwise, an exact selection (max, sort, argmax), or a scan over an axis whose length does not
depend on the other rows; sums whose order a backend may choose by the number of rows are avoided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from quire.request import SamplingParams
from quire.sampling.adjust import adjust
from quire.sampling.rows import History, RowSampling, Sampled
from quire.sampling.top import BLOCK, blocks_of, top_k

__all__ = ["History", "RowSampling", "Sampled", "is_greedy", "sample", "uniforms"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them says nothing that argmax does not."""

TOP_SIZES = (64, 256)
"""Candidate counts for rows with a top_k that small; a larger top_k, or none, sorts the row.

Fixed sizes, so that a row's scan has the same length whatever top_k its neighbours ask for.
"""

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


def is_greedy(params: SamplingParams) -> bool:
    """Whether a row takes its likeliest token, so that randomness and filters don't matter."""
    return params.temperature < GREEDY_BELOW or params.top_k == 1


def uniforms(seed: int, position: int) -> tuple[float, float]:
    """Two independent numbers in [0, 1), of 24 bits each so that float32 holds them exactly.

    SplitMix64 (Steele, Lea, Flood 2014), started at the mixed seed, read at `position`.
    """
    bits = _mix((_mix(seed & _U64) + (position + 1) * _GOLDEN) & _U64)
    return (bits >> 40) * 2.0**-24, (bits & 0xFFFFFF) * 2.0**-24


def _mix(z: int) -> int:
    """The finaliser of SplitMix64: a bijection on 64 bits in which each bit moves all others."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def sample(logits: mx.array, rows: Sequence[RowSampling]) -> Sampled:
    """Draws one token a row.

    Args:
        logits: float32 [R, V].
        rows: R of them, in the order of the logits. Parameters must have passed
            `quire.sampling.params.check_sampling`.

    Nothing is evaluated. Logits that are NaN or +inf are never drawn by a row with a temperature.
    """
    adjusted = adjust(logits, rows)
    tokens = _choose(adjusted, rows)
    if any(row.params.logprobs is not None for row in rows):
        return _with_logprobs(logits, tokens, rows)
    return Sampled(tokens)


def _choose(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Greedy rows by argmax, the others by a draw; int32 [R]."""
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row.params)]
    if not drawn:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    where = mx.array(drawn)
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    tokens[where] = _draw(logits[where], [rows[i] for i in drawn])
    return tokens


def _draw(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Inverse transform sampling in two levels, a block of tokens and a token in it; int32 [R].

    Two levels keep float32 sums short: in one over 262,144 tokens the unlikely ones would drown.
    """
    logits = mx.where(logits < math.inf, logits, -math.inf)
    top = logits.max(axis=-1, keepdims=True)  # [R, 1]
    temperature = mx.array([row.params.temperature for row in rows], dtype=mx.float32)[:, None]
    weights = mx.exp((logits - top) / temperature)  # [R, V], the likeliest is 1
    if any(_is_filtered(row.params) for row in rows):
        weights = mx.where(logits >= _cutoffs(logits, top, rows), weights, 0.0)
    u = mx.array([uniforms(row.params.seed, row.position) for row in rows], dtype=mx.float32)
    blocks = blocks_of(weights, 0.0)  # [R, B, BLOCK]
    block = _pick(mx.cumsum(blocks, axis=-1)[..., -1], u[:, :1])  # [R]
    inside = mx.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [R, BLOCK]
    return block * BLOCK + _pick(inside, u[:, 1:])


def _pick(weights: mx.array, u: mx.array) -> mx.array:
    """The first index at which the running sum passes `u` [R, 1] times the whole; int32 [R].

    An index of weight 0 is never picked, even where a parallel scan's rounding lets the running sum
    grow on it: only sums at positive weights count, for the whole too.
    """
    sums = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0.0)
    whole = sums.max(axis=-1, keepdims=True)
    return mx.argmax(sums > u * whole, axis=-1).astype(mx.int32)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def _cutoffs(logits: mx.array, top: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """The least logit that each row's filters keep; float32 [R, 1], -inf for rows without filters.

    Tokens that tie with the least are all kept, as a cut-off by value has it.
    """
    cut = top + mx.array([_min_p_margin(row.params) for row in rows], dtype=mx.float32)[:, None]
    for size in (*TOP_SIZES, 0):
        members = [i for i, row in enumerate(rows) if _candidates(row.params) == size]
        if members:
            where = mx.array(members)
            group = [rows[i].params for i in members]
            part = logits[where]
            ranked = top_k(part, min(size, part.shape[1]))[1] if size else -mx.sort(-part, axis=-1)
            cut[where] = _top_cutoff(ranked, cut[where], group)
    return cut


def _min_p_margin(params: SamplingParams) -> float:
    """How far under the top logit min_p cuts: p / p_max = exp((x - top) / temperature)."""
    return params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf


def _candidates(params: SamplingParams) -> int | None:
    """How many of a row's best tokens decide its cut-off; 0 is all, None: none are needed."""
    if params.top_k == 0 and params.top_p >= 1:
        return None
    return next((size for size in TOP_SIZES if 0 < params.top_k <= size), 0)


def _top_cutoff(ranked: mx.array, floor: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """The least logit that top_k, then top_p, keep of those not under `floor`; float32 [R, 1].

    Args:
        ranked: float32 [R, N], best first.
        floor: float32 [R, 1], the cut-off of min_p.
    """
    n = ranked.shape[-1]
    k = mx.array([min(p.top_k or n, n) for p in params])[:, None]
    keep = (mx.arange(n) < k) & (ranked >= floor)
    temperature = mx.array([p.temperature for p in params], dtype=mx.float32)[:, None]
    weights = mx.where(keep, mx.exp((ranked - ranked[:, :1]) / temperature), 0.0)
    sums = mx.cumsum(weights, axis=-1)
    top_p = mx.array([p.top_p for p in params], dtype=mx.float32)[:, None]
    whole = sums.max(axis=-1, keepdims=True)
    # A token stays while those before it hold less than top_p; top_p 1 keeps all despite rounding.
    keep = keep & ((sums - weights < top_p * whole) | (top_p >= 1))
    return mx.where(keep, ranked, math.inf).min(axis=-1, keepdims=True)


def _with_logprobs(logits: mx.array, tokens: mx.array, rows: Sequence[RowSampling]) -> Sampled:
    """Adds log-softmax values of the model's own logits to the chosen tokens."""
    whole = mx.logsumexp(logits, axis=-1, keepdims=True)  # [R, 1]
    logprobs = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - whole)[:, 0]
    most = max(row.params.logprobs or 0 for row in rows)
    if most == 0:
        return Sampled(tokens, logprobs)
    ids, values = top_k(logits, min(most, logits.shape[1]))
    return Sampled(tokens, logprobs, ids, values - whole)
