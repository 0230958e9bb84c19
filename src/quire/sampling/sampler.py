"""Draws the next token of every row in one lazy graph.

The order of operations is vLLM's: logit bias, repetition, frequency and presence penalties, DRY,
the grammar mask, times of transcripts, then (for rows that are not greedy) temperature, min_p,
top_k, typical_p, top_p, XTC. Reported log-probabilities come from the logits as the model gave
them, before any of this.

A row's result depends on its own logits, parameters and position only. What is computed is either
elementwise, an exact selection (max, sort, argmax), or a scan over an axis whose length does not
depend on the other rows; sums whose order a backend may choose by the number of rows are avoided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from quire.core.request import SamplingParams
from quire.core.sampling_params import MAX_LOGPROBS, is_greedy
from quire.device.device import current_device
from quire.device.draws import ALL, GREEDY, UNRANKED, Draw
from quire.sampling.adjust import ADJUSTED, adjust, column
from quire.sampling.filters import filtered
from quire.sampling.rows import Moved, RowSampling, Sampled
from quire.sampling.top import BLOCK, blocks_of, top
from quire.sampling.uniforms import uniforms

TOP_SIZES = (64, 256)
"""Sizes of the candidate set: a row gets the smallest that holds its top_k; other rows with a rank
filter are sorted whole. Sizes are fixed, so that a row's sums do not depend on its neighbours'
top_k.
"""


def sample(logits: mx.array, rows: Sequence[RowSampling], *, moved: Moved | None = None) -> Sampled:
    """Sample one token for each row.

    Args:
        logits: float32 [R, V].
        rows: R of them, in the order of the logits. Parameters must have passed
            `quire.core.sampling_params.check_sampling`.
        moved: by how much the rows' positions are less. `may_move` must be true of the rows.
    """
    traits = _traits_of(rows)
    changed = [
        row for row, own in zip(rows, traits, strict=True) if own.adjusted or row.mask is not None
    ]
    adjusted = adjust(logits, rows) if changed else logits
    tokens = _choose(adjusted, rows, traits, moved=moved)
    if [row for row in rows if row.params.logprobs is not None]:
        return _with_logprobs(logits, tokens, rows)
    return Sampled(tokens)


def may_move(rows: Sequence[RowSampling]) -> bool:
    """Return whether the rows' positions may be known to the device only."""
    return all(own.by_kernels == _KERNEL for own in _traits_of(rows))


class _Means(Enum):
    """Ways to choose a row's token from its logits."""

    BEST = "the likeliest token"
    KERNEL = "a kernel of the device"
    OPERATIONS = "MLX's operations on probabilities"


class _Way(NamedTuple):
    """How a row's token is chosen. Rows of the same way are chosen together.

    Attributes:
        candidates: for `OPERATIONS`, how many tokens are ranked, as in `Draw.candidates`.
    """

    means: _Means
    candidates: int = UNRANKED


_BEST, _KERNEL = _Way(_Means.BEST), _Way(_Means.KERNEL)

_KNOWN_TO_KERNELS = ADJUSTED | {
    *("temperature", "min_p", "top_k", "top_p", "seed"),  # of `Draw`
    "logprobs",  # of the model's own logits
    "xtc_threshold",  # without effect unless xtc_probability is set
}
_OFF = {each.name: each.default for each in fields(SamplingParams)}
"""The values that turn parameters off."""
_UNKNOWN_TO_KERNELS = _OFF.keys() - _KNOWN_TO_KERNELS
"""Parameters that `Draw` has no place for. A new parameter is one of them, so that no kernel draws
a row without it.
"""


class _Traits(NamedTuple):
    """How rows with some sampling parameters are sampled. It is the same at each position.

    Attributes:
        greedy: see `is_greedy`.
        adjusted: whether `adjust` changes logits, by parameters and not by a mask.
        by_kernels, by_operations: how a token is chosen on a device whose kernels draw, and on
            another.
    """

    greedy: bool
    adjusted: bool
    by_kernels: _Way
    by_operations: _Way


