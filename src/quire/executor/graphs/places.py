"""The memory locations of a program's values while its kernels are recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import mlx.core as mx

from quire.device.cuda import boxes
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.warpgroup_gemm import WarpgroupGemm, copies_boxes
from quire.device.cuda.wide_gemm import WideGemm
from quire.executor.graphs.operands import PARTS, Part, UnsupportedNode, row_width
from quire.executor.graphs.products.product_kernels import Gemm
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.rows.regions import LaidOutRows, RowKernel, row_kernel
from quire.executor.graphs.rows.row_layouts import layout_for, layouts_for, with_layout
from quire.executor.graphs.source import C_TYPES, NotGenerated
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
class Unscaled:
    """A norm's output before it is divided by the root of its mean square.

    Attributes:
        squares: address of the sums of squares of the norm's input, float32, one for 16 elements.
        eps: of the norm.
    """

    squares: int
    eps: float


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
_READ_PARTS = frozenset(
    {"by_head", "rotate", "convolve", "delta_rule", "recurrence", "state_space"}
)
"""Names of nodes whose kernels can read parts of rows in place."""


class ValueRecording:
    """Allocates memory for the values of a program, and records generated kernels."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def kinds(self) -> NodeKinds:
        """The functions that record nodes."""
        return dict.fromkeys(("Split", "Slice", "Transpose", "Broadcast"), self._copied)

    def _start(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        """Start a program whose fields and outputs have given locations."""
        self._program, self._uses = program, Uses(program)
        self._laid_out: dict[tuple[int, RowLayout], int] = {}
        """Addresses of the rows of values in the layouts in which their kernels also write them."""
        self._unscaled: dict[int, Unscaled] = {}
        """Norms' outputs that their norms have not scaled."""
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

    def _multiplied(self, x: int, gemm: Gemm) -> list[int]:
        """Return the arguments `product_kernels.rows_of` of a product, in its layout."""
        source = self._uses.source(x)
        unscaled = self._unscaled.get(source)
        squares = [] if unscaled is None else [unscaled.squares]
        if isinstance(gemm, WideGemm) or gemm.layout is None:
            return [self._place(x).address, *squares]
        return [self._laid_out[source, gemm.layout], *squares]

    def _eps(self, x: int) -> float | None:
        """Return the epsilon of the norm that has not scaled a value; None if it is scaled."""
        unscaled = self._unscaled.get(self._uses.source(x))
        return None if unscaled is None else unscaled.eps

    def _wanted_layouts(self, node: Node) -> LaidOutRows:
        """Return the outputs of a region of rows that products should read in another layout."""
        wanted = {value: self._wanted_layout(value) for value in node.outputs}
        layouts = {value: layout for value, layout in wanted.items() if layout is not None}
        offsets = {value: self._bytes(self._program.values[value]) for value in layouts}
        return LaidOutRows(layouts, offsets)

    def _wanted_layout(
        self, value: int, written: Collection[RowLayout] = tuple(RowLayout)
    ) -> RowLayout | None:
        """Return the layout in which products should read a value's rows; None for plain rows.

        Args:
            written: layouts that the value's kernel can write.
        """
        if value in self._targets:
            return None
        wanted = layouts_for(self._recorder, self._program, uses=self._uses, value=value)
        return next((each for each in written if each in wanted), None)

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

    def _generate(self, make: Callable[[Program, Node], RowKernel], node: Node) -> None:
        try:
            self._generated(make(self._program, node), node)
        except NotGenerated as error:
            raise UnsupportedNode(f"{shown(self._program, node)}: {error}") from error

    def _copied(self, node: Node) -> None:
        """Copy the parts that a view makes, if some reader cannot read parts."""
        for value in node.outputs:
            if self._is_copied(node, value):
                self._generate(row_kernel, replace(node.fused, outputs=(value,)))

    def _is_copied(self, view: Node, value: int) -> bool:
        readers = self._uses.readers(value)
        if not row_width(self._program, value):
            return False
        if view.kind not in PARTS or self._uses.is_output(value):
            return True
        try:
            Part.of(self._program, self._uses, value)
        except UnsupportedNode:
            return bool(readers)
        return any(each.name not in _READ_PARTS for each in readers)

    def _generated(self, kernel: RowKernel, node: Node, more: Sequence[Buffer] = ()) -> None:
        """Record a generated kernel.

        Args:
            more: what it writes beside the node's outputs.
        """
        sources = [each.source for each in kernel.arguments if isinstance(each.source, int)]
        reads = self._read([each for each in sources if each not in node.outputs])
        for value in node.outputs:
            self._written(value, reads, layout=kernel.layouts.get(value))
        writes = [*map(self._buffer, node.outputs), *more]
        arguments = [self._recorder.rows]
        for each in kernel.arguments:
            if isinstance(each.source, int):
                arguments.append(self._place(each.source).address + each.offset)
            else:
                arguments.append(self._recorder.weight(each.source) + each.offset)
        grid = kernel.grid(self._recorder.max_rows)
        self._recorder.add(
            kernel.text,
            grid,
            kernel.threads,
            arguments=arguments,
            reads=reads,
            writes=writes,
        )

    def _fitting(self, gemm: Gemm, x: int | None = None) -> Gemm:
        """Return a product that reads the rows of `x` in its layout, if they were written so, and
        in boxes only if the card can copy these by itself.

        Raises:
            UnsupportedNode: the card has too little shared memory for it.
        """
        layout = layout_for(gemm)
        if x is not None and layout and (self._uses.source(x), layout) in self._laid_out:
            gemm = with_layout(gemm, layout)
        if isinstance(gemm, WarpgroupGemm) and copies_boxes(gemm) and x is not None:
            gemm = replace(gemm, in_boxes=boxes.reaches(self._place(x).address))
        if not gemm.fits:
            shared = self._recorder.card.shared
            raise UnsupportedNode(
                f"{gemm.inputs} columns do not fit {shared} bytes of shared memory"
            )
        return gemm

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
