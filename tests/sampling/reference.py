"""The sampler once more, row by row in float64 numpy, written from the definitions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.request import SamplingParams
from quire.sampling.rows import History
from quire.sampling.sampler import uniforms

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


def probabilities(x: Floats, params: SamplingParams) -> Floats:
    """Of adjusted logits, at a temperature above 0: min_p, top_k, then top_p of what is left."""
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


def interval(p: Floats, token: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where the two uniforms must lie for `token`: among the blocks, and inside its block."""
    block = token // BLOCK
    first, last = block * BLOCK, min((block + 1) * BLOCK, len(p))
    inside = p[first:last]
    start = p[first:token].sum() / inside.sum()
    return (p[:first].sum(), p[:last].sum()), (start, start + p[token] / inside.sum())


def could_draw(p: Floats, token: int, seed: int, position: int, slack: float = 1e-5) -> bool:
    """Whether `token` is what the row's uniforms pick, up to rounding at the borders."""
    pairs = zip(interval(p, token), uniforms(seed, position), strict=True)
    return p[token] > 0 and all(low - slack <= u <= high + slack for (low, high), u in pairs)


def chi_square(counts: npt.NDArray[np.int64], p: Floats) -> float:
    """Standard deviations by which the statistic exceeds its mean; rare outcomes are pooled."""
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
