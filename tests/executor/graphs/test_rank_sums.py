"""Sums of ranks' rows as part of row kernels: the bits and the kernels of a chain of layers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda.inboxes import Inboxes, inbox_bytes
from quire.device.ranks import Part
from quire.device.weights import PackedWeight, Packing
from quire.executor.graphs.places import Place
from quire.executor.graphs.ranks import rank_sums
from quire.executor.graphs.recorder import Buffer, Kernel, Recorder
from quire.executor.graphs.recording import Recording
from quire.program.passes import prepared
from quire.program.values import ROWS, Node, Program, Value, Weight
from tests.support.emulated_card import SMALL
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import launch, memory_of
from tests.support.nvrtc import assert_compiles

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

RANKS, WIDTH, LAYERS = 2, 256, 3
ONE_AT_A_TIME = Lock()
"""Held by kernels that wait for no other rank: two of one source cannot run at once."""


def chain(part: Part, *, by_product: bool = True) -> Program:
    """Return a program of layers: a product, or elements in its place, the ranks' sum, a residual
    and a norm.
    """
    nodes, (x, h) = list[Node](), (0, 1)
    near_one = mx.random.normal((WIDTH,), loc=1, scale=0.2, key=mx.random.key(0))
    norm = Weight("norm", near_one.astype(mx.bfloat16))
    for layer in range(LAYERS):
        y, total, added, normed = range(2 + 4 * layer, 6 + 4 * layer)
        if by_product:
            drawn = mx.random.normal((WIDTH, WIDTH), key=mx.random.key(layer + 10 * part.rank))
            codes, *rest = mx.quantize(drawn * WIDTH**-0.5)
            arrays = (codes, *(each.astype(mx.bfloat16) for each in rest))
            weight = PackedWeight(*arrays, packing=Packing(64, 4, "affine"))
            own = {"weight": Weight("weight", weight), "bias": None}
            nodes.append(Node("packed_linear", (x,), (y,), ("x",), attributes=own))
        else:
            nodes.append(Node("Tanh", (x,), (y,)))
        nodes.append(Node("summed", (y,), (total,), ("x",), attributes={"part": part}))
        nodes.append(Node("Add", (h, total), (added,)))
        own = {"weight": norm, "eps": 1e-5}
        nodes.append(Node("rms_norm", (added,), (normed,), ("x",), attributes=own))
        x, h = normed, added
    value = Value((ROWS, WIDTH), mx.bfloat16)
    values = dict.fromkeys(range(x + 1), value)
    return prepared(Program(("T",), {"x": 0, "h": 1}, {}, values, tuple(nodes), (x, h)))


class Cards:
    """Emulated cards whose ranks reach each other's memory."""

    def __init__(self) -> None:
        self._memory = [np.zeros(inbox_bytes(RANKS), np.uint8) for _ in range(RANKS)]
        addresses = tuple(each.ctypes.data for each in self._memory)
        self._inboxes = [Inboxes(Part(rank, RANKS), addresses) for rank in range(RANKS)]

    def run(self, rows: int, room: int, *, by_product: bool = True) -> list[Ran]:
        """Run a chain on `rows` rows, recorded for up to `room`, on all ranks at once."""
        chains = [recorded(each, rows, room, by_product=by_product) for each in self._inboxes]
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(run_kernels, (each.recorder.kernels for each in chains)))
        return [
            Ran([memory_of(one)[:rows].copy() for one in each.results], each.recorder.kernels)
            for each in chains
        ]


class Recorded(NamedTuple):
    """A rank's kernels, with the arrays that they read and write."""

    program: Program
    recorder: Recorder
    results: list[mx.array]


class Ran(NamedTuple):
    """The bits of a rank's results, and its kernels."""

    bits: list[np.ndarray]
    kernels: Sequence[Kernel]


def recorded(inboxes: Inboxes, rows: int, room: int, *, by_product: bool) -> Recorded:
    """Record the kernels of a chain on drawn rows. Residuals are the same on all ranks."""
    x, h = (
        mx.random.normal((room, WIDTH), key=mx.random.key(seed)).astype(mx.bfloat16)
        for seed in (1 + inboxes.part.rank, 0)
    )
    results = [mx.zeros_like(x), mx.zeros_like(h)]
    count = mx.array([rows] * 4)
    inputs = cast(Any, SimpleNamespace(rows=address(count)))
    recorder = Recorder(room, address, inputs, SMALL, inboxes=inboxes)
    recorder.kept += [x, h, count]
    recording = Recording(recorder, {}, cast(Any, None), states={})
    buffers = [Buffer(address(each), each.nbytes, each) for each in (x, h, *results)]
    given = {name: Place(buffers[n].address, buffers[n]) for n, name in enumerate("xh")}
    program = chain(inboxes.part, by_product=by_product)
    recording.record(program, given, buffers[2:])
    return Recorded(program, recorder, results)


def run_kernels(kernels: Sequence[Kernel]) -> None:
    with mx.stream(mx.new_stream(mx.cpu)):
        for kernel in kernels:
            assert isinstance(kernel.source, str)
            if "received(" in kernel.source:
                launch(kernel, aligned=8)
            else:
                with ONE_AT_A_TIME:
                    launch(kernel, aligned=8)


def address(array: mx.array) -> int:
    return int(memory_of(array).ctypes.data)


def assert_the_same_bits(found: list[Ran]) -> None:
    for each in found[1:]:
        for a, b in zip(found[0].bits, each.bits, strict=True):
            assert (a == b).all()


def test_products_send_and_norms_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels a layer instead of three give the same bits on all ranks, in steps of any number
    of rows one after the other, also between exchanges by kernels of their own.
    """
    cards = Cards()
    for rows, room in ((2, 2), (3, 4), (9, 16), (3, 4)):
        joined = cards.run(rows, room)
        with monkeypatch.context() as patch:
            patch.setattr(rank_sums, "fits", lambda rows, row: False)
            apart = cards.run(rows, room)
        assert_the_same_bits(joined + apart)
        assert {len(each.kernels) for each in joined} == {2 * LAYERS}
        assert {len(each.kernels) for each in apart} == {3 * LAYERS}
        assert all(each.after == (n - 1,) for n, each in enumerate(joined[0].kernels) if n)


def test_exchanges_sum_what_no_product_made() -> None:
    found = Cards().run(3, 4, by_product=False)
    assert_the_same_bits(found)
    assert {len(each.kernels) for each in found} == {1 + 2 * LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_kernels_of_sums_compile(ranks: int, rows: int, tmp_path: Path) -> None:
    inboxes = Inboxes(Part(1, ranks), (0,) * ranks)
    inputs = cast(Any, SimpleNamespace(rows=0))
    recorder = Recorder(rows, address, inputs, SMALL, inboxes=inboxes)
    x, h = (Buffer(16 * n, rows * WIDTH * 2) for n in range(2))
    given = {"x": Place(x.address, x), "h": Place(h.address, h)}
    outputs = [Buffer(64, rows * WIDTH * 2), Buffer(96, rows * WIDTH * 2)]
    program = chain(inboxes.part)
    Recording(recorder, {}, cast(Any, None), states={}).record(program, given, outputs)
    for text in {each.source for each in recorder.kernels}:
        assert isinstance(text, str)
        assert_compiles(text, tmp_path, spilled=32)  # before the loop
