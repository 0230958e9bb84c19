"""The selective scan: many tokens at once against one after the other."""

from __future__ import annotations

import mlx.core as mx

from quire.device.recurrence import selective_scan


def test_spans_that_are_joined_compute_the_recurrence() -> None:
    n, t, channels, columns = 2, 77, 6, 5
    draws = [mx.random.key(number) for number in range(6)]
    values = mx.random.normal((n, t, channels), key=draws[0])
    keys = mx.random.normal((n, t, columns), key=draws[1])
    queries = mx.random.normal((n, t, columns), key=draws[2])
    steps = mx.random.uniform(0, 2, (n, t, channels), key=draws[3])
    rates = -mx.random.uniform(0, 3, (channels, columns), key=draws[4])
    state = first = mx.random.normal((n, channels, columns), key=draws[5])

    together, last = selective_scan(values, keys, queries, steps, rates, first)

    for at in range(t):
        kept = mx.exp(steps[:, at, :, None] * rates)
        state = kept * state + values[:, at, :, None] * keys[:, at, None]
        apart = (state * queries[:, at, None]).sum(-1)
        assert mx.max(mx.abs(together[:, at] - apart)).item() < 1e-4
    assert mx.max(mx.abs(last - state)).item() < 1e-4
