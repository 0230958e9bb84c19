"""The kernel of the output head: logits of few rows, by a matrix with very many columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.codes import readable
from quire.device.cuda.driver import Card
from quire.device.cuda.packed import product_functions
from quire.device.ranks import WHOLE, Part
from quire.device.weights import PackedWeight
from quire.executor.graphs import kernels, product_kernels
from quire.executor.graphs.exchange import Exchange, record_exchange
from quire.executor.graphs.operands import ProductMatrix
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.source import literal, own_text
from quire.program.values import Program

_MOST_BLOCKS = 4
"""Thread blocks per multiprocessor of the card, which keep all of them busy."""
_BLOCKS_OF_ONE_ROW = 8
"""Thread blocks per multiprocessor in graphs of one row, where each has less to do."""


@dataclass(frozen=True, slots=True)
class Head:
    """Parameters of `head.cuh` and its launch, for steps of up to `max_rows` rows.

    Attributes:
        cap: soft cap of logits, `cap * tanh(x / cap)`; None without.
    """

    max_rows: int
    inputs: int
    outputs: int
    group_size: int
    cap: float | None
    card: Card

    @property
    def tiles(self) -> int:
        """Return how many tiles of 8 rows a thread block's shared memory holds."""
        wanted = min(4, -(-self.max_rows // 8))
        return max(
            n for n in (1, 2, 4) if n <= wanted and (n == 1 or self._shared(n) <= self.card.shared)
        )

    @property
    def fits(self) -> bool:
        """Whether the card has enough shared memory."""
        return self.shared <= self.card.shared

    @property
    def columns(self) -> int:
        """Return how many of a tile's 8 rows are rows of the step, and are stored."""
        return min(8, self.max_rows)

    @property
    def warps(self) -> int:
        return 8 if self.tiles == 1 else 16

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the number of thread blocks: enough for all rows and to fill the card."""
        most = _BLOCKS_OF_ONE_ROW if self.max_rows == 1 else _MOST_BLOCKS
        blocks = self.card.multiprocessors * (most if self.tiles == 1 else 1)
        return -(-self.max_rows // (8 * self.tiles)), blocks, 1

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory."""
        return self._shared(self.tiles)

    def _shared(self, tiles: int) -> int:
        sums = self.inputs // min(64, self.group_size) * 32
        return tiles * (2 * self.inputs * min(8, self.max_rows) + sums)

    @property
    def text(self) -> str:
        """Return the source. Parameters: rows, x, codes, scales, biases, y."""
        parameters = ["const int* rows", "const T* x"]
        parameters += [*product_kernels.matrix_parameters(), "float* y"]
        defines: Mapping[str, object] = {
            "INPUTS": self.inputs,
            "OUTPUTS": self.outputs,
            "GROUP": self.group_size,
            "TILES": self.tiles,
            "PARTS": 2 if self.tiles > 1 else 1,
            "COLUMNS": self.columns,
            "WARPS": self.warps,
            "CAPPED": int(self.cap is not None),
            "CAP": literal(self.cap or 0.0, mx.float32),
            "GELU": 0,
        }
        head, body = product_functions(), own_text("head.cuh")
        resident = 2 if self.tiles == 1 else 1
        return kernels.source_text(
            parameters, body, 32 * self.warps, defines=defines, head=head, resident=resident
        )


@dataclass(frozen=True, slots=True)
class ServedHead:
    """A head that `record_head` supports.

    Attributes:
        matrix: this rank's rows of the head.
        cap: see `Head`.
        part: the rank, of those whose logits are put side by side.
    """

    matrix: PackedWeight
    cap: float | None
    part: Part

    def kernel(self, max_rows: int, card: Card) -> Head:
        """Return the kernel of steps of up to `max_rows` rows."""
        outputs, words = self.matrix.codes.shape
        return Head(
            max_rows,
            words * 8,
            outputs,
            group_size=self.matrix.packing.group_size,
            cap=self.cap,
            card=card,
        )


def record_head(recorder: Recorder, served: ServedHead, hidden: Buffer, logits: Buffer) -> None:
    """Record the product of `hidden` with the head. Logits are float32."""
    head, alone = served.kernel(recorder.max_rows, recorder.card), served.part.size == 1
    own = logits if alone else recorder.buffer(recorder.max_rows * head.outputs * 4, [hidden])
    arguments = [
        recorder.rows,
        hidden.address,
        *recorder.matrix(ProductMatrix.of(served.matrix)),
        own.address,
    ]
    recorder.add(
        head.text,
        head.grid,
        32 * head.warps,
        arguments=arguments,
        reads=[hidden],
        writes=[own],
        shared=head.shared,
    )
    if not alone:
        kernel = Exchange(
            served.part, mx.float32, head.outputs, max_rows=recorder.max_rows, gathered=True
        )
        record_exchange(recorder, kernel, own.address, y=logits.address, reads=[own], to=logits)


def served_head(program: Program, card: Card) -> ServedHead | None:
    """Return the head of a program if `record_head` supports it."""
    nodes = [each for node in program.nodes for each in node.parts if each.kind != "AsType"]
    part = WHOLE
    if nodes and nodes[-1].kind == "gathered":
        part = nodes.pop().attributes["part"]
    first = nodes[0] if nodes else None
    if first is None or first.kind != "packed_linear" or first.weight("bias") is not None:
        return None
    weight: PackedWeight = first.weight("weight")
    if not _is_read(weight):
        return None
    caps = {
        float(program.constants[id].array.item())  # type: ignore[arg-type]  # of one float
        for node in nodes[1:]
        for id in node.inputs
        if id in program.constants and program.constants[id].array.size == 1
    }
    kinds = [node.kind for node in nodes[1:] if node.kind != "Broadcast"]
    softcap = None
    if kinds == ["Divide", "Tanh", "Multiply"] and len(caps) == 1:
        (softcap,) = caps
    elif kinds:
        return None
    served = ServedHead(weight, softcap, part)
    return served if served.kernel(64, card).fits else None


def _is_read(weight: PackedWeight) -> bool:
    """Return whether `head.cuh` reads a matrix: affine codes of 4 bits, not in tiles."""
    outputs, words = weight.codes.shape
    affine = weight.biases is not None and weight.packing.bits == 4 and not weight.tiled
    return affine and outputs % 32 == 0 and words * 8 % 256 == 0 and readable(weight)
