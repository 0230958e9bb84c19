"""Recurrent steps: as the reference computes them, and alike however a sequence is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cpu.kernels import CPUKernels
from quire.device.cpu.operations import KernelOperations
from quire.device.recurrence import DeltaGates, causal_conv, delta_rule, state_space

Inputs = tuple[mx.array, DeltaGates, mx.array]


@dataclass(frozen=True)
class Rule:
    """Sizes of a delta rule, and what its gates are.

    Attributes:
        by_column: each column of a state forgets by itself, as in Kimi Delta Attention.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    by_column: bool
    most_correction: float = 1.0
    most_forgotten: float | None = None


RULES = {
    "by head": Rule(2, 4, 48, 20, by_column=False),
    "by head, corrected twice": Rule(1, 3, 96, 18, by_column=False, most_correction=2.0),
    "by head, bounded": Rule(3, 3, 16, 4, by_column=False, most_forgotten=-5.0),
    "by column": Rule(3, 3, 48, 48, by_column=True),
    "by column, corrected twice": Rule(1, 1, 256, 7, by_column=True, most_correction=2.0),
    "by column, bounded": Rule(5, 5, 16, 33, by_column=True, most_forgotten=-5.0),
}


def drawn(rule: Rule, n: int, t: int) -> Inputs:
    """Return rows that are mixed, their gates, and a state."""
    keys = mx.random.split(mx.random.key(0), 6)
    heads = rule.value_heads
    columns = (rule.key_dim,) if rule.by_column else ()
    channels = 2 * rule.key_heads * rule.key_dim + heads * rule.value_dim

    def normal(number: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=keys[number])

    gates = DeltaGates(
        3 * normal(0, n, t, heads, *columns),
        2 * normal(1, n, t, heads),
        normal(2, heads),
        normal(3, heads, *columns).flatten(),
        rule.most_correction,
        rule.most_forgotten,
    )
    return normal(5, n, t, channels), gates, normal(4, n, heads, rule.value_dim, rule.key_dim)


def advanced(ops: Any, rule: Rule, inputs: Inputs) -> list[mx.array]:
    out = KernelOperations(CPUKernels(ops, "", 1)).gated_delta(*inputs, rule.key_heads, 1e-6)
    assert out is not None
    return list(out)


def reference(rule: Rule, inputs: Inputs) -> list[mx.array]:
    """Return the results of MLX's operations."""
    return list(delta_rule(*inputs, rule.key_heads, 1e-6))


