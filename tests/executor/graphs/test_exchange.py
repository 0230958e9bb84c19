"""Ranks exchange rows through each other's memory: sums, and columns side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import mlx.core as mx
import numpy as np
import pytest

from quire.device.cuda.inboxes import Inboxes, inbox_bytes
from quire.device.ranks import Part
from quire.executor.graphs.ranks.exchange import Exchange
from quire.executor.graphs.ranks.exchange_check import SumKernels, wrong_rows
from tests.support.emulated_card import SMALL
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner
from tests.support.nvrtc import assert_compiles

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def found_wrong(kernels: Sequence[Sequence[Exchange]]) -> list[str]:
    """Run one exchange after the other, each on all ranks at once; return what was wrong."""
    parts = [each.part for each in kernels[0]]
    memory = [np.zeros(inbox_bytes(len(parts)), np.uint8) for _ in parts]
    addresses = tuple(each.ctypes.data for each in memory)
    begin = Barrier(len(parts))

    def run(part: Part) -> list[str]:
        with mx.stream(mx.new_stream(mx.cpu)):
            inboxes = Inboxes(part, addresses)
            begin.wait()
            return [wrong_rows(each[part.rank], inboxes, EmulatedRunner()) for each in kernels]

    with ThreadPoolExecutor(len(parts)) as pool:
        return [problem for each in pool.map(run, parts) for problem in each if problem]


def exchanges(
    ranks: int, width: int, rows: int, dtype: mx.Dtype, *, gathered: bool
) -> list[Exchange]:
    return [Exchange(Part(n, ranks), dtype, width, rows, gathered) for n in range(ranks)]


def test_rows_are_added_up_and_put_side_by_side() -> None:
    """Launches of different sizes follow each other through the same memory."""
    wide = exchanges(2, 1024, 3, mx.bfloat16, gathered=False)
    assert not found_wrong([wide, exchanges(2, 40, 5, mx.float32, gathered=True), wide])


def test_the_check_at_opening_finds_sums_that_are_right() -> None:
    memory = [np.zeros(inbox_bytes(2), np.uint8) for _ in range(2)]
    addresses = tuple(each.ctypes.data for each in memory)
    kernels = [SumKernels(Inboxes(Part(rank, 2), addresses), SMALL) for rank in range(2)]

    def run(own: SumKernels) -> list[str]:
        with mx.stream(mx.new_stream(mx.cpu)):
            return [own.wrong(EmulatedRunner()) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, kernels)) == 2 * [3 * [""]]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_rows_take_several_rounds(ranks: int) -> None:
    many = exchanges(ranks, 8192, 512, mx.bfloat16, gathered=False)
    odd = exchanges(ranks, 3, 7, mx.bfloat16, gathered=False)
    columns = exchanges(ranks, 6004, 300, mx.float32, gathered=True)
    assert not found_wrong([odd, many, columns, odd, many])


@pytest.mark.slow
@pytest.mark.parametrize(("width", "gathered"), [(8192, False), (3, False), (64_128, True)])
def test_exchanges_compile(tmp_path: Path, width: int, gathered: bool) -> None:
    kernel = Exchange(Part(1, 4), mx.bfloat16, width, 512, gathered, polls=5)
    assert_compiles(kernel.text, tmp_path)
