"""Arrays that grow where they are, on a card."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.device.cuda.extension import load_extension
from quire.device.device import current_device
from quire.device.growing_memory import GrowingMemory

pytestmark = pytest.mark.gpu

MOST, PART = 16_384, 2_048
WIDTH = 4_096


@pytest.fixture
def memory() -> GrowingMemory:
    found = current_device().growing_memory()
    if found is None:
        pytest.skip("this card maps no memory")
    return found


def seen(view: mx.array) -> object:
    """Return the elements of a copy: MLX would move an array that the host reads."""
    return (view + 0).tolist()


def empty() -> mx.array:
    return mx.zeros((0, WIDTH), mx.bfloat16)


def test_arrays_grow_and_shrink_in_place(memory: GrowingMemory) -> None:
    extension, array, places = load_extension(), empty(), set[int]()
    for rows in range(PART, MOST + 1, PART):
        array = memory.resized(array, rows, MOST)
        assert float(mx.abs(array[rows - PART :]).max()) == 0
        mx.synchronize()  # as between steps: MLX copies what readers hold, though these are done
        last = mx.array([rows - PART, rows - 1])
        array[last] = mx.full((2, WIDTH), rows / PART, mx.bfloat16)
        mx.eval(array)
        places.add(extension.pointer(array))
    assert len(places) == 1, "the array moved"
    assert extension.mapped_bytes()[0] >= array.nbytes
    mx.synchronize()
    array = memory.resized(array, PART, MOST)
    assert extension.mapped_bytes()[0] < MOST * WIDTH // 2
    assert seen(array[:: PART - 1, 5]) == [1, 1]
    array = memory.resized(array, 2 * PART, MOST)
    assert seen(array[: PART : PART - 1, 5]) == [1, 1]
    assert places == {extension.pointer(array)}


def test_an_array_that_was_read_is_written_in_place(memory: GrowingMemory) -> None:
    extension = load_extension()
    array = memory.resized(empty(), PART, MOST)
    place, rows = extension.pointer(array), mx.array([3, 4])
    current_device().operations.write_rows(array, array[rows] + 1, rows)
    mx.eval(array)
    assert seen(array[2:6, 0]) == [0, 1, 1, 0]
    assert extension.pointer(array) == place


def test_an_array_of_other_memory_is_copied(memory: GrowingMemory) -> None:
    array = mx.broadcast_to(mx.arange(PART).reshape(-1, 1), (PART, WIDTH)).astype(mx.int32)
    array = mx.contiguous(array)
    mx.eval(array)
    array = memory.resized(array, 2 * PART, MOST)
    assert seen(array[:: PART // 2, 7]) == [0, PART // 2, 0, 0]


def test_memory_that_no_array_uses_is_freed(memory: GrowingMemory) -> None:
    extension = load_extension()
    before = extension.mapped_bytes()[0]
    arrays = [memory.resized(empty(), PART, MOST) for _ in range(2)]
    both = extension.mapped_bytes()[0] - before
    memory.keep(arrays[:1])
    assert extension.mapped_bytes()[0] - before == both // 2
    del arrays
    memory.keep([])
    assert extension.mapped_bytes()[0] == before
