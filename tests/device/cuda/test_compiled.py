"""The sources of kernels that are compiled once a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cuda import compiled
from quire.device.cuda.compiled import CompiledKernel
from quire.device.gpu_kernels import problem_of
from tests.support.nvrtc import assert_compiles

BODY = "y[threadIdx.x] = x_shape[1] * (float)x[x_shape[0] - 1] + w[0];"


def text() -> str:
    kernel = CompiledKernel(["x", "w"], ["y"], BODY, "// header", 0)
    return kernel.text([mx.bfloat16, mx.uint32], [mx.float32], {0: 2}, 96)


def test_shapes_that_a_body_reads_come_as_numbers_behind_the_arrays() -> None:
    assert "__launch_bounds__(96)" in text()
    signature = (
        "const __nv_bfloat16* x,\nconst unsigned* w,\nfloat* y,\nint x_size_0,\nint x_size_1)"
    )
    assert signature in text()
    assert "const int x_shape[2] = {x_size_0, x_size_1};" in text()


def test_each_choice_of_types_has_a_binary_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    given: list[bytes] = []

    def binary(text: str) -> bytes:
        sources.append(text)
        return text.encode()

    def call(*, compiled_source: bytes, **_: Any) -> list[mx.array]:
        given.append(compiled_source)
        return []

    monkeypatch.setattr(compiled, "compiler", lambda: SimpleNamespace(binary=binary))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", call)
    kernel = CompiledKernel(["x", "w"], ["y"], BODY, "// header", 0)
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        kernel(
            inputs=[mx.zeros((2, 3), dtype), mx.zeros(1, mx.uint32)],
            grid=(96, 1, 1),
            threadgroup=(96, 1, 1),
            output_shapes=[(96,)],
            output_dtypes=[mx.float32],
        )
    assert len(sources) == 2, "compiled once for each choice"
    assert [b"const float* x" in each for each in given] == [True, False, True]


def test_launches_that_ask_for_more_shared_memory_are_modules_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX asks the driver at a module's first launch alone."""
    given: list[tuple[str, bytes]] = []
    sources: list[str] = []

    def binary(text: str) -> bytes:
        sources.append(text)
        return b"binary"

    def call(*, name: str, compiled_source: bytes, **_: Any) -> list[mx.array]:
        given.append((name, compiled_source))
        return []

    monkeypatch.setattr(compiled, "compiler", lambda: SimpleNamespace(binary=binary))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", call)
    for shared in (0, 40_000, 60_000, 90_000, 60_000):
        CompiledKernel(["x", "w"], ["y"], BODY, "// header", shared)(
            inputs=[mx.zeros((2, 3)), mx.zeros(1, mx.uint32)],
            grid=(96, 1, 1),
            threadgroup=(96, 1, 1),
            output_shapes=[(96,)],
            output_dtypes=[mx.float32],
        )
    unasked, some, more = given[0], given[2], given[3]
    assert given == [unasked, unasked, some, more, some]
    assert len({unasked, some, more}) == 3
    assert len(set(sources)) == 1, "what is compiled is the same for each, so found on disk"
    assert all(binary.startswith(b"binary") for _, binary in given)


@pytest.mark.slow
def test_it_compiles(tmp_path: Path) -> None:
    assert_compiles(text(), tmp_path)


def test_kernels_are_compiled_ahead_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    launched: list[bytes] = []
    doubles = SimpleNamespace(start=started.extend, binary=str.encode)
    monkeypatch.setattr(compiled, "compiler", lambda: doubles)

    def launch(*, compiled_source: bytes, **_: Any) -> list[mx.array]:
        launched.append(compiled_source)
        return [mx.zeros(96)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    kernel = CompiledKernel(["x", "w"], ["y"], BODY, "// header", 0)
    call: dict[str, Any] = {
        "inputs": [mx.zeros((2, 3)), mx.zeros(1, mx.uint32)],
        "grid": (96, 1, 1),
        "threadgroup": (96, 1, 1),
        "output_shapes": [(96,)],
        "output_dtypes": [mx.float32],
    }
    with compiled.compiling_ahead():
        (result,) = kernel(**call)
    assert (result.shape, result.dtype, launched) == ((96,), mx.float32, [])
    with compiled.compiling_ahead():
        assert problem_of(lambda: str(len(kernel(**call)))) == "1", "a check needs results"
    assert [text.encode() for text in started] == launched
    with compiled.compiling_ahead():
        kernel(**call)
    assert len(started) == 1, "what is loaded is not compiled again"
