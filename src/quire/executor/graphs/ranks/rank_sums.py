"""Sums of the ranks' rows within the kernels that make and read them, for steps of few rows.

A product sends its rows to the other ranks as it stores them. The row kernel that reads their sum
waits for the other ranks' rows, and adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.device.cuda.inboxes import COUNTS, SUM_SLOT, Inboxes, sum_slots
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs.source import own_text

PIECE = 8
"""Bytes that are sent at once."""
_ROWS = range(2, 17)
"""Rows that products send. On two H100s an exchange by its own kernel was faster for one row, and
slower for eight; other numbers were not measured."""
_CUDA = "quire.device.cuda"


def fits(rows: int, row: int) -> bool:
    """Return whether products send rows in steps of up to `rows` rows.

    Args:
        row: bytes of one.
    """
    return rows in _ROWS and 2 * rows * row <= SUM_SLOT and row % PIECE == 0


def sending_functions() -> str:
    """Return the functions by which a kernel sends rows."""
    return "".join(kernel_text(_CUDA, name) for name in ("sent.cuh", "rounds.cuh"))


def summing_functions() -> str:
    """Return the functions by which a row kernel sums rows."""
    own = own_text("rank_sums.cuh")
    return "".join(kernel_text(_CUDA, name) for name in ("received.cuh", "rounds.cuh")) + own


def rank_constants(inboxes: Inboxes) -> Mapping[str, int]:
    """Return the integers that these functions use, by name."""
    part = inboxes.part
    return {
        "RANK": part.rank,
        "RANKS": part.size,
        "COUNTS": COUNTS,
        "SUM_SLOTS": sum_slots(part.size),
        "SUM_SLOT": SUM_SLOT,
    }
