"""Recorded recurrent nodes, run in the CPU emulation beside what MLX computes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.specs import KVLayout, RecurrentState
from quire.core.kv_format import KVFormat
from quire.device.recurrence import UNIT_EPS, WAITING, DeltaGates, settled, waiting_parts
from quire.executor.graphs import recurrences
from quire.executor.graphs.layout import InputLayout, states_of
from quire.executor.graphs.places import Place
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.runner import MAX_ROWS
from quire.executor.graphs.states import StateArray, write_states
from quire.executor.recurrent_rows import RecurrentLayers, RecurrentRows
from quire.program.passes import join_recurrences
from quire.program.values import FUSED, Form, Node, Program, Value, Weight
from quire.scheduler.plan import ScheduledSequence
from tests.device.cuda.cards import H200
from tests.engine.rows import scheduled
from tests.executor.graphs.emulated import bits_of
from tests.executor.graphs.layers import empty_step
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner, memory_of
from tests.support.nvrtc import assert_compiles

STEP = [
    scheduled("a", 7, 1, [[2]], KVFormat()),
    scheduled("b", 0, 19, [[0]], KVFormat()),
    scheduled("c", 9, 2, [[4]], KVFormat(), snapshots=((0, 5),)),
    scheduled("d", 5, 2, [[1]], KVFormat(), drafted_states=((0, 3),)),
]
"""Sequences in slots 2, 0, 4 and 1; the second one starts, with more rows than a convolution reads
at a time."""
LONG_STEP = [
    STEP[0],
    scheduled("b", 0, 158, [[0]], KVFormat()),
    scheduled("c", 9, 64, [[4]], KVFormat(), snapshots=((0, 5),)),
    STEP[3],
]
"""Sequences of more tokens than a chunk, and of as many, which begin at the end of a tile."""
SLOTS = 6
WRITTEN = {0: 2, 1: 0, 2: 4, 3: 3}
"""Slots that get a sequence's state, by its number."""


