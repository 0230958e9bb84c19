"""The one object that knows the device: the same for all, and what it decides is what MLX does."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import quire
from quire.device.device import CPU, CUDA, Metal, current_device

SOURCE = Path(quire.__file__).parent


def test_there_is_one_object_for_the_default_device() -> None:
    device = current_device()
    assert device is current_device()
    assert isinstance(device, CPU) == (mx.default_device() == mx.cpu)
    assert device.weight_memory() > 0
    assert device.free_memory() > 0
    assert mx.device_info()["architecture"] in device.name


def test_two_modules_alone_ask_mlx_for_the_device() -> None:
    asked, questions = [], {"default_device", "is_available", "device_info"}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not any(each in text for each in questions):
            continue  # parsing takes far longer
        names = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
        if names & questions:
            asked.append(str(path.relative_to(SOURCE)))
    assert sorted(asked) == ["device/device.py", "device/machine.py"]


@pytest.mark.parametrize("before", [0, 1 << 40])
def test_peaks_of_memory_are_of_one_time(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's peak begins anew with each change of mapped memory, which is added to it."""
    device, mapped = CUDA(), 1 << 30
    monkeypatch.setattr(device, "free_memory", lambda: 0)
    extension = SimpleNamespace(mapped_bytes=lambda: (mapped, before))
    monkeypatch.setattr(device, "_extension", extension)
    held = mx.zeros(1 << 16)
    mx.eval(held)
    mx.reset_peak_memory()
    found = device.memory()
    assert found["arrays"] >= mapped + held.nbytes
    assert found["arrays_peak"] == max(before, found["arrays"])


@pytest.mark.parametrize("device", [CPU(), CUDA(), Metal()], ids=["cpu", "cuda", "metal"])
def test_products_with_a_transposed_matrix(device: CPU | CUDA | Metal) -> None:
    x, y = mx.random.normal((2, 3, 16)), mx.random.normal((2, 5, 16))
    expected = (x[:, :, None] * y[:, None]).sum(axis=-1)
    assert mx.allclose(device.times_transposed(x, y), expected, atol=1e-5)


def test_operations_are_compiled_only_where_no_request_waits_for_a_compiler() -> None:
    def twice(x: mx.array) -> mx.array:
        return x + x

    assert CPU().fused(twice) is twice
    assert CUDA().fused(twice) is twice
    assert Metal().fused(twice) is not twice


def test_where_gathered_products_are_wrong_they_are_not_used() -> None:
    serve = [mx.float32 in each.operations.gather_mm_dtypes for each in (CPU(), CUDA(), Metal())]
    assert serve == [True, False, True]
    assert mx.bfloat16 not in CPU().operations.gather_mm_dtypes
