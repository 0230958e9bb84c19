"""The sampler once more, row by row in float64 numpy, written from the definitions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.core.request import SamplingParams
from quire.sampling.rows import History
from quire.sampling.uniforms import uniforms

Floats = npt.NDArray[np.float64]
BLOCK = 128


def adjusted(
    logits: Floats,
    params: SamplingParams,
    history: History | None = None,
    pending: int | None = None,
    allowed: set[int] | None = None,
) -> Floats:
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        x[token] += bias
    if history is not None:
        answer = list(history.generated) + ([] if pending is None else [pending])
        for token in set(history.prompt.tolist()) | set(answer):
            if x[token] > 0:
                x[token] /= params.repetition_penalty
            else:
                x[token] *= params.repetition_penalty
        for token in answer:
            x[token] -= params.frequency_penalty
        for token in set(answer):
            x[token] -= params.presence_penalty
    if allowed is not None:
        x[[i for i in range(len(x)) if i not in allowed]] = -np.inf
    return x


def dry_penalties(tokens: list[int], params: SamplingParams, vocab: int) -> list[float]:
    """Return what DRY takes from the logit of each token, place by place."""
    if params.dry_penalty_last_n > 0:
        tokens = tokens[-params.dry_penalty_last_n :]
    penalties = [0.0] * vocab
    for place in range(1, len(tokens)):
        length = 0
        while place - 1 - length >= 0:
            token = tokens[-1 - length]
            if tokens[place - 1 - length] != token or token in params.dry_breakers:
                break
            length += 1
        following = tokens[place]
        if length == 0 or length < params.dry_allowed_length:
            continue
        if following in params.dry_breakers or not 0 <= following < vocab:
            continue
        penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        penalties[following] = max(penalties[following], penalty)
    return penalties


def probabilities(x: Floats, params: SamplingParams) -> Floats:
    """Return probabilities of adjusted logits above temperature 0: min_p, top_k, then top_p."""
    weights = np.exp((x - x.max()) / params.temperature)
    weights[weights < params.min_p] = 0
    if params.top_k:
        weights[weights < np.sort(weights)[::-1][min(params.top_k, len(x)) - 1]] = 0
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    nucleus = weights[order][before < params.top_p * weights.sum()]
    if params.top_p < 1:
        weights[weights < nucleus.min()] = 0
    return weights / weights.sum()


def draw_order(p: Floats, params: SamplingParams) -> list[int]:
    """Return how the sampler lines tokens up: by id, or best first where it must rank them."""
    if params.top_k == 0 and params.top_p == 1:
        return list(range(len(p)))
    n = next((n for n in (64, 256) if 0 < params.top_k <= n), len(p))
    order: list[int] = np.argsort(-p, kind="stable")[:n].tolist()
    return order


def could_draw(
    p: Floats, params: SamplingParams, token: int, seed: int, position: int, slack: float = 1e-5
) -> bool:
    """Return whether `token` is what the row's uniforms pick, up to rounding at the borders.

    The first uniform picks a block of tokens, unless there is but one, the second a token in it.
    """
    order = draw_order(p, params)
    weights, at = p[order], order.index(token)
    first = at // BLOCK * BLOCK
    inside = weights[first : first + BLOCK]
    low = weights[first:at].sum() / inside.sum()
    ranges = [(low, low + p[token] / inside.sum())]
    if len(order) > BLOCK:
        ranges.insert(0, (weights[:first].sum(), weights[:first].sum() + inside.sum()))
    us = uniforms(seed, position)[-len(ranges) :]
    return p[token] > 0 and all(
        low - slack <= u <= high + slack for (low, high), u in zip(ranges, us, strict=True)
    )


def chi_square(counts: npt.NDArray[np.int64], p: Floats) -> float:
    """Return by how many standard deviations the statistic exceeds its mean; rare outcomes are
    pooled.
    """
    expected = p * counts.sum()
    common = expected >= 5
    pooled = (
        [counts[common], [counts[~common].sum()]],
        [expected[common], [expected[~common].sum()]],
    )
    seen, wanted = (np.concatenate(part) for part in pooled)
    used = wanted > 0
    degrees = max(int(used.sum()) - 1, 1)
    statistic = (((seen - wanted) ** 2)[used] / wanted[used]).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))
