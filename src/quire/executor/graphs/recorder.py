"""Takes down the kernels of a step for a graph: which, in which order, on which addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from quire.device.cuda.driver import Card, Launch
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import PackedWeight
from quire.executor.graphs.layout import InputLayout

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
    """Return the kernels with their compiled functions."""
    return [
        Launch(function, each.grid, each.block, each.shared, each.arguments, each.after)
        for each, function in zip(recorded, functions, strict=True)
    ]


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that kernels of a step write and read.

    Attributes:
        bytes: its size.
        writer: the kernel that wrote what is in it, by number.
        readers: the kernels that read that.
    """

    address: int
    bytes: int
    writer: int | None = None
    readers: list[int] = field(default_factory=list)


@dataclass
class Recorder:
    """The kernels of a step of up to `max_rows` rows, so far.

    Args:
        address: of an array on the device.
        inputs: where the step's inputs are.
        card: the card that the kernels run on.
        batch_invariant: a row's bits do not depend on how many rows there are.
        copies: see `copied`; by identity arrays and their copies, which outlive all graphs.

    Attributes:
        kept: arrays that must live as long as the graph: kernels read or write them.
    """

    max_rows: int
    address: Address
    inputs: InputLayout
    card: Card
    batch_invariant: bool = False
    copies: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    kept: list[mx.array] = field(default_factory=list)
    _free: list[Buffer] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)
    """For each kernel, a bit for every kernel that is done before it."""

    def add(
        self,
        source: str,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[int],
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        shared: int = 0,
    ) -> int:
        """Add a kernel, behind those whose buffers it reads or overwrites; return its number."""
        reads, writes = list(reads), list(writes)
        needed = {each.writer for each in (*reads, *writes)} - {None}
        needed |= {reader for each in writes for reader in each.readers}
        after = self._reduced(sorted(number for number in needed if number is not None))
        number = len(self.kernels)
        self.kernels.append(Kernel(source, grid, block, shared, tuple(arguments), after))
        self._before.append(self._done_with(after))
        for each in writes:
            each.writer, each.readers = number, []
        for each in reads:
            if each not in writes:
                each.readers.append(number)
        return number

    def add_last(
        self, source: str, grid: tuple[int, int, int], block: int, arguments: Sequence[int]
    ) -> int:
        """Add a kernel behind all others; return its number."""
        after = self._reduced(range(len(self.kernels)))
        self.kernels.append(Kernel(source, grid, block, 0, tuple(arguments), after))
        self._before.append(self._done_with(after))
        return len(self.kernels) - 1

    def _done_with(self, kernels: Iterable[int]) -> int:
        """Return the bits of some kernels and of all that are done before one of them."""
        done = 0
        for each in kernels:
            done |= self._before[each] | 1 << each
        return done

    def _reduced(self, needed: Sequence[int]) -> tuple[int, ...]:
        """Leave out kernels that are done before another one: fewer edges start earlier."""
        implied = 0
        for each in needed:
            implied |= self._before[each]
        return tuple(each for each in needed if not implied >> each & 1)

    # -- buffers ---------------------------------------------------------------------------------

    def buffer(self, bytes: int, reads: Iterable[Buffer] = ()) -> Buffer:
        """Return memory for what the next kernel writes.

        Args:
            reads: the buffers that it reads. Memory is reused where what used it before is done
                once these are written, so that reuse makes nothing wait.
        """
        done = self._done_with(each.writer for each in reads if each.writer is not None)
        best: Buffer | None = None
        for each in self._free:
            users = [*each.readers, *([] if each.writer is None else [each.writer])]
            if each.bytes < bytes or any(not done >> user & 1 for user in users):
                continue
            if best is None or each.bytes < best.bytes:
                best = each
        if best is not None:
            self._free.remove(best)
            return best
        memory = mx.zeros((max(bytes, 16),), dtype=mx.uint8)
        return Buffer(self.constant(memory), memory.nbytes)

    def release(self, buffer: Buffer) -> None:
        """Let later kernels write to a buffer that nobody reads any more."""
        self._free.append(buffer)

    # -- addresses -------------------------------------------------------------------------------

    def gemm(
        self, weight: PackedWeight, outputs: int, *, gated: bool = False, experts: bool = False
    ) -> SkinnyGemm:
        """Return how the products of a step's rows with a matrix are cut."""
        inputs, group_size = weight.codes.shape[-1] * 8, weight.packing.group_size
        rows, invariant = self.max_rows, self.batch_invariant
        return SkinnyGemm(inputs, outputs, group_size, rows, self.card, gated, experts, invariant)

    def matrix(self, weight: PackedWeight) -> tuple[int, int, int]:
        """Return the addresses of codes, scales and biases."""
        assert weight.biases is not None, "affine codes have biases"
        return self.address(weight.codes), self.address(weight.scales), self.address(weight.biases)

    def constant(self, array: mx.array) -> int:
        """Return the address of an array that is kept as long as the graph."""
        mx.eval(array)
        self.kept.append(array)
        return self.address(array)

    def copied(self, array: mx.array) -> int:
        """Return the address of a copy of an array in memory that is the device's own."""
        if id(array) not in self.copies:
            copy = in_device_memory(array)
            mx.eval(copy)
            self.copies[id(array)] = array, copy
        return self.address(self.copies[id(array)][1])

    def weight(self, array: mx.array) -> int:
        """Return the address of a weight; of a copy where MLX keeps it beside the host."""
        mx.eval(array)  # it may have been folded from others
        return self.address(array) if array.nbytes > 8 else self.copied(array)

    def optional(self, array: mx.array | None) -> int:
        """Return the address of a weight; 0 where there is none."""
        return 0 if array is None else self.weight(array)
