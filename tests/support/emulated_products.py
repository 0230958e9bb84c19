"""The kernels of products that MLX launches, emulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cuda import packed
from quire.device.cuda.driver import Card
from quire.device.gpu_kernels import Kernel
from tests.support.emulated_cuda import emulate

_CACHED = (
    "_cut",
    "wide_gemm",
    "fits",
    "_linear_kernel",
    "_unpack_kernel",
    "_gate_kernel",
    "_expert_kernel",
    "_wide_kernel",
    "_group_kernel",
)


@contextmanager
def products_emulated(card: Card) -> Iterator[None]:
    """Emulate kernels of products on the CPU, cut for a card; none is kept beyond the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "cuda_kernel", shaped)
        patch.setattr(packed, "card", lambda: card)
        for name in _CACHED:
            patch.setattr(packed, name, getattr(packed, name).__wrapped__)
        yield


def shaped(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    header: str,
    shared_memory: int = 0,
) -> Kernel:
    """Return an emulated kernel whose body has the shapes of its inputs as constants."""
    given = {"header": header, "shared_memory": shared_memory}
    emulated = cache(partial(emulate, name, inputs, outputs, **given))

    def launch(*, inputs: list[mx.array], **call: Any) -> list[mx.array]:
        shapes = [
            f"const int {own}_shape[{each.ndim}] = {{{', '.join(map(str, each.shape))}}};"
            for own, each in zip(names, inputs, strict=True)
            if f"{own}_shape" in body
        ]
        return emulated(body="\n".join([*shapes, body]))(inputs=inputs, **call)

    names = inputs
    return launch
