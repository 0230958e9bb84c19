"""The kernel by which ranks exchange rows within a step: sums of all, or columns side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.inboxes import MOST_BLOCKS, PIECES, SLOT, SLOTS, THREADS
from quire.device.gpu_kernels import kernel_text
from quire.device.ranks import Part
from quire.executor.graphs.operands import UnsupportedNode, row_width
from quire.executor.graphs.places import ValueRecording
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.source import C_TYPES, ROUNDED, source_text
from quire.program.values import Node

_PIECES = {8: "uint2", 4: "unsigned", 2: "unsigned short"}
"""Types by their bytes, of what a thread sends at once."""
_SENDING = """
__device__ __forceinline__ void sent(uint4* to, const unsigned* words, unsigned round) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};"
               :: "l"(to), "r"(words[0]), "r"(round), "r"(words[1]) : "memory");
}
__device__ __forceinline__ void received(const uint4* from, unsigned* words, unsigned round) {
  for (unsigned turn = 0; POLLS == 0 || turn < POLLS; turn++) {
    unsigned one, two;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(one), "=r"(words[1]), "=r"(two) : "l"(from) : "memory");
    if (one == round && two == round) return;
  }
}
"""


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
        body.append(kernel_text("quire.executor.graphs", "exchange.cuh"))
        return source_text(parameters, body, THREADS, constants=constants, functions=_SENDING)


def record_exchange(
    recorder: Recorder, kernel: Exchange, x: int, y: int, reads: Sequence[Buffer], to: Buffer
) -> None:
    """Record an exchange. Exchanges follow each other in one order, the same on all ranks.

    Args:
        x: address of this rank's rows.
        y: address of the result.
    """
    assert recorder.inboxes is not None, "the ranks share memory"
    arguments = [recorder.inputs.rows, recorder.copied(recorder.inboxes.table), x, y]
    writes = [to, recorder.exchanged]
    recorder.add(
        kernel.text, kernel.grid, kernel.threads, arguments=arguments, reads=reads, writes=writes
    )


class ExchangeRecording(ValueRecording):
    """Records the exchanges of ranks."""

    def _exchange(self, node: Node) -> None:
        """Record a sum of all ranks' rows, or the ranks' rows side by side."""
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
        record_exchange(recorder, kernel, self._place(x).address, y=y.address, reads=reads, to=y)
