"""Offsets and strides with which a fused kernel reads its inputs, composed through views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd, prod

import mlx.core as mx
import numpy as np

from quire.executor.graphs.source import NotGenerated
from quire.program.primitives import VIEWS, compute
from quire.program.values import Form, Node, Program, bound, depends_on_sizes


@dataclass(frozen=True)
class Access:
    """The offset and strides of one row's elements in an array.

    Attributes:
        offset: of the first row's first element.
        row: elements from one row to the next; 0 where all rows read the same.
        steps: `(count, distance)` pairs within a row, the innermost first. The product of the
            counts is the number of elements of a row.
    """

    offset: int
    row: int
    steps: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether rows are contiguous and follow each other without gaps."""
        width = prod(count for count, _ in self.steps)
        return self.offset == 0 and self.row == width and self.steps in (((width, 1),), ())

    @property
    def is_uniform(self) -> bool:
        """Whether all elements of a row are the same element in memory."""
        return all(distance == 0 for _, distance in self.steps)

    def neighbours(self, elements: int, most: int) -> int:
        """Return how many contiguous elements one load may read, a power of two up to `most`.

        Args:
            elements: neighbours of a row that a thread has; they start at a multiple of it.
        """
        if not self.steps or self.steps[0][1] != 1 or self.steps[0][0] % elements:
            return 0
        distances = (distance for _, distance in self.steps[1:])
        common = reduce(gcd, distances, gcd(self.offset, self.row, elements))
        return min(common & -common, most)

    def index(self, within_row: str, within_part: str, part: int) -> str:
        """Return a C expression for an element's offset from the start of its row.

        Args:
            within_row, within_part: expressions of the element's number.
            part: elements of a part of a row.
        """
        width = prod(count for count, _ in self.steps)
        terms, inner = list[str](), 1
        for count, distance in self.steps:
            at = f"{within_row} / {inner}" if inner > 1 else within_row
            if count * inner == part and inner == 1:
                at = within_part
            elif count * inner < width:
                at = f"{at} % {count}"
            if distance:
                terms.append(at if distance == 1 else f"({at}) * {distance}")
            inner *= count
        return " + ".join(terms) or "0"


class Rows:
    """The row shape shared by all values of a region.

    Args:
        value: the value that sets the number of elements in a row.

    Attributes:
        width: elements of a row.
    """

    def __init__(self, program: Program, node: Node, value: int) -> None:
        shape = program.values[value].shape
        symbols = {name for n in shape if isinstance(n, Form) for name, _ in n.terms}
        if len(symbols) != 1:
            raise NotGenerated(f"the shape {program.values[value]} has no rows")
        self.width = prod(bound(shape, dict.fromkeys(symbols, 1)))
        if prod(bound(shape, dict.fromkeys(symbols, 3))) != 3 * self.width:
            raise NotGenerated(f"the shape {program.values[value]} has other elements beside rows")
        self._program = program
        self._makers = {id: each for each in node.arguments for id in each.outputs}

    def root(self, value: int) -> int:
        """Return the value outside the region's views that this one is a view of."""
        while (node := self._makers.get(value)) is not None and node.kind in VIEWS:
            value = node.inputs[0]
        return value

    def access(self, value: int) -> Access:
        """Return the offset and strides of a value's elements in its root.

        Raises:
            NotGenerated: not at distances that are fixed.
        """
        return _access(self._places(value, 2), self._places(value, 3))

    def parts(self, value: int) -> list[Access]:
        """Return the accesses of the parts of a value, one for each index of its second axis.

        A part is as wide as a row. Where it has fewer elements, neighbours of a row read the same.

        Raises:
            NotGenerated: elements are not at distances that are fixed.
        """
        few, more = self._part_places(value, 2), self._part_places(value, 3)
        first, starts = _access(few[:, 0], more[:, 0]), few[0, :, :1]
        if (more != more[:, :1] + (starts - starts[0])).any():
            raise NotGenerated("the distance of parts depends on the number of rows")
        return [replace(first, offset=int(start)) for start in starts[:, 0]]

    def _places(self, value: int, rows: int) -> np.ndarray:
        """Return the index in the root of each element, `[rows, width]`."""
        flat = self._indices(value, rows).reshape(-1)
        if depends_on_sizes(self._program.values[value].shape):
            if flat.size != rows * self.width:
                raise NotGenerated(f"{flat.size / rows:g} elements beside {self.width} a row")
            return flat.reshape(rows, self.width)
        if self.width % flat.size:
            raise NotGenerated(f"{flat.size} elements beside {self.width} a row")
        return np.tile(flat, (rows, self.width // flat.size))

    def _part_places(self, value: int, rows: int) -> np.ndarray:
        """Return the index in the root of each element of the parts, `[rows, parts, width]`."""
        indices = self._indices(value, rows).swapaxes(0, 1)  # [parts, m * rows, ...]
        indices = indices.reshape(len(indices), rows, -1).swapaxes(0, 1)
        elements = indices.shape[-1]
        if self.width % elements:
            raise NotGenerated(f"{elements} elements of a part beside {self.width} a row")
        return indices.repeat(self.width // elements, axis=-1)

    def _indices(self, value: int, rows: int) -> np.ndarray:
        """Return the index in the root of each element, in the value's shape."""
        sizes = dict.fromkeys(self._program.symbols, rows)
        chain, root = list[Node](), value
        while (node := self._makers.get(root)) is not None and node.kind in VIEWS:
            chain.append(node)
            root = node.inputs[0]
        shape = bound(self._program.values[root].shape, sizes)
        places = mx.arange(prod(shape)).reshape(shape)
        outputs = [value, *(node.inputs[0] for node in chain)]
        for node, output in zip(reversed(chain), reversed(outputs[:-1]), strict=True):
            places = self._viewed(node, output, places, sizes=sizes)
        return np.array(places)

    def _viewed(
        self, node: Node, output: int, source: mx.array, sizes: Mapping[str, int]
    ) -> mx.array:
        shape = bound(self._program.values[node.outputs[0]].shape, sizes)
        dtypes = [source.dtype] * len(node.outputs)
        made = compute(
            node.kind, [source], bound(node.arguments, sizes), shape=shape, dtypes=dtypes
        )
        return made[node.outputs.index(output)]


def _access(few: np.ndarray, more: np.ndarray) -> Access:
    """Describe the indices of the elements of two and of three rows, `[rows, width]`."""
    row = int(few[1, 0] - few[0, 0])
    if not (more == more[:1] + row * np.arange(3)[:, None]).all() or (more[:2] != few).any():
        raise NotGenerated("the distance of elements depends on the number of rows")
    return Access(int(few[0, 0]), row, _steps(few[0] - few[0, 0]))


def _steps(places: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Describe the indices of a row's elements by `(count, distance)` pairs."""
    found = list[tuple[int, int]]()
    while len(places) > 1:
        distance = int(places[1] - places[0])
        for count in _divisors(len(places)):
            expected = places[::count, None] + distance * np.arange(count)
            if (places.reshape(-1, count) == expected).all():
                break
        else:
            raise NotGenerated("the distances of elements are not regular")
        found.append((count, distance))
        places = places[::count]
    return tuple(found)


def _divisors(number: int) -> list[int]:
    """Return the divisors above 1, the largest first."""
    return [n for n in range(number, 1, -1) if number % n == 0]
