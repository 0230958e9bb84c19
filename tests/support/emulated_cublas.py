"""cuBLASLt without a card: it computes at once, on the CPU, what a product's description says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda import cublas

VERSION = 131_000
_FIRST = 7
"""What the library writes of its first algorithm."""
_SIZES = {
    "MatmulDesc": {3: 4, 7: 4, 8: 8},
    "MatmulPreference": {1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4},
}
"""Bytes of attributes by number, from `cublasLt.h`."""


@dataclass
class _Made:
    """A description of the library's: what it was created with, and its attributes."""

    arguments: tuple[int, ...]
    attributes: dict[int, int] = field(default_factory=dict)


class EmulatedCublas:
    """Stands in for the library.

    Attributes:
        preferences: those of each search for an algorithm.
        products: rows, columns and sums of each product computed.
        algorithms: how many are found.
        used: number of the algorithm of each product computed.
    """

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self.preferences: list[dict[int, int]] = []
        self.products: list[tuple[int, int, int]] = []
        self.used: list[int] = []
        self.algorithms = 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        kind, _, verb = name.removeprefix("cublasLt").rpartition("SetAttribute")
        if not verb and kind in _SIZES:
            return lambda *arguments: self._set(kind, *arguments)
        if name.endswith("Create"):
            return self._create
        raise AttributeError(name)

    def cublasLtGetVersion(self) -> int:
        return VERSION

    def cublasLtMatmulAlgoGetHeuristic(self, _: Any, *given: Any) -> int:
        *_described, preference, wanted, found, count = given
        self.preferences.append(self._of(preference).attributes)
        count._obj.value = min(self.algorithms, wanted)
        for number in range(count._obj.value):
            found[number].algorithm[0] = _FIRST + number
        return 0

    def cublasLtMatmul(
        self,
        _: Any,
        description: Any,
        one: Any,
        a: Any,
        a_layout: Any,
        b: Any,
        b_layout: Any,
        zero: Any,
        c: Any,
        c_layout: Any,
        d: Any,
        d_layout: Any,
        algorithm: Any,
        *workspace: Any,
    ) -> int:
        """Compute D = A B, or A^T B, and add a bias to its columns; layouts count columns first."""
        assert (one._obj.value, zero._obj.value) == (1, 0)
        number = algorithm._obj.algorithm[0] - _FIRST
        assert 0 <= number < self.algorithms, "a proposal of the library's"
        self.used.append(number)
        assert (c.value, c_layout.value) == (d.value, d_layout.value)
        left, right = self._matrix(a, a_layout), self._matrix(b, b_layout)
        attributes = self._of(description).attributes
        left = left.T if attributes.get(3) else left
        sums = _numbers(left) @ _numbers(right)
        self.products.append((*sums.shape, right.shape[0]))
        if attributes.get(7):
            assert attributes[7] == 4, "CUBLASLT_EPILOGUE_BIAS"
            bias = (ctypes.c_uint16 * len(sums)).from_address(attributes[8])
            sums = sums + _numbers(np.array(bias))[:, None]
        result = mx.array(np.ascontiguousarray(sums.T)).astype(mx.bfloat16).view(mx.uint16)
        self._matrix(d, d_layout)[...] = np.array(result).T
        return 0

    def _create(self, to: Any, *arguments: Any) -> int:
        numbers = tuple(getattr(each, "value", each) for each in arguments)
        self._made.append(_Made(numbers))
        to._obj.value = len(self._made)
        return 0

    def _set(self, kind: str, of: Any, attribute: int, value: Any, size: Any) -> int:
        if size.value != _SIZES[kind][attribute]:
            return 7  # CUBLAS_STATUS_INVALID_VALUE
        self._of(of).attributes[attribute] = value._obj.value
        return 0

    def _of(self, handle: Any) -> _Made:
        return self._made[handle.value - 1]

    def _matrix(self, address: Any, layout: Any) -> np.ndarray:
        """Return the memory of a matrix in bfloat16, `[rows, columns]`."""
        kind, rows, columns, leading = self._of(layout).arguments
        assert (kind, leading) == (14, rows)
        memory = (ctypes.c_uint16 * (rows * columns)).from_address(address.value)
        return np.ctypeslib.as_array(memory).reshape(columns, rows).T


def _numbers(matrix: np.ndarray) -> np.ndarray:
    """Return bfloat16's bits as float32."""
    return (matrix.astype(np.uint32) << 16).view(np.float32)


def emulate_cublas(monkeypatch: pytest.MonkeyPatch) -> EmulatedCublas:
    """Let products find this library, and nothing that was known of another."""
    library = EmulatedCublas()
    monkeypatch.setattr(cublas, "_library", lambda: library)
    cublas._plan.cache_clear()
    cublas._handle.cache_clear()
    return library
