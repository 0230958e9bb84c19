"""Steps whose shapes repeat: which run the model's code, what they compute, where they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import Backends
from quire.attention.reference import ReferenceBackend
from quire.attention.step import Attention
from quire.cache.blocks import PoolKey, Resize
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVLayout
from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.kv_format import KVFormat
from quire.device.dtypes import int32
from quire.device.verified import VerifiedKernels
from quire.executor import repeated
from quire.executor.inputs import StepInputs
from quire.executor.repeated import RepeatedSteps
from quire.models.base import ForwardContext
from quire.scheduler.plan import ScheduledSequence, StepPlan
from tests.engine.rows import SIZE, scheduled
from tests.support import launches
from tests.support.launches import as_metal, counted, generating

PLAIN = KVFormat()
_Result = tuple[mx.array, list[mx.array]]
LAYOUT = KVLayout.of((FullKV(1, 8), FullKV(1, 8)))


def products(q: mx.array, k: mx.array, v: mx.array, **_: object) -> mx.array:
    """Stand for attention by two products, which `mx.compile` does not join to a kernel."""
    return (q @ k.swapaxes(-1, -2)) @ v


def doubled(hidden: mx.array) -> mx.array:
    """Stand for a model's head."""
    return hidden + hidden


class _Model:
    """Attends with embeddings as queries, keys and values, in two layers."""

    def __init__(self) -> None:
        self.calls = 0
        self._table = mx.random.normal((1024, 8), key=mx.random.key(1))

    def __call__(self, step: ForwardContext) -> mx.array:
        self.calls += 1
        x = self._table[step.tokens][:, None]
        for layer in range(2):
            x = step.attend(layer, x, x, x, scale=1.0)
        return x


class _Side:
    """A model with pools of its own, which runs steps."""

    def __init__(self, *, compiles: bool, identity: str = "") -> None:
        self.model = _Model()
        self.pools = Pools(LAYOUT.groups, SIZE, mx.float32)
        self.pools.resize(Resize(PoolKey(0, PLAIN), 8))
        self.steps = RepeatedSteps(
            self.model, self.pools, logits=doubled, compiles=compiles, identity=identity
        )
        self._attention = Attention(LAYOUT, self.pools, Backends([ReferenceBackend()]))

    def inputs(self, *rows: ScheduledSequence) -> StepInputs:
        return StepInputs(StepPlan(rows), self._attention, {}, None)

    def run(self, *rows: ScheduledSequence) -> list[float]:
        computed = self.steps.compute(self.inputs(*rows))
        logits = doubled(computed.hidden) if computed.logits is None else computed.logits
        mx.eval(logits, self.pools.arrays())
        numbers: list[float] = logits.flatten().tolist()
        return numbers

    def addresses(self) -> list[int]:
        """Return where the pools are in memory."""
        return [np.asarray(array).__array_interface__["data"][0] for array in self.pools.arrays()]


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", products)
    with as_metal():
        yield


def row(name: str, position: int, *blocks: int, count: int = 1) -> ScheduledSequence:
    return scheduled(name, position, count, [list(blocks)], PLAIN)


def test_the_third_step_of_a_shape_is_the_last_that_runs_the_models_code() -> None:
    side, eager = _Side(compiles=True), _Side(compiles=False)
    calls = []
    for n in range(6):  # the second sequence's block changes, its number of blocks does not
        rows = row("a", 1 + n % 3, 2), row("b", 5 + n % 3, 5, 6 if n < 4 else 7)
        assert side.run(*rows) == eager.run(*rows)
        calls.append(side.model.calls)
    assert calls == [1, 2, 4, 4, 4, 4]  # the third is compiled, and verified
    for own, other in zip(side.pools.arrays(), eager.pools.arrays(), strict=True):
        assert own.tolist() == other.tolist()


def test_another_shape_runs_the_models_code_and_the_first_is_still_known() -> None:
    side, eager = _Side(compiles=True), _Side(compiles=False)
    for n in range(4):
        side.run(row("a", 1 + n % 3, 2))
        eager.run(row("a", 1 + n % 3, 2))
    longer = row("a", SIZE, 2, 3)
    assert side.run(longer) == eager.run(longer)
    assert side.model.calls == 5
    assert side.run(row("b", 2, 4)) == eager.run(row("b", 2, 4))
    assert side.model.calls == 5


def test_repeated_steps_write_to_pools_in_place() -> None:
    side = _Side(compiles=True)
    for n in range(4):
        side.run(row("a", 1 + n % 3, 2))
    before = side.addresses()
    for n in range(4, 8):
        side.run(row("a", 1 + n % 3, 2))
        assert side.addresses() == before
    assert side.model.calls == 4


def test_steps_whose_arrays_do_not_determine_their_graph_run_the_models_code() -> None:
    side = _Side(compiles=True)
    assert side.inputs(row("a", 3, 2), row("b", 1, 5)).alike == PLAIN
    assert side.inputs(row("a", 0, 2)).alike is None  # nothing was read before
    assert side.inputs(row("a", 3, 2, count=2)).alike is None  # a prompt or drafts
    packed = scheduled("b", 3, 1, [[2]], KVFormat("page", 4, 4))
    assert side.inputs(row("a", 3, 2), packed).alike is None


def test_a_model_that_makes_arrays_of_its_own_keeps_no_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = _Side(compiles=True)
    numbers = iter(range(9))

    def model(step: ForwardContext) -> mx.array:
        return side.model(step) + int32([next(numbers)])

    side.steps = RepeatedSteps(model, side.pools, logits=doubled, compiles=True)
    eager = _Side(compiles=False)
    for n in range(5):
        rows = row("a", 1 + n % 3, 2)
        ours, plain = side.run(*[rows]), eager.run(rows)
        added = {round(own - other) for own, other in zip(ours, plain, strict=True)}
        assert len(added) == 1
    assert "the model reads unforeseen arrays" in caplog.text
    assert side.model.calls == 6  # the attempt to compile ran it once more