def assert_near(got: list[mx.array], wanted: list[mx.array]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert mx.max(mx.abs(ours - theirs)).item() < 2e-5


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("t", [1, 37])
def test_the_rule_is_the_reference_s(ops: Any, name: str, t: int) -> None:
    inputs = drawn(RULES[name], 3, t)
    assert_near(advanced(ops, RULES[name], inputs), reference(RULES[name], inputs))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("key_dim", [16, 80, 128, 256])
@pytest.mark.parametrize(("n", "t"), [(1, 16), (2, 17), (5, 2), (1, 70)])
def test_sizes(compiled: Any, by_column: bool, key_dim: int, n: int, t: int) -> None:
    rule = Rule(2, 2, key_dim, 13, by_column)
    inputs = drawn(rule, n, t)
    assert_near(advanced(compiled, rule, inputs), reference(rule, inputs))


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("most_forgotten", [None, -5.0])
def test_gates_far_from_zero(ops: Any, by_column: bool, most_forgotten: float | None) -> None:
    """A state that keeps all of itself, or next to nothing, and is corrected wholly or not."""
    rule = Rule(2, 2, 16, 4, by_column, 2.0, most_forgotten)
    mixed, gates, state = drawn(rule, 2, 30)
    gates = replace(gates, steps=40 * gates.steps, betas=40 * gates.betas)
    inputs = mixed, gates, state
    assert_near(advanced(ops, rule, inputs), reference(rule, inputs))


@pytest.mark.parametrize("name", RULES)
def test_bits_do_not_depend_on_company_or_cuts(ops: Any, name: str) -> None:
    mixed, gates, state = drawn(RULES[name], 3, 37)
    whole, last = advanced(ops, RULES[name], (mixed, gates, state))
    for cuts in ([0, 1, 2, 20, 37], [0, 16, 36, 37]):
        after = state[1:2]
        for start, end in pairwise(cuts):
            steps, betas = (each[1:2, start:end] for each in (gates.steps, gates.betas))
            part = replace(gates, steps=steps, betas=betas)
            y, after = advanced(ops, RULES[name], (mixed[1:2, start:end], part, after))
            assert mx.array_equal(y, whole[1:2, start:end])
        assert mx.array_equal(after, last[1:2])


@pytest.mark.parametrize("name", ["by head", "by column"])
def test_threads_change_no_bit(compiled: Any, name: str) -> None:
    inputs = drawn(RULES[name], 5, 30)
    alone = advanced(compiled, RULES[name], inputs)
    mx.eval(alone)
    compiled.set_threads(3)
    try:
        together = advanced(compiled, RULES[name], inputs)
        assert all(mx.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    finally:
        compiled.set_threads(1)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_narrow_rows_are_read_in_float32(compiled: Any, dtype: mx.Dtype) -> None:
    rule = RULES["by column"]
    mixed, gates, state = drawn(rule, 2, 5)
    names = ("steps", "betas", "log_rates", "step_biases")
    narrow = replace(gates, **{name: getattr(gates, name).astype(dtype) for name in names})
    wide = replace(narrow, **{name: getattr(narrow, name).astype(mx.float32) for name in names})
    mixed = mixed.astype(dtype)
    got = advanced(compiled, rule, (mixed, narrow, state))
    wanted = advanced(compiled, rule, (mixed.astype(mx.float32), wide, state))
    assert all(mx.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


Space = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]


def space(n: int, t: int, by_column: bool) -> Space:
    """Return values, keys, queries, steps, rates and a state: Mamba's if `by_column`, else Mamba
    2's.
    """
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


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("t", [1, 37])
def test_state_spaces_are_the_reference_s(ops: Any, t: int, by_column: bool) -> None:
    inputs = space(3, t, by_column)
    for got, wanted in zip(stepped(ops, inputs), state_space(*inputs), strict=True):
        assert got.shape == wanted.shape
        assert mx.max(mx.abs(got - wanted)).item() < 1e-4


@pytest.mark.parametrize("by_column", [False, True])
def test_bits_of_state_spaces_do_not_depend_on_company_or_cuts(ops: Any, by_column: bool) -> None:
    *parts, rates, state = space(3, 37, by_column)
    whole, last = stepped(ops, (*parts, rates, state))
    for cuts in ([0, 1, 2, 20, 37], [0, 16, 36, 37]):
        after = state[1:2]
        for start, end in pairwise(cuts):
            values, keys, queries, steps = (each[1:2, start:end] for each in parts)
            y, after = stepped(ops, (values, keys, queries, steps, rates, after))
            assert mx.array_equal(y, whole[1:2, start:end])
        assert mx.array_equal(after, last[1:2])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_convolution(ops: Any, biased: bool, silu: bool) -> None:
    channels, kernel = 48, 4
    draws = mx.random.split(mx.random.key(1), 3)
    taps = mx.random.normal((channels, kernel), key=draws[0])
    bias = mx.random.normal((channels,), key=draws[1]) if biased else None
    window = mx.random.normal((2, kernel - 1 + 9, channels), key=draws[2])
    kernels = KernelOperations(CPUKernels(ops, "", 1))

    def run(window: mx.array) -> mx.array:
        return kernels.causal_conv(window, taps, bias, silu)

    out, wanted = run(window), causal_conv(window, taps, bias)
    assert mx.allclose(out, wanted * mx.sigmoid(wanted) if silu else wanted, atol=1e-5)
    assert mx.array_equal(run(window[1:, 4:8]), out[1:, 4:5])


def test_sizes_that_no_kernel_is_made_for_give_what_the_reference_gives(compiled: Any) -> None:
    kernels = KernelOperations(CPUKernels(compiled, "", 1))
    for by_column in (False, True):  # states of other sizes are padded with zeros
        values, keys, queries, steps, rates, state = space(2, 5, by_column)
        short = [each[..., :10] for each in (keys, queries, state)]
        few = rates[..., :10] if by_column else rates
        cut = values, *short[:2], steps, few, short[2]
        assert_near(list(kernels.state_space(*cut)), list(state_space(*cut)))
    window, taps = mx.random.normal((1, 4, 24)), mx.random.normal((24, 4))
    assert_near([kernels.causal_conv(window, taps, None, False)], [causal_conv(window, taps, None)])
