"""Operations on arrays whose first axis is `blocks * rows_a_block`, shared by formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryFile

import mlx.core as mx
import numpy as np

from quire.core.arrays import Ints
from quire.device.dtypes import from_host
from quire.device.growing_memory import GrowingMemory

_PIECE_BYTES = 4 << 20
"""Bytes of an array that are moved, written or read at a time where it may not be held twice."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a resize of arrays may use.

    Attributes:
        spare: bytes that may be held twice while arrays are copied; None if any number may.
        memory: memory in which arrays grow without being copied, if the device has such.
        most: the most blocks that the arrays will ever have; for `memory`.
    """

    spare: int | None = None
    memory: GrowingMemory | None = None
    most: int = 0


ANY_ROOM = Room()


def block_rows(blocks: Ints, rows: int) -> mx.array:
    """Convert block ids `[n]` to array rows `[n * rows]`."""
    return from_host((blocks[:, None] * rows + first_numbers(rows)).reshape(-1))


@cache
def first_numbers(count: int) -> Ints:
    """Return 0, 1 and so on, int32 `[count]`, which nobody may change."""
    numbers = np.arange(count, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def gathered(arrays: list[mx.array], rows: mx.array) -> list[mx.array]:
    """Gather rows `[..., P]` of `[rows, block_size, -]` to `[..., P * block_size, -]`."""
    tokens = arrays[0].shape[1]
    shape = (*rows.shape[:-1], rows.shape[-1] * tokens)
    return [array[rows].reshape(*shape, array.shape[-1]) for array in arrays]


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return rows of a pool that nothing was written to. They mean nothing, but are numbers: a
    masked key still enters 0 * value, and 0 * NaN is NaN.
    """
    return mx.zeros(shape, dtype)


def resize(
    arrays: list[mx.array],
    rows: int,
    capacity: int,
    moves: tuple[tuple[int, int], ...],
    room: Room,
) -> None:
    """Move blocks (from id, to id), then cut or extend each array to `capacity` blocks.

    In memory that grows, arrays stay where they are. Elsewhere they are replaced one after the
    other, so that only one is held twice meanwhile. One that is too large for that is written to a
    temporary file, freed, and read back.

    Args:
        arrays: the only references to the arrays.
        rows: rows of the first axis per block.
    """
    spare = room.spare
    piece = _PIECE_BYTES if spare is None else min(_PIECE_BYTES, spare // 2)
    for number in range(len(arrays)):
        _move(arrays[number], rows, moves, piece=piece)
        have, wanted = arrays[number].shape[0], capacity * rows
        if room.memory is not None:
            mx.async_eval(arrays[number])  # one that is not computed has no address
            if wanted < have:
                mx.synchronize()  # what is taken away is no longer read
            arrays[number] = room.memory.resized(arrays[number], wanted, room.most * rows)
            continue
        if spare is None or min(have, wanted) * _row_bytes(arrays[number]) <= spare:
            arrays[number] = _copied(arrays[number], wanted)
        else:
            _replace_by_file(arrays, number, wanted, piece=piece)
        # Waits until the old array is freed, too. On a GPU, MLX holds it in another thread until
        # the copy is done, which an evaluation does not wait for.
        mx.synchronize()


def _row_bytes(array: mx.array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.size


def _rows_at_once(array: mx.array, piece: int) -> int:
    return max(1, piece // max(1, _row_bytes(array)))


def _move(array: mx.array, rows: int, moves: tuple[tuple[int, int], ...], piece: int) -> None:
    """Copy blocks within an array, `piece` bytes at a time."""
    at_once = max(1, _rows_at_once(array, piece) // rows)
    for first in range(0, len(moves), at_once):
        pairs = np.array(moves[first : first + at_once], dtype=np.int32)
        blocks = array[block_rows(pairs[:, 0], rows)]
        mx.eval(blocks)
        mx.synchronize()  # an array that a queued gather still holds is not written in place
        array[block_rows(pairs[:, 1], rows)] = blocks
        mx.eval(array)


def _copied(array: mx.array, rows: int) -> mx.array:
    """Return a copy with `rows` rows: the first ones, or all and blank ones behind them."""
    have = array.shape[0]
    if rows < have:
        copy = mx.contiguous(array[:rows])
    else:
        copy = blank((rows, *array.shape[1:]), array.dtype)
        copy[:have] = array  # in place: a third array, of zeros alone, would take memory, too
    mx.eval(copy)
    return copy


def _replace_by_file(arrays: list[mx.array], number: int, rows: int, piece: int) -> None:
    """Replace an array as `_copied` does, but hold it once: a file holds its contents meanwhile.

    Args:
        piece: bytes that are written or read at a time.
    """
    shape, dtype = arrays[number].shape, arrays[number].dtype
    at_once, stop = _rows_at_once(arrays[number], piece), min(shape[0], rows)
    parts = [slice(first, min(stop, first + at_once)) for first in range(0, stop, at_once)]
    with TemporaryFile() as file:
        for part in parts:
            np.asarray(mx.contiguous(arrays[number][part]).view(mx.uint8)).tofile(file)
        arrays[number] = mx.zeros((0, *shape[1:]), dtype=dtype)
        mx.synchronize()  # the old array is freed before the new one is made
        arrays[number] = blank((rows, *shape[1:]), dtype)
        file.seek(0)
        for part in parts:
            lengths = part.stop - part.start, *shape[1:]
            content = np.fromfile(file, dtype=np.uint8, count=math.prod(lengths) * dtype.size)
            arrays[number][part] = mx.array(content).view(dtype).reshape(lengths)
            mx.eval(arrays[number])
