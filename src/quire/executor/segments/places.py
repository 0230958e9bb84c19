"""Maps a program's values to those of a segment. Views are read in place and cost nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any

from quire.program.values import ROWS, Node, Size, Value
from quire.program.wanted_rows import WANTED_ROWS

MULTIPLE = 16
"""Sizes of heads and channels must be multiples of this: the kernels' longest vector."""


class UnsupportedNode(Exception):
    """Raised if a segment has no instruction for a node, or no view for its result."""


def row_shape(value: Value) -> tuple[int, ...]:
    """Return the axes of one row of a value `[T, ...]` or `[R, ...]`; `(1,)` of one `[T]` or `[R]`.

    Raises:
        UnsupportedNode: the value has no row for each of the step's, or for each wanted one.
    """
    if not value.shape or value.shape[0] not in (ROWS, WANTED_ROWS):
        raise UnsupportedNode("values without a row for each of the step's")
    return fixed(value.shape[1:]) or (1,)


def fixed(shape: tuple[Size, ...]) -> tuple[int, ...]:
    """Return a shape that does not depend on the step.

    Raises:
        UnsupportedNode: it does.
    """
    if not all(isinstance(size, int) for size in shape):
        raise UnsupportedNode("values whose rows depend on the step")
    return tuple(size for size in shape if isinstance(size, int))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a shape whose elements lie side by side."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


@dataclass(frozen=True)
class Place:
    """A row of a value as a view of a segment's value.

    Attributes:
        value: number of the segment's value.
        width: elements of a row of that value.
        shape, strides: axes of a row, strides in floats; 0 where elements repeat.
        offset: of the first element, in floats.
    """

    value: int
    width: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def of(value: int, shape: tuple[int, ...]) -> Place:
        """Return the place of a whole row of a segment's value."""
        return Place(value, prod(shape), shape, strides=contiguous(shape))

    @property
    def whole(self) -> bool:
        """Whether the row is the segment's value, element by element."""
        if self.offset or prod(self.shape) != self.width:
            return False
        sized = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n > 1]
        shape = tuple(n for n, _ in sized)
        return tuple(s for _, s in sized) == contiguous(shape)

    def reshaped(self, shape: tuple[int, ...]) -> Place:
        """Return the same elements under another shape. The place must be whole."""
        assert self.whole, "only elements that lie side by side are reshaped"
        return replace(self, shape=shape, strides=contiguous(shape))

    def broadcast(self, shape: tuple[int, ...]) -> Place:
        """Repeat the row along axes that it lacks, or that are 1 there."""
        missing = len(shape) - len(self.shape)
        own = (0,) * missing + self.strides
        sizes = (1,) * missing + self.shape
        strides = tuple(0 if a == 1 else s for a, s in zip(sizes, own, strict=True))
        return replace(self, shape=shape, strides=strides)


def sliced(place: Place, node: Node) -> Place:
    """Return the place of a `Slice` of rows.

    Raises:
        UnsupportedNode: it takes some rows only.
    """
    starts, stops, steps = node.arguments
    if starts[0] != 0 or stops[0] != ROWS or steps[0] != 1:
        raise UnsupportedNode("slices of some rows")
    cuts = list(zip(starts[1:], stops[1:], steps[1:], strict=True))
    shape = tuple(-(-(stop - start) // step) for start, stop, step in cuts)
    offset = sum(cut[0] * stride for cut, stride in zip(cuts, place.strides, strict=True))
    strides = tuple(cut[2] * stride for cut, stride in zip(cuts, place.strides, strict=True))
    return replace(place, shape=shape, strides=strides, offset=place.offset + offset)


def split(place: Place, node: Node) -> list[Place]:
    """Return the places of the parts of a `Split` of rows.

    Raises:
        UnsupportedNode: it divides the rows.
    """
    cuts, axis = node.arguments
    if axis <= 0:
        raise UnsupportedNode("splits of rows")
    bounds = [0, *cuts, place.shape[axis - 1]]
    found = []
    for start, end in pairwise(bounds):
        shape = (*place.shape[: axis - 1], end - start, *place.shape[axis:])
        offset = place.offset + start * place.strides[axis - 1]
        found.append(replace(place, shape=shape, offset=offset))
    return found


def transposed(place: Place, axes: tuple[Any, ...]) -> Place:
    """Return the place of a `Transpose` of rows.

    Raises:
        UnsupportedNode: rows do not stay the first axis.
    """
    if axes[0] != 0:
        raise UnsupportedNode("transposed rows")
    order = [axis - 1 for axis in axes[1:]]
    shape = tuple(place.shape[axis] for axis in order)
    return replace(place, shape=shape, strides=tuple(place.strides[axis] for axis in order))


def joined_axes(places: list[Place]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Join neighbouring axes of equal shapes where all places allow it.

    Returns:
        The shape, and the strides of each place.
    """
    axes = [(places[0].shape[0], [each.strides[0] for each in places])]
    for number, size in enumerate(places[0].shape[1:], 1):
        strides = [each.strides[number] for each in places]
        before, outer = axes[-1]
        if all(a == b * size for a, b in zip(outer, strides, strict=True)):
            axes[-1] = before * size, strides
        else:
            axes.append((size, strides))
    shape = tuple(size for size, _ in axes)
    return shape, [tuple(s[number] for _, s in axes) for number in range(len(places))]
