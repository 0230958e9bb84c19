"""The kernel by which ranks exchange rows within a step: sums of all, or columns side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from quire.device.cuda.inboxes import MOST_BLOCKS, PIECES, SLOT, SLOTS, THREADS, Inboxes
from quire.device.gpu_kernels import kernel_text
from quire.device.ranks import Part
from quire.executor.graphs.operands import UnsupportedNode, row_width
from quire.executor.graphs.places import NodeKinds
from quire.executor.graphs.ranks import rank_sums
from quire.executor.graphs.rows.generated import GeneratedRecording
from quire.executor.graphs.rows.regions import RowKernel, row_kernel
from quire.executor.graphs.rows.row_layouts import LayoutRecording
from quire.executor.graphs.source import C_TYPES, ROUNDED, NotGenerated, generated_source, own_text
from quire.program.passes import RESHAPES
from quire.program.values import FUSED, Node, Program

_PIECES = {8: "uint2", 4: "unsigned", 2: "unsigned short"}
"""Types by their bytes, of what a thread sends at once."""
_SENDING = "".join(kernel_text("quire.device.cuda", f"{name}.cuh") for name in ("sent", "received"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange of the rows of a step of up to `max_rows` rows.

    Attributes:
        width: elements of a rank's row.
        gathered: whether the ranks' rows are put side by side, else they are added up.
        polls: after how many looks a thread no longer waits for a piece; 0 waits without end.
    """

    part: Part
    dtype: mx.Dtype
    width: int
    max_rows: int
    gathered: bool
    polls: int = 0

    threads = THREADS

    @property
    def _bytes(self) -> int:
        """Bytes that a thread sends at once."""
        row = self.width * self.dtype.size
        return next(size for size in _PIECES if row % size == 0)

    @property
    def _turns(self) -> int:
        """How many pieces each thread of `MOST_BLOCKS` thread blocks would send."""
        row = self.width * self.dtype.size
        return -(-self.max_rows * row // (self._bytes * THREADS * MOST_BLOCKS))

    @property
    def grid(self) -> tuple[int, int, int]:
        pieces = self.max_rows * self.width * self.dtype.size // self._bytes
        return min(MOST_BLOCKS, -(-pieces // THREADS)), 1, 1

    @property
    def text(self) -> str:
        """Return the source. Parameters: rows, inboxes, x, y."""
        constants = {
            "RANK": self.part.rank,
            "RANKS": self.part.size,
            "BLOCKS": self.grid[0],
            "THREADS": THREADS,
            "MOST_BLOCKS": MOST_BLOCKS,
            "SLOTS": SLOTS,
            "SLOT": SLOT,
            "UNROLL": min(PIECES, self._turns),
            "PIECES": self.width * self.dtype.size // self._bytes,
            "ELEMENTS": self._bytes // self.dtype.size,
            "GATHERED": int(self.gathered),
            "POLLS": self.polls,
        }
        element, piece = C_TYPES[self.dtype], _PIECES[self._bytes]
        parameters = ["const long long* inboxes", f"const {element}* x", f"{element}* y"]
        body = [f"typedef {element} E;", f"typedef {piece} Piece;", "wait_for_others();"]
        body.append(own_text("exchange.cuh"))
        return generated_source(parameters, body, THREADS, constants=constants, functions=_SENDING)


class ExchangeRecording(GeneratedRecording, LayoutRecording):
    """Records sums of ranks' rows, and ranks' columns side by side.

    In steps of few rows, skinny GEMMs send rows, and the row kernel that reads their sum computes
    it. It waits for products of other ranks alone, and these wait for nothing that comes later.
    """

    @property
    def kinds(self) -> NodeKinds:
        exchanges = dict.fromkeys(("summed", "gathered"), self._exchange)
        return {**super().kinds, "rows": self._rows, **exchanges}

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self._summing: dict[int, RowKernel] = {}
        """Kernels of regions that sum rows which a product sends, by the region's first output."""

    def _rows(self, node: Node) -> None:
        """Record a region of rows, with its sum of ranks' rows if it has one."""
        total = _total(node)
        if total is None:
            self._generate(partial(row_kernel, more=self._wanted_layouts(node)), node)
            return
        kernel = self._summing.pop(node.outputs[0], None)
        if kernel is not None:
            self._generated(kernel, node, [self._recorder.exchanged])
            return
        (y,), x = total.outputs, self._summed_source(node, total)
        self._exchange(replace(total, inputs=(x,)))
        inside = tuple(each for each in node.arguments if each is not total)
        outside = tuple(each for each in node.outputs if each != y)
        self._generate(row_kernel, replace(node, arguments=inside, outputs=outside))
        if y not in node.outputs:
            self._recorder.release(self._buffer(y))

    def _summed_source(self, region: Node, total: Node) -> int:
        """Return the value outside a region whose rows it sums over ranks."""
        views = {each.outputs[0]: each for each in region.arguments if each.kind in RESHAPES}
        (x,) = total.inputs
        while x in views:
            (x,) = views[x].inputs
        return self._uses.source(x)

    def _sending(self, product: Node) -> Inboxes | None:
        """Return the inboxes to which a product sends its rows; None if it sends none."""
        (y,) = product.outputs
        region = self._uses.only_reader(y)
        total = None if region is None else _total(region)
        recorder = self._recorder
        if region is None or total is None or recorder.inboxes is None:
            return None
        value = self._program.values[y]
        row = row_width(self._program, y) * value.dtype.size
        if self._summed_source(region, total) != y or not rank_sums.fits(recorder.max_rows, row):
            return None
        try:
            kernel = row_kernel(self._program, region, recorder.inboxes)
        except NotGenerated:
            return None
        self._summing[region.outputs[0]] = kernel
        return recorder.inboxes

    def _exchange(self, node: Node) -> None:
        """Record a sum of all ranks' rows, or the ranks' rows side by side. Exchanges follow each
        other in one order, the same on all ranks.
        """
        recorder = self._recorder
        (x,) = node.inputs
        value, inboxes = self._program.values[x], recorder.inboxes
        if inboxes is None:
            raise UnsupportedNode("ranks whose memory is not shared")
        width = row_width(self._program, x)
        if not width or value.dtype not in ROUNDED:
            raise UnsupportedNode(f"an exchange of {value.dtype} that is not by rows")
        gathered = node.kind == "gathered"
        kernel = Exchange(
            inboxes.part, value.dtype, width, max_rows=recorder.max_rows, gathered=gathered
        )
        reads = self._read([x])
        y = self._written(node.outputs[0], reads)
        arguments = [recorder.rows, recorder.copied(inboxes.table), self._place(x).address]
        recorder.add(
            kernel.text,
            kernel.grid,
            kernel.threads,
            arguments=[*arguments, y.address],
            reads=reads,
            writes=[y, recorder.exchanged],
        )


def _total(region: Node) -> Node | None:
    """Return the sum of ranks' rows in a region of rows; None without one."""
    if region.kind != FUSED or region.name != "rows":
        return None
    return next((each for each in region.arguments if each.kind == "summed"), None)
