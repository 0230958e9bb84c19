"""Recurrent steps: as the reference computes them, and alike however a sequence is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cpu.kernels import CPUKernels
from quire.device.cpu.operations import KernelOperations
from quire.device.operations import DeltaGates
from quire.models.gated_delta import GatedDelta, GatedDeltaNet
from quire.models.mamba import selective_scan
from quire.models.mamba2 import state_space
from quire.models.recurrent import CausalConv

SHAPE = GatedDelta(key_heads=2, value_heads=4, key_dim=48, value_dim=20, kernel=4, eps=1e-6)
Inputs = tuple[mx.array, DeltaGates, mx.array]


def drawn(n: int, t: int) -> Inputs:
    """Rows that are mixed, their gates, and a state."""
    keys = mx.random.split(mx.random.key(0), 6)
    heads = SHAPE.value_heads

    def normal(number: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=keys[number])

    gates = DeltaGates(
        3 * normal(0, n, t, heads), 2 * normal(1, n, t, heads), normal(2, heads), normal(3, heads)
    )
    state = normal(4, n, heads, SHAPE.value_dim, SHAPE.key_dim)
    return normal(5, n, t, SHAPE.channels), gates, state


def advanced(ops: Any, mixed: mx.array, gates: DeltaGates, state: mx.array) -> list[mx.array]:
    kernels = KernelOperations(CPUKernels(ops, "", 1))
    out = kernels.gated_delta(mixed, gates, state, SHAPE.key_heads, 1e-6)
    assert out is not None
    return list(out)


@pytest.mark.parametrize("t", [1, 37])
def test_the_rule_is_the_reference_s(ops: Any, t: int) -> None:
    inputs = drawn(3, t)
    reference = GatedDeltaNet(SHAPE, 32, 0)._spelled_out(*inputs)
    for got, wanted in zip(advanced(ops, *inputs), reference, strict=True):
        assert got.shape == wanted.shape
        assert mx.max(mx.abs(got - wanted)).item() < 2e-5


def test_bits_do_not_depend_on_company_or_cuts(ops: Any) -> None:
    mixed, gates, state = drawn(3, 37)
    whole, last = advanced(ops, mixed, gates, state)
    for cuts in ([0, 1, 2, 20, 37], [0, 16, 36, 37]):
        after = state[1:2]
        for begin, end in pairwise(cuts):
            part = DeltaGates(
                gates.steps[1:2, begin:end],
                gates.betas[1:2, begin:end],
                gates.log_rates,
                gates.step_biases,
            )
            y, after = advanced(ops, mixed[1:2, begin:end], part, after)
            assert mx.array_equal(y, whole[1:2, begin:end])
        assert mx.array_equal(after, last[1:2])


def test_threads_change_no_bit(compiled: Any) -> None:
    inputs = drawn(5, 30)
    alone = advanced(compiled, *inputs)
    mx.eval(alone)
    compiled.set_threads(3)
    try:
        together = advanced(compiled, *inputs)
        assert all(mx.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    finally:
        compiled.set_threads(1)


Space = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]


def space(n: int, t: int, by_column: bool) -> Space:
    """Values, keys, queries, steps, rates and a state: Mamba's if `by_column`, else Mamba 2's."""
    draws = mx.random.split(mx.random.key(2), 6)
    heads, head_dim, groups, columns = (12, 1, 1, 16) if by_column else (6, 7, 3, 48)
    return (
        mx.random.normal((n, t, heads, head_dim), key=draws[0]),
        mx.random.normal((n, t, groups, columns), key=draws[1]),
        mx.random.normal((n, t, groups, columns), key=draws[2]),
        mx.random.uniform(0, 9, (n, t, heads), key=draws[3]),
        -mx.random.uniform(0, 1, (heads, columns) if by_column else (heads,), key=draws[4]),
        mx.random.normal((n, heads, head_dim, columns), key=draws[5]),
    )


def stepped(ops: Any, inputs: Space) -> list[mx.array]:
    out = KernelOperations(CPUKernels(ops, "", 1)).state_space(*inputs)
    assert out is not None
    return list(out)


def spelled_out(inputs: Space, by_column: bool) -> list[mx.array]:
    if not by_column:
        return list(state_space(*inputs))
    values, keys, queries, steps, rates, state = inputs
    shared = keys.squeeze(2), queries.squeeze(2)
    y, after = selective_scan(values.squeeze(-1), *shared, steps, rates, state.squeeze(2))
    return [y[..., None], after[:, :, None]]


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("t", [1, 37])
def test_state_spaces_are_the_reference_s(ops: Any, t: int, by_column: bool) -> None:
    inputs = space(3, t, by_column)
    for got, wanted in zip(stepped(ops, inputs), spelled_out(inputs, by_column), strict=True):
        assert got.shape == wanted.shape
        assert mx.max(mx.abs(got - wanted)).item() < 1e-4


@pytest.mark.parametrize("by_column", [False, True])
def test_bits_of_state_spaces_do_not_depend_on_company_or_cuts(ops: Any, by_column: bool) -> None:
    *parts, rates, state = space(3, 37, by_column)
    whole, last = stepped(ops, (*parts, rates, state))
    for cuts in ([0, 1, 2, 20, 37], [0, 16, 36, 37]):
        after = state[1:2]
        for begin, end in pairwise(cuts):
            values, keys, queries, steps = (each[1:2, begin:end] for each in parts)
            y, after = stepped(ops, (values, keys, queries, steps, rates, after))
            assert mx.array_equal(y, whole[1:2, begin:end])
        assert mx.array_equal(after, last[1:2])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_convolution(ops: Any, biased: bool, silu: bool) -> None:
    channels, kernel = 48, 4
    conv = CausalConv(channels, kernel, biased)
    draws = mx.random.split(mx.random.key(1), 3)
    conv.weight = mx.random.normal((channels, kernel, 1), key=draws[0])
    if biased:
        conv.bias = mx.random.normal((channels,), key=draws[1])
    window = mx.random.normal((2, kernel - 1 + 9, channels), key=draws[2])
    kernels = KernelOperations(CPUKernels(ops, "", 1))

    def run(window: mx.array) -> mx.array:
        out = kernels.causal_conv(window, conv.weight.squeeze(-1), conv.get("bias"), silu)
        assert out is not None
        return out

    out, wanted = run(window), conv._spelled_out(window)
    assert mx.allclose(out, wanted * mx.sigmoid(wanted) if silu else wanted, atol=1e-5)
    assert mx.array_equal(run(window[1:, 4:8]), out[1:, 4:5])


def test_other_types_and_sizes_are_the_reference_s(compiled: Any) -> None:
    kernels = KernelOperations(CPUKernels(compiled, "", 1))
    mixed, gates, state = drawn(1, 1)
    assert kernels.gated_delta(mixed.astype(mx.bfloat16), gates, state, 2, 1e-6) is None
    assert kernels.gated_delta(mixed, gates, state[..., :40], 2, 1e-6) is None
    values, keys, queries, steps, rates, last = space(1, 1, by_column=False)
    cut = values, keys[..., :40], queries[..., :40], steps, rates, last[..., :40]
    assert kernels.state_space(*cut) is None
    assert kernels.causal_conv(mx.zeros((1, 4, 24)), mx.zeros((24, 4)), None, True) is None
