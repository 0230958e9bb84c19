"""A card whose kernels compute nothing: engines run as on CUDA, and what they compute is blank.

For what can be seen without numbers, such as which kernels are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import psutil
import pytest

from quire.attention.paged import backend, prompts, tokens
from quire.attention.paged import packed as coded
from quire.device import device, verified
from quire.device.cuda import packed
from quire.device.cuda.compiled import CompiledKernel
from quire.device.verified import Check, Verification, VerifiedKernels
from quire.executor import agreement
from quire.executor.graphs import encoders, graph_cache, opening, step_graphs
from quire.executor.graphs.attention import formats
from tests.device.cuda.cards import H200
from tests.support.compiled_kernels import Needed
from tests.support.emulated_card import emulate_boxes

_ATTENDING = backend, coded, prompts, tokens
_FOUND = {
    Check.PRODUCTS_AGREE,
    Check.ATTENTION_AGREES,
    Check.CODING_AGREES,
    Check.RECURRENCES_AGREE,
}
"""Verification results of kernels from an earlier start."""


def open_blank_card(patch: pytest.MonkeyPatch, needed: Needed) -> None:
    """Engines that are opened from now on run on it.

    Kernels are kept by many caches, so this is for processes of their own.

    Args:
        needed: gets the kernels of ours that are called.
    """

    def blank(kernel: CompiledKernel, **call: Any) -> list[mx.array]:
        types = tuple(each.dtype for each in call["inputs"]), tuple(call["output_dtypes"])
        ranks = {number: call["inputs"][number].ndim for number in kernel._shaped}
        name = kernel._header.splitlines()[0].removeprefix("// ")
        threads = call["threadgroup"][0]
        needed.add((name, *types, tuple(ranks.items()), threads, kernel._shared_memory))
        shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    class BlankCard(device.CUDA):
        name = "a blank card"

        def free_memory(self) -> int:
            return int(psutil.virtual_memory().available)

        def bound_caches(self) -> None:
            pass

    patch.setattr(device, "CPU", BlankCard)
    device._default_device.cache_clear()
    mx.disable_compile()
    patch.setattr(CompiledKernel, "__call__", blank)
    known = set[Verification]()
    patch.setattr(VerifiedKernels, "holds", lambda _, own: own.check in _FOUND or own in known)
    patch.setattr(VerifiedKernels, "add", lambda _, own: known.add(own))
    for module in (graph_cache, packed, encoders, *_ATTENDING):
        patch.setattr(module, "card", lambda: H200)
    for module in (graph_cache, formats, encoders):
        patch.setattr(module, "compiler", lambda: _Compiler(needed))
    patch.setattr(opening, "load_extension", _Extension)
    patch.setattr(step_graphs, "Graph", _Graph)
    emulate_boxes(patch)
    for name in ("_TOLERANCE", "_TOLERANCE_OF_TOKENS"):
        patch.setattr(agreement, name, float("inf"))
    patch.setattr(verified, "problem_of", _passed)


def _passed(check: Callable[[], str | None]) -> None:
    """A check of a kernel runs, for what it needs, and finds nothing."""
    with suppress(Exception):
        check()


class _Compiler:
    """A function is the number of its source."""

    def __init__(self, needed: Needed) -> None:
        self._needed = needed

    def start(self, sources: Sequence[str]) -> bool:
        self._needed.update(("recorded", hash(each)) for each in sources)
        return True

    def functions(self, sources: Sequence[str]) -> list[int]:
        self.start(sources)
        return [0] * len(sources)


class _Graph:
    handle = 0

    def __init__(self, launches: Sequence[object], kept: Sequence[mx.array] = ()) -> None:
        """Nothing is launched."""


class _Extension:
    """Replays nothing."""

    def pointer(self, array: mx.array) -> int:
        """Return another address for each array."""
        return id(array)

    def replay(self, workspace: mx.array, rows: int, **_: object) -> mx.array:
        return mx.zeros((rows, workspace.shape[1]), workspace.dtype)