@dataclass(frozen=True)
class Case:
    """A recurrent node.

    Attributes:
        rows: shapes of a row of what the step gives.
        weights: shapes of weights.
        state: the shape of a state, and its type.
        out: the shape of a row of the result.
        step: its sequences.
        deferred: updates that may wait beside a state.
    """

    kind: str
    rows: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, tuple[int, ...]]
    state: tuple[str, tuple[int, ...], str]
    out: tuple[int, ...]
    dtype: mx.Dtype = mx.bfloat16
    attributes: Mapping[str, Any] = field(default_factory=dict)
    step: Sequence[ScheduledSequence] = tuple(STEP)
    deferred: int = 0

    @property
    def waiting(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """The parts of a state for updates that wait."""
        if not self.deferred:
            return ()
        heads, values, keys = self.state[1]
        return waiting_parts(self.deferred, (heads, values), (self.attributes["key_heads"], keys))

    @property
    def count(self) -> int:
        """Rows of the step."""
        return sum(each.count for each in self.step)


CONVOLVE = Case(
    "convolve",
    {"x": (40,)},
    {"taps": (40, 4), "bias": (40,)},
    ("conv", (3, 40), "bfloat16"),
    (40,),
    attributes={"silu": True},
)
DELTA_RULE = Case(
    "delta_rule",
    {"mixed": (2 * 2 * 64 + 4 * 16,), "steps": (4,), "betas": (4,)},
    {"log_rates": (4,), "step_biases": (4,)},
    ("delta", (4, 16, 64), "float32"),
    (4, 16),
    attributes={"key_heads": 2, "most_correction": 1.0},
)
DELTA_CHUNKS = Case(
    "delta_rule",
    {"mixed": (2 * 2 * 64 + 4 * 32,), "steps": (4,), "betas": (4,)},
    {"log_rates": (4,), "step_biases": (4,)},
    ("delta", (4, 32, 64), "float32"),
    (4, 32),
    attributes={"key_heads": 2, "most_correction": 1.0},
    step=LONG_STEP,
)
CASES = {
    "convolve": CONVOLVE,
    "convolve odd channels": Case(
        "convolve",
        {"x": (42,)},
        {"taps": (42, 4), "bias": (42,)},
        ("conv", (3, 42), "bfloat16"),
        (42,),
        attributes={"silu": True},
    ),
    "convolve in parts": replace(CONVOLVE, step=LONG_STEP),
    "delta_rule": DELTA_RULE,
    "delta_rule in chunks": DELTA_CHUNKS,
    "delta_rule with waiting updates": replace(DELTA_RULE, deferred=3),
    "delta_rule in chunks with waiting updates": replace(DELTA_CHUNKS, deferred=3),
    "delta_rule by channel": Case(
        "delta_rule",
        {"mixed": (2 * 2 * 24 + 2 * 20,), "steps": (2, 24), "betas": (2,)},
        {"log_rates": (2,), "step_biases": (48,)},
        ("delta", (2, 20, 24), "float32"),
        (2, 20),
        mx.float32,
        {"key_heads": 2, "most_correction": 2.0, "most_forgotten": -5.0},
    ),
    "state_space": Case(
        "state_space",
        {"values": (4, 16), "keys": (2, 48), "queries": (2, 48), "steps": (4,)},
        {"rates": (4,)},
        ("state", (4, 16, 48), "float32"),
        (4, 16),
        mx.float32,
    ),
    "state_space by channel": Case(
        "state_space",
        {"values": (36, 1), "keys": (1, 16), "queries": (1, 16), "steps": (36,)},
        {"rates": (36, 16)},
        ("state", (36, 16), "float32"),
        (36, 1),
        mx.float32,
    ),
}
EVERYDAY = (
    "convolve",
    "convolve in parts",
    "delta_rule with waiting updates",
    "delta_rule in chunks with waiting updates",
    "state_space",
)


class _States:
    """The states of one sequence, as `RecurrentRows` reads and writes them."""

    def __init__(self, before: mx.array) -> None:
        self.value = before[None]
        self.names = ("conv", "delta", "state")

    def read(self, name: str) -> mx.array:
        return self.value

    def write(self, name: str, value: mx.array) -> None:
        self.value = value


def drawn(case: Case, seed: int = 5) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return what the step gives, and weights; decays are no extremes."""
    random = np.random.default_rng(seed)

    def array(shape: tuple[int, ...]) -> mx.array:
        return mx.array(random.normal(size=shape).astype(np.float32)).astype(case.dtype)

    given = {name: array((case.count, *shape)) for name, shape in case.rows.items()}
    weights = {name: array(shape) for name, shape in case.weights.items()}
    if case.kind == "state_space":
        given["steps"] = mx.abs(given["steps"])
        weights["rates"] = -mx.abs(weights["rates"])
    return given, weights


@dataclass
class _Rows(RecurrentLayers):
    own: RecurrentRows

    @property
    def recurrent(self) -> RecurrentRows:
        return self.own


def expected_of(
    case: Case, given: dict[str, mx.array], weights: dict[str, mx.array], pool: mx.array
) -> tuple[mx.array, list[mx.array]]:
    """Return the result, and each sequence's state, by MLX's operations."""
    spans, first = [], 0
    for each in case.step:
        spans.append(np.arange(first, first + each.count, dtype=np.int32)[None])
        first += each.count
    befores = [pool[each.block_ids(0)[0]] * (each.start > 0) for each in case.step]
    states = list(map(_States, befores))
    rows = _Rows(RecurrentRows(spans, lambda layer: states))
    operands = {**given, **weights}
    if case.kind == "convolve":
        y = rows.convolve(0, operands["x"], operands["taps"], operands["bias"], silu=True)
    elif case.kind == "state_space":
        y = rows.state_space(0, **operands)
    else:
        attributes = dict(case.attributes)
        key_heads = attributes.pop("key_heads")
        mixed = operands.pop("mixed")
        y = rows.delta_rule(0, mixed, DeltaGates(**operands, **attributes), key_heads)
    return y, [each.value[0] for each in states]


def recorded(
    case: Case,
    given: dict[str, mx.array],
    weights: dict[str, mx.array],
    pool: mx.array,
    waiting: Sequence[mx.array] = (),
) -> tuple[EmulatedRunner, Recorder, mx.array]:
    """Return the recorded kernel of a node, and where its result goes."""
    runner, spec = EmulatedRunner(), RecurrentState((case.state, *case.waiting))
    layout = KVLayout.of((spec,))
    inputs = InputLayout(1, MAX_ROWS, 1, runner.address)
    step = empty_step()
    step["rows"][0, 0] = case.count
    assert write_states(states_of(step, 0), 0, case.step)
    ctypes.memmove(inputs.numbers, step.ctypes.data, step.nbytes)
    symbol = Form(0, (("T", 1),))
    values = {n: Value((symbol, *shape), case.dtype) for n, shape in enumerate(case.rows.values())}
    out = len(values)
    values[out] = Value((symbol, *case.out), case.dtype)
    attributes = {name: Weight(name, array) for name, array in weights.items()}
    attributes |= {"layer": 0, **case.attributes}
    node = Node(case.kind, tuple(range(out)), (out,), tuple(case.rows), (), attributes)
    fields = {name: n for n, name in enumerate(case.rows)}
    program = Program(("T",), fields, {}, values, (node,), (out,))
    recorder = Recorder(case.count, runner.address, inputs, H200)
    name, shape, _ = case.state
    states = {0: {name: StateArray(runner.address(pool), shape, pool.dtype)}}
    for (name, shape, _), array in zip(case.waiting, waiting, strict=True):
        states[0][name] = StateArray(runner.address(array), shape, array.dtype)
    places = {
        name: Place(recorder.constant(array), Buffer(recorder.constant(array), array.nbytes))
        for name, array in given.items()
    }
    result = mx.zeros((case.count, *case.out), case.dtype)
    to = Buffer(recorder.constant(result), result.nbytes)
    Recording(recorder, {}, layout, states).record(program, places, [to])
    return runner, recorder, result


def pool_of(case: Case) -> mx.array:
    _, shape, dtype = case.state
    random = np.random.default_rng(6).normal(size=(SLOTS, *shape)).astype(np.float32)
    return mx.array(random).astype(mx.bfloat16 if dtype == "bfloat16" else mx.float32)


def updates_of(case: Case) -> list[mx.array]:
    """Return pools of updates that wait: 3, 1, 2, 0, 3 and 1 by slot."""
    if not case.deferred:
        return []
    random = np.random.default_rng(7)
    changes, keys, factors = (random.normal(size=(SLOTS, *shape)) for _, shape, _ in case.waiting)
    changes[..., 0] = np.array([3, 1, 2, 0, 3, 1])[:, None, None]
    drawn = mx.array(changes), mx.array(keys).astype(case.dtype), mx.array(np.abs(factors))
    return [drawn[0].astype(mx.float32), drawn[1], drawn[2].astype(mx.float32)]


def contents(array: mx.array) -> mx.array:
    """Return what kernels have written to an array."""
    return mx.array(memory_of(array)).view(array.dtype).reshape(array.shape)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_rows_advance_their_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in ("_AT_ONCE", "_FEW_AT_ONCE"):  # one fewer than there are sequences
        monkeypatch.setattr(recurrences, most, 3)
    case = CASES[name]
    given, weights = drawn(case)
    pool, waiting = pool_of(case), updates_of(case)
    before = settled(pool, *waiting) if waiting else mx.array(np.array(pool.astype(mx.float32)))
    y, after = expected_of(case, given, weights, before.astype(pool.dtype))
    mx.eval(y, after, pool, before)
    runner, recorder, result = recorded(case, given, weights, pool, waiting)
    for kernel in recorder.kernels:
        runner.run(kernel)
    found, states = (contents(each).astype(mx.float32) for each in (result, pool))
    if waiting:
        states = settled(states, *map(contents, waiting))
    near = (
        {"rtol": 2e-2, "atol": 3e-2} if case.dtype == mx.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    )
    np.testing.assert_allclose(np.array(found), np.array(y.astype(mx.float32)), **near)
    for number, slot in WRITTEN.items():
        expected = np.array(after[number].astype(mx.float32))
        np.testing.assert_allclose(np.array(states[slot]), expected, **near)
    np.testing.assert_array_equal(np.array(states[5]), np.array(states[4]), "the snapshot")
    np.testing.assert_array_equal(np.array(states[1]), np.array(before[1]), "drafts leave it")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_state_is_written_every_fourth_step() -> None:
    """Results, and the state once it is written, have the bits of states written at each step."""
    tokens = [[scheduled("a", start, 1, [[2]], KVFormat())] for start in range(9)]
    sides: list[tuple[list[mx.array], list[mx.array]]] = []
    for deferred in (0, 3):
        case = replace(DELTA_RULE, deferred=deferred)
        pool, waiting, ys, pools = pool_of(case), updates_of(case), list[mx.array](), [mx.zeros(1)]
        for number, step in enumerate(tokens):
            own = replace(case, step=step)
            given, weights = drawn(own, seed=number)
            runner, recorder, result = recorded(own, given, weights, pool, waiting)
            for kernel in recorder.kernels:
                runner.run(kernel)
            ys.append(contents(result))
            pools.append(contents(pool)[2])
            mx.eval(ys, pools)
        sides.append((ys, pools))
    (at_once, written), (late, rarely) = sides
    for got, expected in zip(late, at_once, strict=True):
        np.testing.assert_array_equal(
            np.array(got.astype(mx.float32)), np.array(expected.astype(mx.float32))
        )
    same = [np.array_equal(rarely[n], rarely[n - 1]) for n in range(1, 10)]
    assert same == [False, True, True, True, False, True, True, True, False]
    for step in (1, 5, 9):
        np.testing.assert_array_equal(np.array(rarely[step]), np.array(written[step]))


CHANNELS = 2 * 2 * 64 + 4 * 64
CONVOLVED = replace(
    DELTA_RULE,
    rows={**DELTA_RULE.rows, "mixed": (CHANNELS,)},
    state=("delta", (4, 64, 64), "float32"),
    out=(4, 64),
    deferred=3,
)


def recurrence(*, joined: bool, few: bool) -> tuple[list[mx.array], int]:
    """Run a convolution and a delta rule.

    Args:
        joined: by the pass that lets one kernel compute both.
        few: whether all rows are in a graph of few.

    Returns:
        Results, both states, the updates that wait, and the number of kernels.
    """
    case = CONVOLVED
    given, weights = drawn(case)
    given["x"] = given.pop("mixed")
    random = np.random.default_rng(8)
    taps = mx.array(random.normal(size=(CHANNELS, 4))).astype(case.dtype)
    runner = EmulatedRunner()
    pools = {"delta": pool_of(case), "conv": mx.array(random.normal(size=(SLOTS, 3, CHANNELS)))}
    pools["conv"] = pools["conv"].astype(case.dtype)
    pools |= dict(zip(WAITING, updates_of(case), strict=True))
    spec = RecurrentState((("conv", (3, CHANNELS), ""), case.state, *case.waiting))
    rows = case.count if few else 2 * MAX_ROWS
    inputs = InputLayout(1, rows, 1, runner.address)
    step = empty_step(rows)
    step["rows"][0, 0] = case.count
    assert write_states(states_of(step, 0), 0, case.step)
    ctypes.memmove(inputs.numbers, step.ctypes.data, step.nbytes)
    widths = {0: (CHANNELS,), 1: (4,), 2: (4,), 3: (CHANNELS,), 4: case.out}
    values = {n: Value((Form(0, (("T", 1),)), *width), case.dtype) for n, width in widths.items()}
    own = {"layer": 0, "taps": Weight("taps", taps), "bias": None, "silu": True}
    convolve = Node("convolve", (0,), (3,), ("x",), (), own)
    own = {"layer": 0, **case.attributes, **{name: Weight(name, x) for name, x in weights.items()}}
    delta = Node("delta_rule", (3, 1, 2), (4,), ("mixed", "steps", "betas"), (), own)
    fields = {"x": 0, "steps": 1, "betas": 2}
    program = Program(("T",), fields, {}, values, (convolve, delta), (4,))
    if joined:
        program = join_recurrences(program)
        assert [(node.kind, node.name) for node in program.nodes] == [(FUSED, "recurrence")]
    recorder = Recorder(rows, runner.address, inputs, H200)
    states = {
        name: StateArray(runner.address(pool), pool.shape[1:], pool.dtype)
        for name, pool in pools.items()
    }
    room = {
        name: mx.concatenate([x, mx.zeros((rows - case.count, *x.shape[1:]), x.dtype)])
        for name, x in given.items()
    }
    places = {
        name: Place(recorder.constant(array), Buffer(recorder.constant(array), array.nbytes))
        for name, array in room.items()
    }
    result = mx.zeros((rows, *case.out), case.dtype)
    to = Buffer(recorder.constant(result), result.nbytes)
    Recording(recorder, {}, KVLayout.of((spec,)), {0: states}).record(program, places, [to])
    for kernel in recorder.kernels:
        runner.run(kernel)
    return [contents(result)[: case.count], *map(contents, pools.values())], len(recorder.kernels)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_delta_rule_convolves_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one kernel in graphs of few rows, with the bits of two kernels."""
    monkeypatch.setattr(recurrences, "_AT_ONCE", 3)  # one fewer than there are sequences
    expected, two = recurrence(joined=False, few=True)
    found, one = recurrence(joined=True, few=True)
    many, chunks = recurrence(joined=True, few=False)
    assert (two, one, chunks) == (2, 1, 3)
    for alone, together, in_many in zip(expected, found, many, strict=True):
        np.testing.assert_array_equal(bits_of(together), bits_of(alone))
        np.testing.assert_array_equal(bits_of(in_many), bits_of(alone))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_chunks_differ_by_rounding_alone() -> None:
    case = CASES["delta_rule in chunks"]
    given, weights = drawn(case)
    given["mixed"] = (given["mixed"] + 2 * given["mixed"][:1]).astype(case.dtype)  # alike keys
    weights["log_rates"] = weights["log_rates"] - 3  # slowly forgotten
    pool = pool_of(case)
    before = np.array(pool)
    runner, recorder, result = recorded(case, given, weights, pool)
    assert len(recorder.kernels) == 2
    for kernel in recorder.kernels:
        runner.run(kernel)
    found = mx.array(memory_of(result)).view(case.dtype).reshape(result.shape)
    states = np.array(memory_of(pool)).reshape(pool.shape)
    for number, rows in ((1, slice(1, 159)), (2, slice(159, 223))):
        each = case.step[number]
        start = before[each.block_ids(0)[0]] * (each.start > 0)
        operands = {name: np.array(x[rows].astype(mx.float32)) for name, x in given.items()}
        for name, x in weights.items():
            operands[name] = np.array(x.astype(mx.float32))
        y, state = exact_delta_rule(operands, start)
        distance = np.linalg.norm(states[WRITTEN[number]] - state) / np.linalg.norm(state)
        assert distance < 1e-5
        np.testing.assert_allclose(np.array(found[rows].astype(mx.float32)), y, 2**-8, 1e-5)


def exact_delta_rule(
    operands: Mapping[str, np.ndarray], state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a sequence's results and the state after it, in float64, token by token."""
    heads, values, keys = state.shape
    mixed, steps, betas, log_rates, biases = (
        operands[name].astype(np.float64)
        for name in ("mixed", "steps", "betas", "log_rates", "step_biases")
    )
    left = np.exp(-np.exp(log_rates) * np.logaddexp(steps + biases, 0))
    beta = 1 / (1 + np.exp(-betas))
    queries, given_keys, given_values = np.split(mixed, [2 * keys, 4 * keys], axis=-1)

    def unit(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), 2, keys).repeat(heads // 2, axis=1)
        unit_x: np.ndarray = x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + UNIT_EPS)
        return unit_x

    state, results = state.astype(np.float64), []
    for q, k, v, a, b in zip(
        unit(queries) / np.sqrt(keys),
        unit(given_keys),
        given_values.reshape(-1, heads, values),
        left,
        beta,
        strict=True,
    ):
        state = state * a[:, None, None]
        error = v - np.einsum("hvk,hk->hv", state, k)
        state = state + np.einsum("hv,hk->hvk", error * b[:, None], k)
        results.append(np.einsum("hvk,hk->hv", state, q))
    return np.array(results), state


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _, recorder, _ = recorded(case, *drawn(case), pool_of(case), updates_of(case))
    for kernel in recorder.kernels:
        assert_compiles(kernel.source, tmp_path)
