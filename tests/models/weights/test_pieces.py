"""A rank reads its pieces of tensors, not the rest of the file."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from quire.models.weights.files import Safetensors
from quire.models.weights.pieces import Pieces

SHAPE = (4, 256, 4096)


def opened(folder: Path, array: mx.array) -> tuple[Pieces, mx.array]:
    """Return a file's only tensor, before it is read."""
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), {"other": mx.ones((3, 3)), "a": array})
    pieces = Pieces()
    return pieces, Safetensors([path]).read({}, None, pieces)["a"]


def taken(pieces: Pieces, array: mx.array, ends: tuple[int, int], axis: int) -> mx.array:
    """Return a piece of an array, read."""
    piece = pieces.read({"a": pieces.take(array, [ends], axis)})["a"]
    mx.eval(piece)
    return piece


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32, mx.uint8])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pieces_are_those_of_the_whole(tmp_path: Path, dtype: mx.Dtype, axis: int) -> None:
    whole = mx.arange(4 * 16 * 4096).reshape(4, 16, 4096).astype(dtype)
    pieces, array = opened(tmp_path, whole)
    half = SHAPE[axis] // 2 if axis != 1 else 8
    for first, last in ((0, half), (half, 2 * half), (1, half)):
        index = (slice(None),) * axis + (slice(first, last),)
        assert mx.array_equal(taken(pieces, array, (first, last), axis), whole[index])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_half_is_read_of_what_is_halved(tmp_path: Path, axis: int) -> None:
    pieces, array = opened(tmp_path, mx.zeros(SHAPE))
    before = psutil.Process().io_counters().read_chars
    half = taken(pieces, array, (0, SHAPE[axis] // 2), axis)
    read = psutil.Process().io_counters().read_chars - before
    assert half.nbytes <= read < 1.1 * half.nbytes


def test_other_types_and_names_are_followed(tmp_path: Path) -> None:
    pieces, array = opened(tmp_path, mx.arange(64 * 4096).reshape(64, 4096).astype(mx.float16))
    wide = array.astype(mx.float32)
    pieces.follow({"a": array}, {"a": wide})
    before = psutil.Process().io_counters().read_chars
    piece = taken(pieces, wide, (32, 64), 0)
    assert psutil.Process().io_counters().read_chars - before < 0.6 * array.nbytes
    assert piece.dtype == mx.float32
    assert mx.array_equal(piece, wide[32:])


def test_arrays_that_were_computed_are_cut_in_memory(tmp_path: Path) -> None:
    pieces, array = opened(tmp_path, mx.ones((8, 4096)))
    assert mx.array_equal(taken(pieces, 2 * array, (0, 4), 0), 2 * mx.ones((4, 4096)))


def test_ranges_are_joined(tmp_path: Path) -> None:
    whole = mx.arange(64 * 4096).reshape(64, 4096)
    pieces, array = opened(tmp_path, whole)
    piece = pieces.read({"a": pieces.take(array, [(0, 8), (32, 40)], 0)})["a"]
    assert mx.array_equal(piece, mx.concatenate([whole[:8], whole[32:40]]))
