"""Takes down kernels for a graph: which, in which order, on which addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from quire.device.cuda.driver import Card, Launch
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import PackedWeight
from quire.engine.decode import kernels
from quire.engine.decode.workspace import Buffer, Workspace

Address = Callable[[mx.array], int]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch before its source is compiled; see `driver.Launch`."""

    source: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[int, ...]
    after: tuple[int, ...]


def launches(recorded: Sequence[Kernel], functions: Sequence[int]) -> list[Launch]:
    """The kernels with their compiled functions."""
    return [
        Launch(function, each.grid, each.block, each.shared, each.arguments, each.after)
        for each, function in zip(recorded, functions, strict=True)
    ]


@dataclass
class Recorder:
    """The kernels of a step of up to `max_rows` rows, so far.

    Args:
        address: of an array on the device.
        workspace: what the kernels write to, and where the step's inputs are.
        card: that they run on.
        batch_invariant: a row's bits do not depend on how many rows there are.
        copies: see `copied`; by identity arrays and their copies, which outlive all graphs.

    Attributes:
        kept: arrays that must live as long as the graph: kernels read them.
    """

    max_rows: int
    address: Address
    workspace: Workspace
    card: Card
    batch_invariant: bool = False
    copies: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    kept: list[mx.array] = field(default_factory=list)

    def add(
        self,
        source: str,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[int],
        after: tuple[int, ...],
        shared: int = 0,
    ) -> int:
        """The number of a new kernel.

        Args:
            after: the kernels, by number, that it waits for.
        """
        self.kernels.append(Kernel(source, grid, block, shared, tuple(arguments), after))
        return len(self.kernels) - 1

    def linear(self, x: int, parts: Sequence[tuple[PackedWeight, int]], last: int) -> int:
        """Matrices by which the same rows are multiplied, each into a buffer of its own."""
        outputs = tuple(weight.codes.shape[0] for weight, _ in parts)
        gemm = self.gemm(parts[0][0], sum(outputs))
        arguments = [self.workspace.at(Buffer.ROWS), x]
        for weight, buffer in parts:
            arguments += [*self.matrix(weight), buffer]
        grid = sum(kernels.parts(gemm, outputs)), gemm.blocks, 1
        source = kernels.linear(gemm, outputs)
        return self.add(source, grid, gemm.threads, arguments, (last,), gemm.shared)

    def gemm(
        self, weight: PackedWeight, outputs: int, *, gated: bool = False, experts: bool = False
    ) -> SkinnyGemm:
        """How the products of a step's rows with a matrix are cut."""
        inputs, group_size = weight.codes.shape[-1] * 8, weight.packing.group_size
        rows, invariant = self.max_rows, self.batch_invariant
        return SkinnyGemm(inputs, outputs, group_size, rows, self.card, gated, experts, invariant)

    # -- addresses -----------------------------------------------------------------------------

    def matrix(self, weight: PackedWeight) -> tuple[int, int, int]:
        """Of codes, scales and biases."""
        assert weight.biases is not None, "affine codes have biases"
        return self.address(weight.codes), self.address(weight.scales), self.address(weight.biases)

    def constant(self, array: mx.array) -> int:
        """Of an array that is kept as long as the graph."""
        mx.eval(array)
        self.kept.append(array)
        return self.address(array)

    def copied(self, array: mx.array) -> int:
        """Of the copy of an array that the host wrote, in memory that is the device's own."""
        if id(array) not in self.copies:
            copy = in_device_memory(array)
            mx.eval(copy)
            self.copies[id(array)] = array, copy
        return self.address(self.copies[id(array)][1])

    def optional(self, array: mx.array | None) -> int:
        """0 where there is none."""
        return 0 if array is None else self.address(array)
