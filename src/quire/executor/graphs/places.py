"""The memory locations of a program's values while its kernels are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from quire.device.cuda.row_layout import RowLayout
from quire.executor.graphs.operands import Part, UnsupportedNode
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.source import C_TYPES
from quire.program.passes import Uses
from quire.program.values import Node, Program, Value


@dataclass(frozen=True, slots=True)
class Place:
    """The memory location of a value.

    Attributes:
        address: address of its first element.
        buffer: its buffer; None for constants and step inputs.
    """

    address: int
    buffer: Buffer | None


@dataclass(frozen=True, slots=True)
class Operand:
    """Rows that a kernel reads, or a weight.

    Attributes:
        address: 0 if the operand is absent.
        row, head: elements from one row, and from one head, to the next.
        buffer: None for weights.
    """

    address: int
    dtype: mx.Dtype
    row: int
    head: int
    buffer: Buffer | None

    def parameter(self, name: str) -> str:
        return f"const {C_TYPES[self.dtype]}* {name}"


NodeKinds = dict[str, Callable[[Node], None]]
"""Functions that record the kernels of a node, by `Node.name`."""


class ValueRecording:
    """Knows and allocates the memory of a program's values, for classes that record its nodes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def kinds(self) -> NodeKinds:
        """The functions that record nodes."""
        return {}

    def _start(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        """Start a program whose fields and outputs have given locations."""
        self._program, self._uses = program, Uses(program)
        self._laid_out: dict[tuple[int, RowLayout], int] = {}
        """Addresses of the rows of values in the layouts in which their kernels also write them."""
        self._elsewhere: set[int] = set()
        """Values that their buffers do not hold as MLX would compute them."""
        self._places = {id: given[name] for name, id in program.fields.items()}
        self._targets = dict(zip(map(self._uses.source, program.outputs), outputs, strict=True))
        self._begin(program)

    def _begin(self, program: Program) -> None:
        """Forget what was recorded of the program before."""

    def _place(self, value: int) -> Place:
        source = self._uses.source(value)
        if source not in self._places:
            constant = self._program.constants.get(source)
            if constant is None:
                maker = self._uses.makers.get(source)
                what = "a value" if maker is None else shown(self._program, maker)
                raise UnsupportedNode(f"{what} is read by a product")
            self._places[source] = Place(self._recorder.weight(constant.array), buffer=None)
        return self._places[source]

    def _read(self, values: Sequence[int]) -> list[Buffer]:
        return buffers_of(map(self._place, values))

    def _written(
        self, value: int, reads: Sequence[Buffer], *, layout: RowLayout | None = None
    ) -> Buffer:
        """Allocate memory for a value that the next kernel writes, and behind it for its rows in
        another layout.
        """
        target = self._targets.get(value)
        if target is None:
            size = self._bytes(self._program.values[value])
            behind = 0 if layout is None else size // 128 * layout.bytes
            target = self._recorder.buffer(size + behind, reads)
            if layout is not None:
                self._laid_out[value, layout] = target.address + size
        self._places[value] = Place(target.address, target)
        return target

    def _buffer(self, value: int) -> Buffer:
        buffer = self._place(value).buffer
        assert buffer is not None, "kernels write to buffers"
        return buffer

    def _rows_of(self, value: int) -> Operand:
        """Return the location of rows that may be parts of longer ones."""
        dtype = self._program.values[value].dtype
        if value in self._program.constants:
            return Operand(self._place(value).address, dtype, 0, head=0, buffer=None)
        part = Part.whole(self._program, value)
        if self._uses.source(value) not in self._places:
            part = Part.of(self._program, self._uses, value)
        place = self._place(part.source)
        address = place.address + part.offset * dtype.size
        return Operand(address, dtype, part.row, head=part.head, buffer=place.buffer)

    def _bytes(self, value: Value) -> int:
        rows = dict.fromkeys(self._program.symbols, self._recorder.max_rows)
        sizes = [n if isinstance(n, int) else n.at(rows) for n in value.shape]
        return prod(sizes) * value.dtype.size

    def _width(self, value: int | None, axis: int) -> int:
        assert value is not None, "attention has queries"
        size = self._program.values[value].shape[axis]
        assert isinstance(size, int), "heads are a fixed number"
        return size


def buffers_of(read: Iterable[Place | Operand]) -> list[Buffer]:
    """Return the buffers that a kernel reads, each once."""
    return list(dict.fromkeys(each.buffer for each in read if each.buffer is not None))


def shown(program: Program, node: Node) -> str:
    """Return the first line of a node's printed form."""
    lines: Iterator[str] = program.lines(node)
    return next(lines)
