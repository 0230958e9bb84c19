"""The state space recurrence: many tokens at once against one after the other."""

from __future__ import annotations

import mlx.core as mx

from quire.device.recurrence import grouped_state_space as state_space


def test_chunks_of_pairs_compute_the_recurrence() -> None:
    n, t, groups, width, columns = 2, 130, 3, 4, 5
    heads = 2 * groups
    draws = [mx.random.key(number) for number in range(6)]
    values = mx.random.normal((n, t, heads, width), key=draws[0])
    keys = mx.random.normal((n, t, groups, columns), key=draws[1])
    queries = mx.random.normal((n, t, groups, columns), key=draws[2])
    steps = mx.random.uniform(0, 2, (n, t, heads), key=draws[3])
    rates = -mx.random.uniform(0, 1, (heads,), key=draws[4])
    state = first = mx.random.normal((n, heads, width, columns), key=draws[5])

    together, last = state_space(values, keys, queries, steps, rates, first)

    for at in range(t):
        key, query = (mx.repeat(each[:, at], 2, axis=1) for each in (keys, queries))
        added = values[:, at, :, :, None] * key[:, :, None]
        state = mx.exp(rates * steps[:, at])[..., None, None] * state + added
        apart = (state * query[:, :, None]).sum(-1)
        assert mx.max(mx.abs(together[:, at] - apart)).item() < 1e-4
    assert mx.max(mx.abs(last - state)).item() < 1e-4
