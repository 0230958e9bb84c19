"""Low-rank products of adapters in recorded steps, run in the CPU emulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.device.operations import Operations
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.graph_cache import GraphCache
from quire.executor.graphs.products.low_rank import THREADS, LowRankProduct
from quire.executor.graphs.recorder import Kernel
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel
from quire.models.weights.low_rank import LowRank
from quire.program.trace import multiplied
from quire.scheduler.plan import StepResult
from tests.executor.graphs.emulated import bits_of
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import guarded, why_not
from tests.support.emulated_steps import launch
from tests.support.nvrtc import assert_compiles
from tests.support.parity import Company, executor_of, prompts

EMULATED = pytest.mark.skipif(bool(why_not()), reason=why_not())
EVERYDAY = 320, 260, 3
SIZES = [EVERYDAY, (30, 7, 16), (2048, 1024, 64)]
"""Columns, outputs and ranks."""


def product_of(inputs: int, outputs: int, rank: int) -> LowRankProduct:
    mx.random.seed(1)
    inner = mx.random.normal((3, rank, inputs)).astype(mx.bfloat16)
    outer = mx.random.normal((3, rank, outputs)).astype(mx.bfloat16)
    none = mx.zeros((1, 1, 1), mx.bfloat16)
    inner, outer = (mx.concatenate([none * each[:1], each[1:]]) for each in (inner, outer))
    return LowRankProduct(mx.bfloat16, mx.bfloat16, inner=inner, outer=outer)


@EMULATED
@pytest.mark.parametrize(
    "sizes",
    [each if each == EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in SIZES],
)
def test_rows_get_the_products_of_their_own_factors(sizes: tuple[int, int, int]) -> None:
    product, rows = product_of(*sizes), 4
    inputs, outputs, rank = sizes
    x = (mx.random.normal((rows, inputs)) / inputs**0.5).astype(mx.bfloat16)
    plain = mx.random.normal((rows, outputs)).astype(mx.bfloat16)
    numbers = mx.array([2, 0, 1, 2], mx.int32)
    wide = (each.astype(mx.float32) for each in (plain, x))
    factors = product.inner.astype(mx.float32), product.outer.astype(mx.float32)
    expected = Operations().add_low_rank(*wide, numbers, *factors)
    low, to = (
        guarded(np.zeros(rows * rank, np.float32)),
        guarded(np.zeros(rows * outputs, np.uint16)),
    )
    given = mx.array([rows]), x, numbers, product.inner, plain, product.outer
    step, from_x, chosen, inner, own, outer = arrays = [guarded(bits_of(each)) for each in given]
    assert len(arrays) == len(given)
    for source, grid, named in (
        (product.first, product.first_grid(rows + 1), (step, from_x, chosen, inner, low)),
        (product.second, product.second_grid(rows + 1), (step, own, low, chosen, outer, to)),
    ):
        places = tuple(int(each.ctypes.data) for each in named)
        launch(Kernel(source, grid, THREADS, 0, places, ()))
    found = mx.array(to).view(mx.bfloat16).reshape(rows, -1)
    assert mx.array_equal(found[1], plain[1]).item(), "a row without an adapter keeps its bits"
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), np.array(expected), rtol=1e-2, atol=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_products_compile(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    product = product_of(*sizes)
    for name, source in (("first", product.first), ("second", product.second)):
        (tmp_path / name).mkdir()
        assert_compiles(source, tmp_path / name)


def adapter_of(loaded: LoadedModel, seed: int, rank: int = 4) -> LowRank:
    """Return random factors of every matrix of a layer."""
    parameters, key, factors = named_parameters(loaded.model), mx.random.key(seed), {}
    for path in sorted(multiplied(loaded.model)):
        weight, module = parameters[path], path.removesuffix(".weight")
        if ".layers." not in path or weight.ndim != 2:
            continue
        scales = parameters.get(f"{module}.scales")
        inputs = weight.shape[1] if scales is None else scales.shape[1] * 64
        key, one, other = mx.random.split(key, 3)
        first = mx.random.normal((inputs, rank), key=one) / inputs**0.5
        second = mx.random.normal((rank, weight.shape[0]), key=other) / 4
        factors[module] = first.astype(mx.bfloat16), second.astype(mx.bfloat16)
    return LowRank(factors, f"random {seed}")


@EMULATED
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma4_moe"])
def test_steps_with_adapters_are_recorded_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_card(monkeypatch)
    assert_recorded_once(opened(FAMILIES[family]), monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", ["llama", "gemma4_moe"])
def test_steps_with_adapters_are_recorded_once_on_a_gpu(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_recorded_once(opened(FAMILIES[family]), monkeypatch)


def assert_recorded_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows is held against the model. Other adapters of the same shapes take the
    place of those that are unloaded."""
    recorded: list[int] = []
    record = GraphCache._record_step

    def noted(self: GraphCache, max_rows: int, *given: object, **named: object) -> object:
        recorded.append(max_rows)
        return record(self, max_rows, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(GraphCache, "_record_step", noted)
    company = Company(loaded, EngineConfig("", kv_memory=64 << 20, prefix_cache=False))
    executor = executor_of(company.engine)
    assert isinstance(executor, GraphExecutor)
    results: list[StepResult] = []
    collect = executor.collect
    monkeypatch.setattr(executor, "collect", lambda: results.append(collect()) or results[-1])

    def asked(named: str, *adapters: str) -> list[Request]:
        lengths = prompts([5 + n for n in range(len(adapters))], tokens=6)
        return [
            replace(each, id=f"{named} {each.id}", adapter=adapter)
            for each, adapter in zip(lengths, adapters, strict=True)
        ]

    for number in (1, 2):
        executor.adapters.add(f"a{number}", adapter_of(loaded, number))
    company.run(asked("first", "a1", "", "a2", "a1"))
    graphs = executor._adapted
    assert graphs is not None
    assert graphs.verified
    assert all(graphs.verified.values())
    first = list(recorded)
    results.clear()
    again = company.run(asked("again", "a1", "", "a2", "a1"))
    assert all(each.graphed for each in results[1:-1])
    executor.adapters.remove("a1")
    executor.adapters.add("a1", adapter_of(loaded, 1))
    executor.adapters.add("a3", adapter_of(loaded, 3))
    results.clear()
    moved = company.run(asked("moved", "a1", "", "a2", "a1"))
    assert executor._adapted is graphs
    assert recorded == first
    assert all(each.graphed for each in results[1:-1])
    for name, answer in again.items():
        if name.startswith("again"):
            assert moved[name.replace("again", "moved")].tokens == answer.tokens
    others = company.run(asked("others", "a3", "", "a3", "a2"))
    assert others["others r1"].tokens == again["again r1"].tokens
    ours, theirs = others["others r0"].logits[5], again["again r0"].logits[5]
    assert mx.abs(mx.array(ours) - mx.array(theirs)).max().item() > 0.1
    for name in executor.adapters.names:
        executor.adapters.remove(name)
    company.run(asked("none", ""))
    assert executor._adapted is None