def lasting(steps: _Side, eager: _Side, first: int = 0) -> None:
    """Run the same steps on both sides, which give the same numbers and write the same."""
    for n in range(first, first + 5):
        rows = row("a", 1 + n % 3, 2), row("b", 5 + n % 3, 5, 6)
        assert steps.run(*rows) == eager.run(*rows)
    for own, other in zip(steps.pools.arrays(), eager.pools.arrays(), strict=True):
        assert own.tolist() == other.tolist()


def replaying(monkeypatch: pytest.MonkeyPatch, change: Callable[[_Result], _Result]) -> list[int]:
    """Let `change` have what compiled graphs compute. Return a list of one entry a replay."""
    compile, replays = mx.compile, list[int]()

    def compiled(function: Callable[..., _Result]) -> Callable[..., _Result]:
        call = compile(function)

        def run(*arrays: list[mx.array]) -> _Result:
            replays.append(1)
            return change(call(*arrays))

        return run

    monkeypatch.setattr(mx, "compile", compiled)
    return replays


@pytest.mark.parametrize("where", ["hidden states", "pools"])
def test_a_graph_that_computes_something_else_is_never_used(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(result: _Result) -> _Result:
        hidden, written = result
        if where == "pools":
            return hidden, [each + 1 for each in written]
        return hidden * 1.1, written

    replays = replaying(monkeypatch, wrong)
    lasting(_Side(compiles=True), _Side(compiles=False))
    assert len(replays) == 1
    assert ["Compiled steps disabled" in each.message for each in caplog.records] == [True]


def test_what_is_no_number_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = replaying(monkeypatch, lambda result: (result[0] * mx.nan, result[1]))
    lasting(_Side(compiles=True), _Side(compiles=False))
    assert len(replays) == 1


def test_a_step_whose_graph_fails_is_the_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call of a known graph raises, and then one that is compiled."""
    failing = list[bool]()

    def refuse(result: _Result) -> _Result:
        if failing:
            raise RuntimeError("the device refuses a kernel")
        return result

    replays = replaying(monkeypatch, refuse)
    side, eager = _Side(compiles=True), _Side(compiles=False)
    lasting(side, eager)
    assert len(replays) == 3
    assert not caplog.records
    failing.append(True)
    lasting(side, eager, first=5)
    assert len(replays) == 4
    assert len(caplog.records) == 1
    assert "the device refuses a kernel" in caplog.text
    lasting(_Side(compiles=True), _Side(compiles=False))
    assert len(replays) == 5


def test_a_graph_whose_evaluation_fails_at_first_leaves_the_pools_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(result: _Result) -> _Result:
        hidden, written = result
        dead = mx.linalg.cholesky(-mx.eye(8), stream=mx.cpu)
        return hidden + dead[0, 0], [each + dead[0, 0] for each in written]

    replays = replaying(monkeypatch, late)
    lasting(_Side(compiles=True), _Side(compiles=False))
    assert len(replays) == 1


def test_a_failed_step_that_a_graph_built_ends_their_use() -> None:
    side, eager = _Side(compiles=True), _Side(compiles=False)
    lasting(side, eager)
    calls = side.model.calls
    side.steps.fail()
    lasting(side, eager, first=5)
    assert side.model.calls == calls + 5


def test_a_format_is_trusted_after_some_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_VERIFIED", 2)
    side, extra = _Side(compiles=True), []
    for count in range(1, 5):
        before = side.model.calls
        for n in range(4):
            side.run(*(row("abcd"[each], 1 + n % 3, 2 + each) for each in range(count)))
        extra.append(side.model.calls - before)
    assert extra == [4, 3, 2, 2]  # the first step of all asks what layers need


def test_a_shape_is_verified_once_though_graphs_are_forgotten() -> None:
    side, eager, calls = _Side(compiles=True), _Side(compiles=False), []
    for _ in range(2):
        lasting(side, eager)
        side.steps.clear()
        calls.append(side.model.calls)
    assert calls == [4, 6]  # the first of the shape, and the one that is compiled


def test_verified_shapes_are_known_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = VerifiedKernels(tmp_path, "mlx 1")
    monkeypatch.setattr(repeated, "verified_kernels", lambda: kept)
    calls = []
    for identity in ("a", "a", "b", "", ""):
        side = _Side(compiles=True, identity=identity)
        lasting(side, _Side(compiles=False))
        calls.append(side.model.calls)
    assert calls == [4, 3, 4, 4, 4]


def test_large_pools_are_not_copied_for_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_COPIED_BYTES", 1)
    side = _Side(compiles=True)
    lasting(side, _Side(compiles=False))
    assert side.model.calls == 5


@pytest.mark.slow  # MLX compiles the joined operations of a CPU by g++
@pytest.mark.parametrize("format", ["plain", "page-4", "turbo-4", "uniform-4"])
@pytest.mark.parametrize("name", [*launches.LEVEL, "qwen3_5", "mamba2", "falcon_h1"])
def test_generated_tokens_are_those_of_the_models_code(
    name: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    config, found = counted(name), []
    for compiles in (False, True):
        monkeypatch.setattr(launches.CountedMetal, "compiles_steps", compiles)
        given = EngineConfig(
            "", kv_memory=64 << 20, speculate="off", kv_format=parse_format(format)
        )
        engine = generating(config, 5, given)
        outputs = [output for _ in range(30) for output in engine.step()]
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
