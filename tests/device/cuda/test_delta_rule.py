"""The kernel of the gated delta rule, in the CPU emulation beside MLX's operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.device import recurrence
from quire.device.cuda import delta_rule
from quire.device.cuda.compiled import CompiledKernel
from quire.device.cuda.delta_rule import DeltaRule, DeltaRules, difference_of
from quire.device.cuda.operations import CUDAOperations
from quire.device.operations import Operations
from quire.device.recurrence import UNIT_EPS, DeltaGates
from quire.device.verified import relative_norm
from tests.support.emulated_metal import why_not
from tests.support.emulated_products import shaped
from tests.support.nvrtc import assert_compiles

QWEN = DeltaRule(4, 2, 16, 64, False, UNIT_EPS, 1.0, None)
KIMI = DeltaRule(2, 2, 20, 24, True, UNIT_EPS, 2.0, -5.0)
QWEN_35B = DeltaRule(32, 16, 128, 128, False, UNIT_EPS, 1.0, None)
NARROW = (*3 * (mx.bfloat16,), *3 * (mx.float32,))
WIDE = 6 * (mx.float32,)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not():
        pytest.skip(why_not())
    monkeypatch.setattr(delta_rule, "cuda_kernel", shaped)
    monkeypatch.setattr(delta_rule, "_kernel", delta_rule._kernel.__wrapped__)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("types", [NARROW, WIDE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "rule", [QWEN, replace(QWEN, own=4), KIMI], ids=["a head", "many rows", "a channel"]
)
def test_states_and_results_are_those_of_mlx(
    rule: DeltaRule, types: tuple[mx.Dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert difference_of(rule, types) is None
    right = recurrence.delta_rule
    monkeypatch.setattr(
        recurrence,
        "delta_rule",
        lambda mixed, gates, state, **more: right(
            mixed, replace(gates, log_rates=gates.log_rates + 0.1), state, **more
        ),
    )
    assert difference_of(rule, types) is not None


def operands() -> tuple[mx.array, DeltaGates, mx.array]:
    keys = mx.random.split(mx.random.key(3), 6)
    shapes = [(3, 4, 2 * 2 * 64 + 4 * 16), (3, 4, 4), (3, 4, 4), (4,), (4,), (3, 4, 16, 64)]
    drawn = zip(shapes, keys, NARROW, strict=True)
    mixed, steps, betas, rates, biases, state = (
        mx.random.normal(shape, key=key).astype(dtype) for shape, key, dtype in drawn
    )
    return mixed, DeltaGates(steps, betas, rates, step_biases=biases), state


@pytest.mark.usefixtures("emulated")
def test_operations_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, gates, state = operands()
    expected = Operations().gated_delta(mixed, gates, state, key_heads=2, eps=UNIT_EPS)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("many launches a token")

    monkeypatch.setattr(delta_rule, "difference_of", lambda rule, types: None)
    monkeypatch.setattr(recurrence, "delta_rule", refused)
    found = CUDAOperations().gated_delta(mixed, gates, state, key_heads=2, eps=UNIT_EPS)
    for got, own in zip(found, expected, strict=True):
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        assert relative_norm(got, own).item() < 2e-2


def test_a_kernel_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delta_rule, "difference_of", lambda rule, types: "too far")
    rules = DeltaRules()
    for _ in range(2):
        assert rules.advance(*operands(), key_heads=2, eps=UNIT_EPS) is None
    assert caplog.text.count("too far") == 1


@pytest.mark.slow
@pytest.mark.parametrize("types", [NARROW, WIDE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rule", [QWEN_35B, KIMI], ids=["a head", "a channel"])
def test_the_kernel_compiles(rule: DeltaRule, types: tuple[mx.Dtype, ...], tmp_path: Path) -> None:
    kernel = delta_rule._kernel(rule)
    assert isinstance(kernel, CompiledKernel)
    text = kernel.text(types, (types[0], types[-1]), {0: 3}, delta_rule.THREADS)
    assert_compiles(text, tmp_path)
