"""The kernel of routers, run in the CPU emulation beside the routers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.device.mixture import Router
from quire.device.operations import Operations
from quire.executor.graphs.products.routes import ROUTE_THREADS, SCORING_THREADS, Route, grouping
from quire.executor.graphs.recorder import EXPERT_TILE, Kernel
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter, SparseMixer
from tests.executor.graphs.emulated import bits_of
from tests.support.emulated_metal import guarded, why_not
from tests.support.emulated_steps import launch
from tests.support.nvrtc import assert_compiles


@dataclass(frozen=True)
class Case:
    """A router, and what it is given.

    Attributes:
        equal: whether many of a row's logits are equal.
    """

    router: Router
    experts: int
    corrected: bool = False
    per_expert: bool = False
    equal: bool = False
    dtype: mx.Dtype = mx.bfloat16


CASES = {
    "softmax": Case(SoftmaxRouter(4, normalise=True), 32, per_expert=True),
    "softmax, equal logits": Case(SoftmaxRouter(4, normalise=True), 70, equal=True),
    "softmax over all": Case(SoftmaxRouter(6, normalise=False, scale=0.5), 60),
    "softmax, corrected": Case(SoftmaxRouter(6, True, True), 64, corrected=True),
    "softmax, groups": Case(
        SoftmaxRouter(6, False, groups=8, best_groups=3), 160, dtype=mx.float32
    ),
    "softmax, groups by two": Case(SoftmaxRouter(2, True, groups=4, best_groups=2, counted=2), 16),
    "sigmoid": Case(SigmoidRouter(2, True, corrected=False), 8),
    "sigmoid, not normalised": Case(SigmoidRouter(1, False, corrected=False), 16),
    "sigmoid, groups": Case(
        SigmoidRouter(8, True, 2.5, groups=8, best_groups=4), 256, corrected=True
    ),
    "sigmoid, capped": Case(SigmoidRouter(4, True, 2.5, softcap=2.0), 40, corrected=True),
    "sparse mixer": Case(SparseMixer(0.01), 16),
    "sparse mixer, equal logits": Case(SparseMixer(0.01), 40, equal=True),
}
EVERYDAY = ("sigmoid, groups", "softmax, equal logits")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
@pytest.mark.parametrize("way", ["together", "apart", "one row"])
def test_routes_are_the_routers_own(name: str, way: str) -> None:
    case, rows = CASES[name], 1 if way == "one row" else 5
    random = np.random.default_rng(3)
    logits = mx.array(random.normal(size=(rows, case.experts)).astype(np.float32) * 2)
    logits = (mx.round(logits) if case.equal else logits).astype(case.dtype)
    correction = per_expert = None
    if case.corrected:
        correction = mx.array(random.normal(size=case.experts).astype(np.float32) * 0.3)
    if case.per_expert:
        per_expert = mx.array(1 + random.random(case.experts).astype(np.float32))
    wide = logits.astype(mx.float32)
    chosen, weights = Operations().route(wide, correction, per_expert, case.router)
    order = np.argsort(np.array(chosen), axis=1)
    expected = np.take_along_axis(np.array(chosen), order, 1)
    shares = np.take_along_axis(np.array(weights), order, 1)

    route = Route.of(case.router, case.experts, correction, per_expert, case.dtype)
    pairs = (1 if way == "one row" else 8) * route.k
    most = min(pairs, case.experts + pairs // EXPERT_TILE)
    outputs = [guarded(np.zeros(pairs, kind)) for kind in (np.int32, np.float32, np.int32)]
    outputs.append(guarded(np.full(4 * most, 7, np.int32)))
    given = [guarded(np.array([rows], np.int32)), guarded(bits_of(logits))]
    for each in (correction, per_expert):
        given.append(guarded(np.array([0.0] if each is None else each, np.float32)))
    addresses = tuple(int(each.ctypes.data) for each in (*given, *outputs))
    one, (chosen_by, order_by) = (1, 1, 1), (addresses[:6], (addresses[0], addresses[4]))
    if way == "one row":
        launch(Kernel(route.alone(), one, 32, 0, addresses, ()))
    elif way == "apart":
        launch(Kernel(route.scoring(), (2, 1, 1), SCORING_THREADS, 0, chosen_by, ()))
        grouped = (*order_by, *addresses[6:])
        text = grouping(route.experts, route.k, most, tile=EXPERT_TILE)
        launch(Kernel(text, one, ROUTE_THREADS, 0, grouped, ()))
    else:
        launch(Kernel(route.text(most), one, ROUTE_THREADS, 0, addresses, ()))
    found, found_weights = (each[: rows * route.k].reshape(rows, -1) for each in outputs[:2])
    order = np.argsort(found, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(found, order, 1), expected)
    np.testing.assert_allclose(
        np.take_along_axis(found_weights, order, 1), shares, rtol=5e-3, atol=1e-6
    )
    tiles, counts = outputs[3][: 3 * most].reshape(-1, 3), outputs[3][3 * most :]
    assert way == "one row" or not counts.any()
    assert tiles[:, 2].sum() == rows * route.k
    if way == "one row":
        assert outputs[2].tolist() == tiles[:, 1].tolist() == list(range(route.k))
        assert tiles[:, 0].tolist() == outputs[0].tolist()
        return
    grouped_pairs = list[int]()
    for expert, begin, count in tiles.tolist():
        own = outputs[2][begin : begin + count].tolist()
        assert {int(outputs[0][pair]) for pair in own} <= {expert}
        grouped_pairs += own
    assert sorted(grouped_pairs) == list(range(rows * route.k))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_routers_compile(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    more = (mx.zeros(1) if each else None for each in (case.corrected, case.per_expert))
    route = Route.of(case.router, case.experts, *more, case.dtype)
    for text in (
        *(route.text(40), route.alone()),
        *(route.scoring(), grouping(route.experts, route.k, 40, tile=EXPERT_TILE)),
    ):
        assert_compiles(text, tmp_path)
