"""The choice of experts: as routers make it, each row by itself, with the same bits anywhere."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.mixture import Router
from quire.models.layers.routers import SigmoidRouter, SoftmaxRouter, SparseMixer

EXPERTS = 64
ROUTERS: dict[str, Router] = {
    "softmax": SoftmaxRouter(4, normalise=True),
    "softmax over all": SoftmaxRouter(6, normalise=False, scale=0.5),
    "softmax, groups": SoftmaxRouter(6, normalise=False, groups=8, best_groups=3),
    "softmax, groups by two": SoftmaxRouter(2, normalise=True, groups=4, best_groups=2, counted=2),
    "sigmoid": SigmoidRouter(2, normalise=True, corrected=False),
    "sigmoid, groups": SigmoidRouter(8, normalise=True, scale=2.5, groups=8, best_groups=4),
    "sigmoid, capped": SigmoidRouter(4, normalise=False, softcap=2.0),
}


def in_order(chosen: mx.array, weights: mx.array) -> tuple[Any, Any]:
    """Return experts and weights of each row, by expert."""
    order = np.argsort(np.array(chosen), axis=1)
    return tuple(np.take_along_axis(np.array(each), order, 1) for each in (chosen, weights))


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_are_the_routers(
    compiled: Any, name: str, corrected: bool, equal: bool
) -> None:
    router = ROUTERS[name]
    assert router.routing is not None
    rows, bias, factors = (
        mx.random.normal(shape, key=mx.random.key(seed))
        for seed, shape in enumerate([(9, EXPERTS), (EXPERTS,), (EXPERTS,)])
    )
    if equal:  # many of a row's logits
        rows = mx.round(rows)
    correction = 0.3 * bias if corrected else None
    found = compiled.route(2 * rows, correction, factors, **asdict(router.routing))
    chosen, weights = router.route(2 * rows, correction)
    experts, expected = in_order(chosen, weights * factors[chosen])
    own_experts, shares = in_order(*found)
    assert np.array_equal(own_experts, experts)
    np.testing.assert_allclose(shares, expected, rtol=2e-5, atol=1e-7)
    for row in range(9):
        own = 2 * rows[row : row + 1]
        alone = compiled.route(own, correction, factors, **asdict(router.routing))
        for part, whole in zip(alone, found, strict=True):
            assert mx.array_equal(part[0], whole[row])


def test_equal_and_undefined_logits_choose_distinct_experts(compiled: Any) -> None:
    routing = asdict(SoftmaxRouter(4, normalise=True).routing)
    for logits in (mx.zeros((1, EXPERTS)), mx.full((1, EXPERTS), mx.nan), mx.full((1, 8), -mx.inf)):
        chosen, _ = compiled.route(logits, None, None, **routing)
        last = logits.shape[-1] - 1
        assert chosen.tolist() == [[last, last - 1, last - 2, last - 3]]


def test_two_experts_one_after_the_other_are_left_to_mlx() -> None:
    assert SparseMixer(0.01).routing is None
