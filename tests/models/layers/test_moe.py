"""Experts: sorted and unsorted paths, and every layout that checkpoints use."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.device.activations import Gating
from quire.device.operations import UnfusedOperations
from quire.models.layers.moe import Experts, stack_experts
from quire.models.layers.routers import top_experts


def _experts(dtype: mx.Dtype = mx.float32) -> Experts:
    experts = Experts(8, 32, 16, Gating("silu"))
    keys = mx.random.split(mx.random.key(0), 3)
    experts.gate_proj.weight = mx.random.normal((8, 16, 32), key=keys[0])
    experts.up_proj.weight = mx.random.normal((8, 16, 32), key=keys[1])
    experts.down_proj.weight = mx.random.normal((8, 32, 16), key=keys[2])
    experts.set_dtype(dtype)
    return experts


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [3, 60])  # as they are, and sorted by expert
def test_experts_of_narrow_types_compute_the_same(rows: int, dtype: mx.Dtype) -> None:
    x = mx.random.normal((rows, 32), key=mx.random.key(1))
    chosen, weights = top_experts(mx.random.normal((rows, 8), key=mx.random.key(2)), 3)

    narrow = _experts(dtype)(x.astype(dtype), chosen, weights)
    wide = _experts()(x, chosen, weights)

    assert narrow.dtype == dtype
    assert mx.max(mx.abs(narrow - wide)).item() < 0.02 * mx.max(mx.abs(wide)).item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("gating", [Gating("silu", 7.0, 1.7), Gating("silu", 7.0)])
def test_bounds_of_a_gate_do_not_widen_it(gating: Gating, dtype: mx.Dtype) -> None:
    x, y = (10 * mx.random.normal((4, 8), key=mx.random.key(seed)) for seed in (1, 2))
    gated = UnfusedOperations().gated
    narrow, wide = gated(gating, x.astype(dtype), y.astype(dtype)), gated(gating, x, y)
    assert narrow.dtype == dtype
    assert mx.max(mx.abs(narrow - wide)).item() < 0.02 * mx.max(mx.abs(wide)).item()


def test_sorting_rows_by_expert_changes_nothing() -> None:
    experts = _experts()
    x = mx.random.normal((60, 32), key=mx.random.key(1))
    chosen, weights = top_experts(mx.random.normal((60, 8), key=mx.random.key(2)), 3)

    together = experts(x, chosen, weights)  # 180 pairs: sorted
    apart = mx.concatenate(
        [experts(x[i : i + 6], chosen[i : i + 6], weights[i : i + 6]) for i in range(0, 60, 6)]
    )  # 18 pairs each: not

    assert mx.max(mx.abs(together - apart)).item() < 1e-3 * mx.max(mx.abs(apart)).item()


def test_choose_takes_the_highest() -> None:
    indices, scores = top_experts(mx.array([[0.1, 5.0, -1.0, 3.0]]), 2)
    assert sorted(zip(indices[0].tolist(), scores[0].tolist(), strict=True)) == [(1, 5.0), (3, 3.0)]


def test_layouts_of_checkpoints_become_one() -> None:
    gate, up = mx.random.normal((2, 4, 6, 8), key=mx.random.key(3))
    down = mx.random.normal((4, 8, 6), key=mx.random.key(4))
    parts = {"gate": gate, "up": up, "down": down}
    layouts = [
        {"a.experts.gate_up_proj": mx.concatenate([gate, up], axis=1), "a.experts.down_proj": down},
        {f"a.experts.{i}.{n}_proj.weight": w[i] for n, w in parts.items() for i in range(4)},
        {f"a.switch_mlp.{n}_proj.weight": w for n, w in parts.items()},
        {f"a.experts.switch_glu.{n}_proj.weight": w for n, w in parts.items()},
    ]
    for layout in layouts:
        stacked = stack_experts(layout)
        assert stacked.keys() == {f"a.experts.{n}_proj.weight" for n in parts}
        for name, array in parts.items():
            assert mx.array_equal(stacked[f"a.experts.{name}_proj.weight"], array)