@lru_cache(maxsize=1024)
def _traits(params: SamplingParams) -> _Traits:
    greedy = is_greedy(params)
    operations = _BEST if greedy else _Way(_Means.OPERATIONS, _candidates(params))
    drawn = greedy or _are_off(params, _UNKNOWN_TO_KERNELS)
    return _Traits(
        greedy,
        adjusted=not _are_off(params, ADJUSTED),
        by_kernels=_KERNEL if drawn else operations,
        by_operations=operations,
    )


def _traits_of(rows: Sequence[RowSampling]) -> list[_Traits]:
    """Return the traits of each row. Those of parameters that neighbours share are found once."""
    found: list[_Traits] = []
    params: SamplingParams | None = None
    for row in rows:
        if row.params is not params:  # their hash takes a while
            params, own = row.params, _traits(row.params)
        found.append(own)
    return found


def _are_off(params: SamplingParams, names: Iterable[str]) -> bool:
    return all(getattr(params, name) == _OFF[name] for name in names)


def _choose(
    logits: mx.array, rows: Sequence[RowSampling], traits: Sequence[_Traits], moved: Moved | None
) -> mx.array:
    """Return each row's token, int32 `[R]`."""
    operations = current_device().operations
    if moved is not None and operations.draws and not all(own.greedy for own in traits):
        choices = [
            [_draw_of(row._replace(position=row.position - n), own) for n in range(most + 1)]
            for row, own, most in zip(rows, traits, moved.most, strict=True)
        ]
        return operations.draw_moved(logits, choices, moved.rows)
    ways: dict[_Way, list[int]] = {}
    known, members = None, list[int]()
    for i, own in enumerate(traits):
        way = own.by_kernels if operations.draws else own.by_operations
        if way is not known:  # its hash takes a while
            known, members = way, ways.setdefault(way, [])
        members.append(i)
    if len(ways) == 1:
        return _by(next(iter(ways)), logits, rows, traits=traits, moved=moved)
    tokens = operations.best(logits)
    for way, members in ways.items():
        if way != _BEST:
            where, some = mx.array(members), [rows[i] for i in members]
            of_some = moved and Moved(moved.rows[where], [moved.most[i] for i in members])
            own_traits = [traits[i] for i in members]
            tokens[where] = _by(way, logits[where], some, traits=own_traits, moved=of_some)
    return tokens


def _by(
    way: _Way,
    logits: mx.array,
    rows: Sequence[RowSampling],
    traits: Sequence[_Traits],
    moved: Moved | None,
) -> mx.array:
    operations = current_device().operations
    match way.means:
        case _Means.BEST:
            return operations.best(logits)
        case _Means.KERNEL:
            pairs = zip(rows, traits, strict=True)
            draws = [GREEDY if own.greedy else _draw_of(row, own) for row, own in pairs]
            return operations.draw(logits, draws)
        case _Means.OPERATIONS:
            return _draw(logits, rows, way.candidates, moved=moved)


def _draw_of(row: RowSampling, traits: _Traits) -> Draw:
    """Return what a kernel must know to draw a row's token."""
    if traits.greedy:
        return GREEDY
    params = row.params
    block, inside = uniforms(params.seed, row.position)
    return Draw(
        temperature=params.temperature,
        min_p=params.min_p,
        top_k=params.top_k,
        top_p=params.top_p,
        candidates=traits.by_operations.candidates,
        block=block,
        inside=inside,
    )


def _candidates(params: SamplingParams) -> int:
    """Return how many of a row's best tokens are ranked, as `Draw.candidates`."""
    if not params.ranks:
        return UNRANKED
    return next((size for size in TOP_SIZES if 0 < params.top_k <= size), ALL)


