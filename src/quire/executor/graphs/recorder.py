"""Collects the kernel launches of a step for a graph: order, dependencies and addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from quire.device.cuda import boxes
from quire.device.cuda.cublas import Library
from quire.device.cuda.driver import Card, Function, Launch, Source
from quire.device.cuda.inboxes import Inboxes
from quire.device.cuda.router_cuts import shares_rows
from quire.device.cuda.skinny_gemm import VAST, SkinnyGemm, suit_digits
from quire.device.cuda.warpgroup_gemm import EXPERT_TILES, WarpgroupGemm, copies_boxes
from quire.device.cuda.wide_gemm import ROWS, WideGemm
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import Packing
from quire.executor.graphs import device_memory
from quire.executor.graphs.attention.workspaces import Workspaces
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import ProductMatrix
from quire.executor.graphs.products.product_kernels import Gemm

EXPERT_TILE = 8
"""Pairs of row and expert in a tile of a skinny GEMM."""
_AVERAGE_PAIRS = {8: 4, 16: 8, 24: 16, 32: 16, 64: 32, 128: 64}
"""Most pairs of an average expert, by the most pairs of a tile: with more, too many experts have a
second tile. Tiles of 24 pairs are those of skinny GEMMs alone.
"""
SINGLE_PAIRS = 0.5
"""Most pairs for each expert with which a pair has a tile of its own. With as many pairs as experts
it takes longer (`benchmarks/results/gpu-h200-2026-11-27-single-pairs.json`).
"""
_SKINNY_ROWS, _FEW_ROWS, _VERY_FEW_ROWS = 32, 16, 8
"""Most rows of a skinny GEMM, of which a thread block multiplies all; of those for which it is the
fastest, however large the matrix; and for which it is even if that is a head's.
"""
_SMALL_MATRIX, _SMALL_CODES = 20 << 20, 12 << 20
"""Most weights of a matrix for which a skinny GEMM is the fastest with more than `_FEW_ROWS`; of
one in 4 bits (`benchmarks/results/gpu-h200-2026-11-27-skinny-dense.json`).
"""

Address = Callable[[mx.array], int]

NOTHING_MOVED: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch before its source is compiled; see `driver.Launch`."""

    source: Source
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[int, ...]
    after: tuple[int, ...] = ()


def launches(
    recorded: Sequence[Kernel],
    functions: Sequence[Function],
    moved: Mapping[int, int] = NOTHING_MOVED,
    first: int = 0,
) -> list[Launch]:
    """Return the launches with compiled kernels.

    Args:
        moved: maps addresses at recording to the current ones.
        first: number of the first of these kernels among those of the step. The kernels before it
            are done.
    """
    return [
        Launch(
            function,
            each.grid,
            each.block,
            shared=each.shared,
            arguments=tuple(moved.get(address, address) for address in each.arguments),
            after=tuple(number - first for number in each.after if number >= first),
        )
        for each, function in zip(recorded, functions, strict=True)
    ]


def expert_tile(card: Card, pairs: int, experts: int, packing: Packing) -> int:
    """Return the most pairs of row and expert in a tile of experts' products.

    A pair is alone, and multiplied as digits, where most experts would have no other one. Else on
    Hopper most experts have one tile; see `_AVERAGE_PAIRS`.

    Args:
        pairs: of the step.
        packing: of the experts' first matrices.
    """
    if pairs <= SINGLE_PAIRS * experts and suit_digits(
        packing.bits, packing.mode, packing.group_size
    ):
        return 1
    if not card.warpgroups:
        return ROWS if pairs > EXPERT_TILE * experts else EXPERT_TILE
    skinny = most_skinny_pairs(packing.bits)
    tiles = (tile for tile in _AVERAGE_PAIRS if tile <= skinny or tile in EXPERT_TILES)
    fitting = (tile for tile in tiles if pairs <= _AVERAGE_PAIRS[tile] * experts)
    return next(fitting, EXPERT_TILES[-1])


def most_skinny_pairs(bits: int) -> int:
    """Return the most pairs of row and expert of a tile that a skinny GEMM multiplies.

    Args:
        bits: of a weight.
    """
    return 3 * EXPERT_TILE if bits == 4 else EXPERT_TILE


@dataclass(slots=True, eq=False)
class Buffer:
    """Device memory that kernels of a step write and read.

    Attributes:
        bytes: its size.
        memory: the array at `address`, flat, uint8; None if the address lies within another one.
        writer: number of the kernel that last wrote it.
        readers: numbers of the kernels that read that content.
    """

    address: int
    bytes: int
    memory: mx.array | None = None
    writer: int | None = None
    readers: list[int] = field(default_factory=list)


