"""DRY: a penalty for tokens that would go on repeating what the context holds already.

Where the last `n` tokens stand earlier in the context, the token that followed them there loses
`multiplier * base ** (n - allowed_length)`, if `n` is at least `allowed_length`. A repeat ends at a
breaker, and no breaker is penalised (text-generation-webui's pull request 5677).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.core.request import SamplingParams
from quire.sampling.rows import RowSampling, history_of

_MOST = 1e6
"""Largest penalty. It is finite, so that tokens allowed by a mask stay possible."""
_COUNTED = 128
"""Largest number of repeated tokens beyond the allowed length that is counted."""

Tokens = npt.NDArray[np.int32]


def without_repeats(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Return logits `[R, V]` less each row's penalties."""
    return logits - mx.stack([_penalties(row, logits.shape[1]) for row in rows])


def _penalties(row: RowSampling, vocabulary: int) -> mx.array:
    """Return a row's penalties, float32 `[V]`.

    Lengths and penalties are computed on the host. Of a token that it has not read yet, the device
    compares only the token itself, so the numbers are the same as when it has been read.
    """
    params, history, pending = row.params, history_of(row), row.pending
    known = np.concatenate([history.prompt, history.generated])
    if params.dry_penalty_last_n > 0:
        looked_at = params.dry_penalty_last_n - (pending is not None)
        known = known[max(len(known) - looked_at, 0) :]
    none = mx.zeros(vocabulary, dtype=mx.float32)
    if not len(known):
        return none
    lengths = _repeated(known, params)
    if pending is None:
        following, values = (
            known[1:],
            _values(lengths[1:], known[1:], params=params, vocabulary=vocabulary),
        )
        found = values > 0
        if not found.any():
            return none
        return none.at[mx.array(following[found])].maximum(mx.array(values[found]))
    # The penalty of the token behind each place at which the pending one may stand.
    following = np.append(known[1:], 0)
    values = _values(lengths + 1, following, params=params, vocabulary=vocabulary, unknown=1)
    stands = mx.array(known) == pending
    if params.dry_breakers:
        stands = stands & ~(mx.array(params.dry_breakers) == pending).any()
    inside = np.where((following >= 0) & (following < vocabulary), following, 0)
    tokens = mx.concatenate([mx.array(inside[:-1]), pending])
    return none.at[tokens].maximum(mx.where(stands, mx.array(values), 0.0))


def _repeated(known: Tokens, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Return for each place how many tokens right before it equal the last ones of all."""
    lengths = np.zeros(len(known), dtype=np.int64)
    places = np.arange(1, len(known))
    breakers = frozenset(params.dry_breakers)
    for back in range(min(len(known) - 1, params.dry_allowed_length + _COUNTED)):
        token = known[-1 - back]
        if int(token) in breakers:
            break
        places = places[places > back]
        places = places[known[places - 1 - back] == token]
        if not len(places):
            break
        lengths[places] += 1
    return lengths


def _values(
    lengths: npt.NDArray[np.int64],
    following: Tokens,
    params: SamplingParams,
    vocabulary: int,
    unknown: int = 0,
) -> npt.NDArray[np.float32]:
    """Return the penalty of each following token. The last `unknown` tokens are still on the
    device, and are never breakers.
    """
    beyond = np.minimum(lengths - params.dry_allowed_length, _COUNTED)
    grown = params.dry_multiplier * np.power(params.dry_base, np.maximum(beyond, 0), dtype=float)
    allowed = (beyond < 0) | (lengths == 0)
    passed = np.isin(following, params.dry_breakers) | (following < 0) | (following >= vocabulary)
    passed[len(passed) - unknown :] = False
    return np.where(allowed | passed, 0.0, np.minimum(grown, _MOST)).astype(np.float32)
