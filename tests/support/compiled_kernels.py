"""Kernels that a GPU would have to compile, found without one: MLX's by their types, and Quire's.

MLX 0.32.4 compiles for CUDA at first use what gathers and scatters, once for each choice of types
and number of index arrays, and what `mx.compile` fuses. All else it has ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.device import activations, operations

Needed = set[tuple[object, ...]]
"""Kernels by what MLX, or the compiler of ours, knows them by."""

_REDUCTIONS = ("add", "subtract", "multiply", "divide", "maximum", "minimum")


@contextmanager
def needed_kernels() -> Iterator[Needed]:
    """Collect the kernels of operations called within the block, computed or not."""
    found: Needed = set()
    with pytest.MonkeyPatch.context() as patch:
        for name, noted in (("__getitem__", _gathers), ("__setitem__", _scatters)):
            patch.setattr(mx.array, name, _noting(getattr(mx.array, name), noted, found))
        patch.setattr(mx, "take", _noting(mx.take, _takes, found))
        for name in ("take_along_axis", "put_along_axis"):
            patch.setattr(mx, name, _noting(getattr(mx, name), _along_axis(name), found))
        for name in ("quantized_matmul", "gather_qmm"):
            patch.setattr(mx, name, _noting(getattr(mx, name), _products, found))
        patch.setattr(mx.array, "at", _At.of(mx.array, found))
        for name, function in activations.COMPILED.items():
            patch.setitem(activations.COMPILED, name, _noting(function, _fused(name), found))
        for name in ("_compiled_turn", "_compiled_gate"):
            patch.setattr(operations, name, _noting(getattr(operations, name), _fused(name), found))
        yield found


def _noting(
    call: Callable[..., Any], note: Callable[..., Any], found: Needed
) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        kernel = note(*args, **kwargs)
        if kernel is not None:
            found.add(kernel)
        return call(*args, **kwargs)

    return noting


def _gathers(array: mx.array, index: object) -> tuple[object, ...] | None:
    types = _index_types(array, index, writes=False)
    return ("gather", array.dtype, *types) if types else None


def _scatters(array: mx.array, index: object, _: object) -> tuple[object, ...] | None:
    types = _index_types(array, index, writes=True)
    return ("scatter", "assign", array.dtype, *types) if types else None


def _takes(array: mx.array, index: mx.array | int, axis: int | None = None) -> tuple[object, ...]:
    return ("gather", array.dtype, index.dtype if isinstance(index, mx.array) else mx.uint32, 1)


def _along_axis(name: str) -> Callable[..., tuple[object, ...]]:
    return lambda array, index, *_, **__: (name, array.dtype, index.dtype)


def _products(
    x: mx.array, codes: mx.array, scales: mx.array, *_: object, **packing: Any
) -> tuple[object, ...] | None:
    """Name the kernel of a product: one is ready for fewer than 8 rows, others are made for 16, 32
    or 64.
    """
    indices = packing.get("rhs_indices")
    rows, batch = x.shape[-2], 1 if indices is None else indices.size
    if rows * batch < 8:
        return None
    tile = max(16, min(64, 1 << (rows - 1).bit_length()))
    kind = packing.get("mode"), packing.get("bits"), packing.get("group_size")
    return ("packed product", x.dtype, scales.dtype, tile, *kind)


def _fused(name: str) -> Callable[..., tuple[object, ...]]:
    return lambda *_: ("fused", name)


class _At:
    """Stands in for `mx.array.at`."""

    @staticmethod
    def of(kind: Any, found: Needed) -> property:
        own = kind.at

        class Proxy:
            def __init__(self, array: mx.array, index: object = None) -> None:
                self._array, self._index = array, index

            def __getitem__(self, index: object) -> Proxy:
                return Proxy(self._array, index)

            def __getattr__(self, name: str) -> Callable[[Any], mx.array]:
                assert name in _REDUCTIONS

                def reduce(value: Any) -> mx.array:
                    types = _index_types(self._array, self._index, writes=True)
                    if types:
                        found.add(("scatter", name, self._array.dtype, *types))
                    else:
                        found.add(("slice update", name, self._array.dtype))
                    return getattr(own.__get__(self._array)[self._index], name)(value)

                return reduce

        return property(Proxy)


def _index_types(array: mx.array, index: object, *, writes: bool) -> tuple[mx.Dtype, int] | None:
    """Return the type and number of index arrays that MLX makes of an index; None where it slices.

    A number alone is gathered; beside arrays numbers and slices become arrays of uint32.
    """
    if isinstance(index, (mx.array, list, np.ndarray)):
        return _type_of(index), 1
    if isinstance(index, int):
        return None if writes else (mx.uint32, 1)
    if not isinstance(index, tuple) or not any(isinstance(n, (mx.array, list)) for n in index):
        return None
    entries = [each for each in index if each is not None]
    if Ellipsis in [each for each in entries if each is Ellipsis]:
        place = next(n for n, each in enumerate(entries) if each is Ellipsis)
        entries[place : place + 1] = [slice(None)] * (array.ndim - len(entries) + 1)
    if not writes:
        while isinstance(entries[-1], slice):
            entries.pop()
    types = {_type_of(each) for each in entries}
    if len(types) > 1:
        types = {mx.int64} if mx.int32 in types else types
    (own,) = types
    return own, len(entries)


def _type_of(index: object) -> mx.Dtype:
    if isinstance(index, mx.array):
        return index.dtype
    return mx.uint32 if isinstance(index, (int, slice)) else mx.int32