def _draw(
    logits: mx.array, rows: Sequence[RowSampling], candidates: int, moved: Moved | None
) -> mx.array:
    """Sample one token for each of several rows with the same number of candidates; int32 `[R]`."""
    params = [row.params for row in rows]
    u = _uniforms_of(rows, moved)
    if candidates == UNRANKED:
        return _inverse(_weights(logits, logits.max(axis=-1, keepdims=True), params), u)
    ids, values = top(logits, min(candidates, logits.shape[1]))
    weights = filtered(_weights(values, values[:, :1], params), rows)
    return current_device().operations.of_rows(ids, _inverse(weights, u)[:, None])[:, 0]


def _uniforms_of(rows: Sequence[RowSampling], moved: Moved | None) -> mx.array:
    """Return each row's uniform numbers, float32 `[R, 2]`."""
    if moved is None:
        return mx.array([uniforms(row.params.seed, row.position) for row in rows], mx.float32)
    most = max(moved.most)
    every = [
        uniforms(row.params.seed, row.position - min(n, own))
        for row, own in zip(rows, moved.most, strict=True)
        for n in range(most + 1)
    ]
    firsts = mx.arange(0, len(every), most + 1, dtype=mx.int32)
    return mx.array(every, mx.float32)[firsts + moved.rows]


def _weights(logits: mx.array, best: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Return probabilities divided by the best one's, 0 below min_p; float32, shaped as
    `logits`.
    """
    weights = mx.exp((logits - best) / column([p.temperature for p in params]))
    if any(p.min_p > 0 for p in params):
        weights = weights * (weights >= column([p.min_p for p in params]))
    return weights


def _inverse(weights: mx.array, u: mx.array) -> mx.array:
    """Sample an index of `weights` `[R, N]` by inverse transform with `u` `[R, 2]`; int32 `[R]`.

    It works in two levels, a block and an index within, because float32 sums must be short: in one
    sum over 262,144 tokens the unlikely ones would be lost.
    """
    if weights.shape[-1] <= BLOCK:
        return _pick(weights, u[:, 1:])
    blocks = blocks_of(weights, 0.0)  # [R, B, BLOCK]
    block = _pick(mx.cumsum(blocks, axis=-1)[..., -1], u[:, :1])  # [R]
    inside = current_device().operations.of_rows(blocks, block[:, None])[:, 0]  # [R, BLOCK]
    return block * BLOCK + _pick(inside, u[:, 1:])


def _pick(weights: mx.array, u: mx.array) -> mx.array:
    """Return the first index whose running sum exceeds `u` `[R, 1]` times the total; int32 `[R]`.

    An index of weight 0 is never picked, even if rounding of a parallel scan lets the running sum
    grow there: only sums at positive weights count, for the total too.
    """
    sums = mx.cumsum(weights, axis=-1) * (weights > 0)
    whole = sums.max(axis=-1, keepdims=True)
    return mx.argmax(sums > u * whole, axis=-1).astype(mx.int32)


def _with_logprobs(logits: mx.array, tokens: mx.array, rows: Sequence[RowSampling]) -> Sampled:
    """Add log-softmax values of the model's own logits for rows that want them."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    where = mx.array(wanted)
    part = logits[where]
    whole = mx.logsumexp(part, axis=-1, keepdims=True)  # [W, 1]
    chosen = current_device().operations.of_rows(part, tokens[where][:, None]) - whole
    places = dict(zip(wanted, range(len(wanted)), strict=True))
    # Of rows that want none, whatever the first has: no scatter, which a GPU would have to compile.
    of_all = mx.array([places.get(i, 0) for i in range(len(rows))])
    logprobs = chosen[:, 0][of_all]
    highest = max(rows[i].params.logprobs or 0 for i in wanted)
    if highest == 0:
        return Sampled(tokens, logprobs)
    ids, values = top(part, min(MAX_LOGPROBS, part.shape[1]))
    count = min(highest, ids.shape[1])
    return Sampled(
        tokens,
        logprobs,
        top_ids=ids[:, :count][of_all],
        top_logprobs=(values[:, :count] - whole)[of_all],
    )