@dataclass
class Recorder:
    """The kernels recorded so far of a step of up to `max_rows` rows.

    Args:
        address: returns the device address of an array.
        inputs: layout of the step's inputs.
        card: the card that the kernels run on.
        batch_invariant: a row's bits do not depend on how many rows there are.
        copies: arrays and their copies by identity, which outlive all graphs; see `copied`.
        inboxes: memory by which ranks exchange rows; None if there is one rank, or none is shared.
        workspaces: memory for decoded blocks; None where steps have few rows.
        library: computes products of wide steps, see `library_products`; None if own kernels do.
        spare: memory for buffers, of which graphs that never run at once share the same.

    Attributes:
        rows: address of the number of rows that the next kernels compute: all or the wanted ones.
        kept: arrays that kernels read or write, and that must live as long as the graph.
        tables: maps a table's address to the addresses that it holds.
        parts: numbers of the first kernels of the graphs behind the first one; see `start_part`.
        exchanged: written by each exchange, so that these follow each other.
        allocated: memory of the buffers that did not fit the spare memory.
    """

    max_rows: int
    address: Address
    inputs: InputLayout
    card: Card
    batch_invariant: bool = False
    copies: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    inboxes: Inboxes | None = None
    workspaces: Workspaces | None = None
    library: Library | None = None
    spare: Sequence[mx.array] = ()
    rows: int = field(init=False)
    kernels: list[Kernel] = field(default_factory=list)
    kept: list[mx.array] = field(default_factory=list)
    tables: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    exchanged: Buffer = field(default_factory=lambda: Buffer(0, 0))
    allocated: list[mx.array] = field(default_factory=list)
    _free: list[Buffer] = field(default_factory=list)
    _workspaces: dict[int, Buffer] = field(default_factory=dict)
    _before: list[int] = field(default_factory=list)
    """For each kernel, a bit set of the kernels that are finished before it starts."""

    def __post_init__(self) -> None:
        self.rows = self.inputs.rows
        self._free += map(self.held, self.spare)

    def add(
        self,
        source: Source,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[int],
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        shared: int = 0,
    ) -> None:
        """Add a kernel that depends on earlier kernels of its buffers."""
        reads, writes = list(reads), list(writes)
        needed = {each.writer for each in (*reads, *writes)} - {None}
        needed |= {reader for each in writes for reader in each.readers}
        number = len(self.kernels)
        self._append(
            Kernel(source, grid, block, shared=shared, arguments=tuple(arguments)),
            sorted(n for n in needed if n is not None and n >= self._first),
        )
        for each in writes:
            each.writer, each.readers = number, []
        for each in reads:
            if each not in writes:
                each.readers.append(number)

    def add_last(
        self, source: str, grid: tuple[int, int, int], block: int, arguments: Sequence[int]
    ) -> None:
        """Add a kernel that depends on all others."""
        kernel = Kernel(source, grid, block, shared=0, arguments=tuple(arguments))
        self._append(kernel, range(self._first, len(self.kernels)))

    def _append(self, kernel: Kernel, needed: Sequence[int]) -> None:
        """Add a kernel that starts when the needed ones are done. Those that others imply are left
        out: a kernel with fewer edges starts earlier.
        """
        implied = 0
        for each in needed:
            implied |= self._before[each]
        after = tuple(each for each in needed if not implied >> each & 1)
        self.kernels.append(replace(kernel, after=after))
        self._before.append(self._done_with(after))

    def start_part(self) -> None:
        """Let the kernels from here on be another graph, which runs when the one before is done."""
        self.parts.append(len(self.kernels))

    @property
    def _first(self) -> int:
        """Number of the first kernel of the graph that is being recorded."""
        return self.parts[-1] if self.parts else 0

    def _done_with(self, kernels: Iterable[int]) -> int:
        """Return a bit set of the given kernels and all kernels that finish before them."""
        done = (1 << self._first) - 1
        for each in kernels:
            done |= self._before[each] | 1 << each
        return done

    # -- buffers ---------------------------------------------------------------------------------

    def buffer(self, bytes: int, reads: Iterable[Buffer] = ()) -> Buffer:
        """Allocate memory for the output of the next kernel.

        Args:
            reads: the buffers that it reads. Memory is reused only from kernels that are finished
                once these are written, so that no kernel waits because of reuse.
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
        own = device_memory.unwritten((-(-max(bytes, 1) // 16) * 16,), mx.uint8)
        self.allocated.append(own)
        return self.held(own)

    def held(self, memory: mx.array) -> Buffer:
        """Return flat memory, uint8, as a buffer that is kept alive as long as the graph."""
        return Buffer(self.constant(memory), memory.nbytes, memory)

    def workspace(self, number: int) -> Buffer:
        """Return a workspace, which all graphs share; see `Workspaces.memory`."""
        assert self.workspaces is not None, "graphs of many rows have workspaces"
        if number not in self._workspaces:
            own = self.workspaces.memory(number)
            self._workspaces[number] = Buffer(self.address(own), own.nbytes, own)
        return self._workspaces[number]

    def release(self, buffer: Buffer) -> None:
        """Let later kernels write to a buffer that nobody reads any more."""
        self._free.append(buffer)

    # -- addresses -------------------------------------------------------------------------------

    def gemm(
        self,
        matrix: ProductMatrix,
        outputs: int,
        *,
        gated: bool = False,
        tiles: int = 0,
        tile: int = EXPERT_TILE,
        sharing: bool = False,
    ) -> Gemm:
        """Return how the product of a step's rows with a matrix is cut into thread blocks.

        Args:
            outputs: of all matrices of the launch.
            tiles: of experts' matrices, their number.
            tile: pairs of row and expert in one of them, from `expert_tile`.
            sharing: whether thread blocks may share tiles, see `add_product`.
        """
        inputs, packing = matrix.inputs, matrix.packing
        group_size, bits, mode = packing.group_size, packing.bits, packing.mode
        experts = matrix.experts > 1
        if experts:
            many = tile > most_skinny_pairs(bits)
        elif not gated and shares_rows(inputs, outputs, rows=self.max_rows, card=self.card):
            many = False
        elif self.max_rows > _VERY_FEW_ROWS and sharing and self.card.warpgroups:
            small = _SMALL_CODES if bits == 4 else _SMALL_MATRIX
            large = inputs * outputs * (1 + gated) > small
            few = _VERY_FEW_ROWS if outputs >= VAST and not gated else _FEW_ROWS
            many = self.max_rows > (few if large else _SKINNY_ROWS)
        else:
            many = self.max_rows > _SKINNY_ROWS
        if many and not self.batch_invariant:
            rows = tile * tiles if experts else self.max_rows
            cut = inputs, outputs, bits, group_size, rows, self.card, gated, experts, mode
            if not self.card.warpgroups:
                return WideGemm(*cut)
            return WarpgroupGemm(*cut, tile, sharing=sharing)
        return SkinnyGemm(
            inputs,
            outputs,
            group_size,
            rows=self.max_rows,
            card=self.card,
            gated=gated,
            experts=experts,
            batch_invariant=self.batch_invariant,
            bits=bits,
            mode=mode,
            tile=tile,
        )

    def add_product(
        self,
        gemm: Gemm,
        source: str,
        grid: tuple[int, int, int],
        arguments: Sequence[int],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> None:
        """Add the kernel of a product, with memory for sums if its thread blocks share tiles.

        Args:
            arguments: the first two are the number of rows and the rows.
        """
        sums: list[Buffer] = []
        if isinstance(gemm, WarpgroupGemm) and gemm.sharing:
            sums = [self.buffer(gemm.sums(grid[0]), reads)]
            flags = self.constant(mx.zeros((gemm.flags(grid[0]),), mx.uint32))
            arguments = [*arguments, sums[0].address, flags]
            if copies_boxes(gemm):
                arguments.append(self.constant(boxes.memory_map(gemm.inputs, gemm.cut.rows)))
        self.add(
            source,
            grid,
            gemm.threads,
            arguments=arguments,
            reads=reads,
            writes=[*writes, *sums],
            shared=gemm.shared,
        )
        for each in sums:
            self.release(each)

    def matrix(self, matrix: ProductMatrix) -> tuple[int, ...]:
        """Return the addresses of a matrix's arrays."""
        return tuple(map(self.address, matrix.arrays))

    def constant(self, array: mx.array) -> int:
        """Return the address of an array, which is kept alive as long as the graph."""
        mx.eval(array)
        self.kept.append(array)
        return self.address(array)

    def table(self, addresses: Sequence[int]) -> int:
        """Return the address of a table of addresses, int64."""
        found = self.constant(_address_table(addresses))
        self.tables[found] = tuple(addresses)
        return found

    def moved_tables(self, moved: Mapping[int, int]) -> tuple[Mapping[int, int], list[mx.array]]:
        """Rebuild all tables whose targets have moved.

        Returns:
            By a table's address its new one, and the new arrays, which the graph must keep.
        """
        arrays = {
            at: _address_table([moved.get(each, each) for each in addresses])
            for at, addresses in self.tables.items()
        }
        mx.eval(list(arrays.values()))
        return {at: self.address(each) for at, each in arrays.items()}, list(arrays.values())

    def copied(self, array: mx.array) -> int:
        """Return the address of a copy of an array in device memory."""
        if id(array) not in self.copies:
            copy = in_device_memory(array)
            mx.eval(copy)
            self.copies[id(array)] = array, copy
        return self.address(self.copies[id(array)][1])

    def weight(self, array: mx.array) -> int:
        """Return the address of a weight; of a copy if MLX keeps the weight in host memory."""
        mx.eval(array)  # it may have been folded from others
        return self.address(array) if array.nbytes > 8 else self.copied(array)

    def optional(self, array: mx.array | None) -> int:
        """Return the address of a weight; 0 if it is absent."""
        return 0 if array is None else self.weight(array)


def _address_table(addresses: Sequence[int]) -> mx.array:
    return in_device_memory(mx.array(np.array(addresses, np.int64)))
