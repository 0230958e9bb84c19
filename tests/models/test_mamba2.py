"""The state space recurrence: many tokens at once against one after the other."""

from __future__ import annotations

import mlx.core as mx

from quire.models.mamba2 import state_space


def test_chunks_of_pairs_compute_the_recurrence() -> None:
    n, t, heads, width, columns = 2, 130, 3, 4, 5
    draws = [mx.random.key(number) for number in range(5)]
    values = mx.random.normal((n, t, heads, width), key=draws[0])
    keys = mx.random.normal((n, t, heads, columns), key=draws[1])
    queries = mx.random.normal((n, t, heads, columns), key=draws[2])
    log_decay = -mx.random.uniform(0, 2, (n, t, heads), key=draws[3])
    state = first = mx.random.normal((n, heads, width, columns), key=draws[4])

    together, last = state_space(values, keys, queries, log_decay, first)

    for at in range(t):
        added = values[:, at, :, :, None] * keys[:, at, :, None]
        state = mx.exp(log_decay[:, at])[..., None, None] * state + added
        apart = (state * queries[:, at, :, None]).sum(-1)
        assert mx.max(mx.abs(together[:, at] - apart)).item() < 1e-4
    assert mx.max(mx.abs(last - state)).item() < 1e-4
