"""How products with matrices of few rows, as routers have, are cut for steps of some rows."""

from __future__ import annotations

from quire.device.cuda.driver import Card

SHORT_ROUTER = 2048
"""Most columns of a router that 16 warps share."""
_SHARED_ROWS = range(17, 65)
"""Rows of a step of which each eight may have thread blocks of their own."""


def shares_rows(inputs: int, outputs: int, rows: int, card: Card) -> bool:
    """Return whether each 8 rows of a step should have thread blocks of their own: all of these
    then run at once (benchmarks/results/gpu-runs.md).

    Args:
        inputs, outputs: columns and rows of the matrix.
    """
    blocks = -(-outputs // 16) * -(-rows // 8)
    few = rows in _SHARED_ROWS and blocks <= card.multiprocessors
    return few and inputs > SHORT_ROUTER and card.warpgroups


def whole_row(groups: int) -> tuple[int, int, int]:
    """Return warps, chunk and stages with which a thread block copies rows of so many times 64
    columns at once, or in a few rounds.
    """
    chunk, stages = (2, 2) if groups % 2 == 0 else (1, 3)
    return min(16, -(-groups // (chunk * stages))), chunk, stages
