"""The kernel of the output head: logits of few rows, by a matrix with very many columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.device.cuda.driver import Card
from quire.device.gpu_kernels import kernel_text
from quire.device.weights import PackedWeight
from quire.executor.graphs import kernels
from quire.executor.graphs.operands import ProductMatrix, UnsupportedNode, readable
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.program.values import FUSED, Program

_MOST_BLOCKS = 4
"""Thread blocks per multiprocessor of the card, which keep all of them busy."""


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
        blocks = self.card.multiprocessors * (_MOST_BLOCKS if self.tiles == 1 else 1)
        return -(-self.max_rows // (8 * self.tiles)), blocks, 1

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory."""
        return self._shared(self.tiles)

    def _shared(self, tiles: int) -> int:
        return tiles * (2 * self.inputs * min(8, self.max_rows) + self.inputs // 64 * 32)

    @property
    def text(self) -> str:
        """Return the source. Parameters: rows, x, codes, scales, biases, y."""
        parameters = ["const int* rows", "const T* x"]
        parameters += [*kernels.matrix_parameters(), "float* y"]
        defines: Mapping[str, object] = {
            "INPUTS": self.inputs,
            "OUTPUTS": self.outputs,
            "GROUP": self.group_size,
            "TILES": self.tiles,
            "PARTS": 2 if self.tiles > 1 else 1,
            "COLUMNS": self.columns,
            "WARPS": self.warps,
            "CAPPED": int(self.cap is not None),
            "CAP": kernels.number(self.cap or 0.0),
            "GELU": 0,
        }
        head, body = (
            kernel_text("quire.device.cuda", "common.cuh"),
            kernel_text("quire.executor.graphs", "head.cuh"),
        )
        resident = 2 if self.tiles == 1 else 1
        return kernels.source_text(
            parameters, body, 32 * self.warps, defines, head, resident=resident
        )


def record_head(
    recorder: Recorder, weight: PackedWeight, softcap: float | None, hidden: Buffer, logits: Buffer
) -> None:
    """Record the product of `hidden` with the head. Logits are float32."""
    outputs, words = weight.codes.shape
    group_size = weight.packing.group_size
    head = Head(recorder.max_rows, words * 8, outputs, group_size, softcap, recorder.card)
    arguments = [
        recorder.inputs.rows,
        hidden.address,
        *recorder.matrix(ProductMatrix.of(weight)),
        logits.address,
    ]
    recorder.add(head.text, head.grid, 32 * head.warps, arguments, [hidden], [logits], head.shared)


def served_head(program: Program, card: Card) -> tuple[PackedWeight, float | None] | None:
    """Return the matrix and the soft cap of a head that `record_head` supports; None otherwise."""
    nodes = [
        each
        for node in program.nodes
        for each in (node.arguments if node.kind == FUSED else [node])
        if each.kind != "AsType"
    ]
    first = nodes[0] if nodes else None
    if first is None or first.kind != "packed_linear" or first.weight("bias") is not None:
        return None
    try:
        weight = readable(first.weight("weight"), 32, 256)
    except UnsupportedNode:
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
    outputs, words = weight.codes.shape
    head = Head(64, words * 8, outputs, weight.packing.group_size, softcap, card)
    return (weight, softcap) if head.fits else None
