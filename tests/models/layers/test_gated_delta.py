"""Recurrent layers: a step of mixed segments gives each sequence what it would have got alone."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import numpy as np
import pytest

from quire.device.recurrence import channel_delta, gated_delta
from quire.executor.recurrent_rows import RecurrentRows
from quire.models.base import named_parameters
from quire.models.layers.gated_delta import GatedDelta, GatedDeltaNet
from tests.models.solo import SoloStep

HIDDEN = 32
SHAPE = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4, eps=1e-6)


class States:
    """The states of some sequences, a dictionary each."""

    def __init__(self, states: list[dict[str, mx.array]]) -> None:
        self._states = states

    @property
    def names(self) -> Collection[str]:
        return [name for name, *_ in SHAPE.spec.arrays]

    def read(self, name: str) -> mx.array:
        shape = {part: shape for part, shape, _ in SHAPE.spec.arrays}[name]
        return mx.stack([state.get(name, mx.zeros(shape)) for state in self._states])

    def write(self, name: str, value: mx.array) -> None:
        for state, own in zip(self._states, value, strict=True):
            state[name] = own


class MixedStep(SoloStep):
    """A step with the given segments, rows and states of each."""

    def __init__(self, rows: list[list[list[int]]], states: list[States]) -> None:
        super().__init__((SHAPE.spec,), [0])
        self._rows = RecurrentRows(
            [np.array(each, np.int32) for each in rows], lambda layer: states
        )


def _layer() -> GatedDeltaNet:
    layer = GatedDeltaNet(SHAPE, HIDDEN, 0)
    key = mx.random.key(5)
    weights = []
    for name, place in sorted(named_parameters(layer).items()):
        key, draw = mx.random.split(key)
        weights.append((name, 0.3 * mx.random.normal(place.shape, key=draw)))
    layer.load_weights(weights)
    return layer


def test_mixed_segments_equal_whole_sequences() -> None:
    layer = _layer()
    lengths = [9, 7, 7, 6]
    inputs = [mx.random.normal((n, HIDDEN), key=mx.random.key(n * 10)) for n in lengths]
    whole = [layer(x, SoloStep((SHAPE.spec,), [0] * len(x)), None) for x in inputs]
    states: list[dict[str, mx.array]] = [{} for _ in lengths]
    got: list[list[mx.array]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    # Each step: groups of (sequences, tokens each); rows are dealt out round-robin, so that no
    # segment is a slice of the step.
    for plan in ([([0, 1, 2], 3), ([3], 5)], [([1, 2], 4), ([0], 2), ([3], 1)], [([0], 4)]):
        counts = {s: t for group, t in plan for s in group}
        rows: dict[int, list[int]] = {s: [] for s in counts}
        order: list[tuple[int, int]] = []
        for turn in range(max(counts.values())):
            for s in sorted(counts, reverse=True):
                if turn < counts[s]:
                    rows[s].append(len(order))
                    order.append((s, done[s] + turn))
        x = mx.stack([inputs[s][position] for s, position in order])
        segments = [[rows[s] for s in g] for g, _ in plan]
        y = layer(x, MixedStep(segments, [States([states[s] for s in g]) for g, _ in plan]), None)
        for s, own in rows.items():
            got[s].append(y[mx.array(own)])
            done[s] += counts[s]
    assert done == lengths
    for alone, parts in zip(whole, got, strict=True):
        assert mx.max(mx.abs(alone - mx.concatenate(parts))).item() < 1e-5


@pytest.mark.parametrize("t", [1, 16, 70])
def test_the_rule_token_by_token(t: int) -> None:
    n, heads, key_dim, value_dim = 2, 4, 16, 8
    draws = mx.random.split(mx.random.key(1), 6)
    q = mx.random.normal((n, t, 2, key_dim), key=draws[0]) * key_dim**-0.5
    k = mx.random.normal((n, t, 2, key_dim), key=draws[1]) * key_dim**-0.5
    v = mx.random.normal((n, t, heads, value_dim), key=draws[2])
    decay = mx.random.uniform(0.5, 1.0, (n, t, heads), key=draws[3])
    beta = mx.random.uniform(shape=(n, t, heads), key=draws[4])
    state = start = mx.random.normal((n, heads, value_dim, key_dim), key=draws[5])

    y, after = gated_delta(q, k, v, decay, beta, start)

    for i in range(t):
        keys, queries = (mx.repeat(x[:, i], 2, axis=1)[:, :, None] for x in (k, q))
        state = state * decay[:, i, :, None, None]
        error = v[:, i] - (state * keys).sum(axis=-1)
        state = state + (beta[:, i, :, None] * error)[..., None] * keys
        assert mx.max(mx.abs(y[:, i] - (state * queries).sum(axis=-1))).item() < 1e-5
    assert mx.max(mx.abs(after - state)).item() < 1e-5


@pytest.mark.parametrize("t", [1, 16])
def test_channels_that_forget_alike_are_a_head_that_does(t: int) -> None:
    n, heads, key_dim, value_dim = 2, 4, 16, 8
    draws = mx.random.split(mx.random.key(2), 6)
    q, k = (mx.random.normal((n, t, heads, key_dim), key=each) / 4 for each in draws[:2])
    v = mx.random.normal((n, t, heads, value_dim), key=draws[2])
    decay = mx.random.uniform(0.5, 1.0, (n, t, heads), key=draws[3])
    beta = mx.random.uniform(shape=(n, t, heads), key=draws[4])
    state = mx.random.normal((n, heads, value_dim, key_dim), key=draws[5])

    kept = mx.broadcast_to(decay[..., None], k.shape)
    got = channel_delta(q, k, v, kept, beta, state)

    for ours, theirs in zip(got, gated_delta(q, k, v, decay, beta, state), strict=True):
        assert mx.max(mx.abs(ours - theirs)).item() < 1e-5


def test_channels_give_the_same_bits_wherever_a_prompt_is_cut() -> None:
    n, t, heads, dim = 2, 9, 3, 16
    draws = mx.random.split(mx.random.key(3), 6)
    q, k, v = (mx.random.normal((n, t, heads, dim), key=each) / 4 for each in draws[:3])
    kept = mx.random.uniform(0.5, 1.0, (n, t, heads, dim), key=draws[3])
    beta = mx.random.uniform(shape=(n, t, heads), key=draws[4])
    state = mx.random.normal((n, heads, dim, dim), key=draws[5])
    rows = (q, k, v, kept, beta)

    whole, after = channel_delta(*rows, state)
    first, state = channel_delta(*(each[:, :4] for each in rows), state)
    rest, state = channel_delta(*(each[:, 4:] for each in rows), state)

    assert mx.array_equal(mx.concatenate([first, rest], axis=1), whole).item()
    assert mx.array_equal(state, after).item()
