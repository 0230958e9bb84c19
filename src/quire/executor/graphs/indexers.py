"""Records indexers: which keys each row attends to, and their copies side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.attention.paged.portable_kernels import Codes
from quire.device.gpu_kernels import in_device_memory
from quire.executor.graphs import coded_kernels
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import Place, ValueRecording
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.source import own_text, source_text
from quire.program.values import Node, Program

_SCORES = 1 << 22
"""Scores of keys in memory at a time, of all rows together."""
_BLOCKS = 512
"""Thread blocks that score, or copy, the keys of all rows together."""
COPYING_THREADS = 128
_THREADS, _CHOOSING_THREADS = 128, 512
_UNIT = 64
"""Tokens that a row's copies have room for are a multiple of this."""
_TILE = "const int* tiles"


@dataclass(frozen=True, slots=True)
class Index:
    """An indexer's keys in a pool, `[blocks, block_size, dim]`.

    Attributes:
        group: the KV group whose inputs locate a step's rows.
    """

    address: int
    group: int
    block_size: int


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """The keys that each row of a step attends to.

    Attributes:
        keys: int32 `[rows, limit]`, ascending.
        tiles: a tile of attention for each row, over the copies of its keys.
        room: tokens that each row's copies have room for.
        block_size: tokens of a block of copies.
    """

    keys: Buffer
    tiles: Buffer
    limit: int
    room: int
    block_size: int

    def table(self, recorder: Recorder) -> int:
        """Return the address of the block table of the copies."""
        blocks = np.arange(recorder.max_rows * self.room // self.block_size, dtype=np.int32)
        return recorder.constant(in_device_memory(mx.array(blocks)))

    def copying(self, dim: int) -> str:
        """Return the source that copies plain keys of `dim` elements side by side."""
        parameters = ["const int* found", "const int* chosen", _TILE, "const int* table"]
        parameters += ["const __nv_bfloat16* keys", "__nv_bfloat16* to"]
        return kernel_source("gather", parameters, self._constants(dim), threads=COPYING_THREADS)

    def decoding(self, codes: Codes, dim: int, *, turned: bool) -> str:
        """Return the source that copies coded keys side by side, in the model's coordinates; see
        `coded_kernels.gather`.
        """
        constants = self._constants(dim)
        return coded_kernels.gather(codes, constants, COPYING_THREADS, turned=turned)

    def _constants(self, dim: int) -> dict[str, int]:
        sizes = {"LIMIT": self.limit, "ROOM": self.room, "BLOCK": self.block_size}
        return {**sizes, "DIM": dim, "THREADS": COPYING_THREADS}


class IndexerRecording(ValueRecording):
    """Records the nodes of indexers.

    Attributes:
        indexes: the keys of indexers, by layer.
    """

    indexes: Mapping[int, Index]

    def _start(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        super()._start(program, given, outputs)
        self._chosen: dict[int, ChosenKeys] = {}
        """By the layer whose indexer chose them."""
        self._readers: dict[int, int] = {}
        """How many layers still attend to what a layer's indexer chose."""
        for node in program.nodes:
            for each in node.arguments if node.attributes.get("what") == "attention" else ():
                if (layer := each.attributes.get("chosen_by")) is not None:
                    self._readers[layer] = self._readers.get(layer, 0) + 1

    def _choose(self, node: Node) -> None:
        recorder, own = self._recorder, node.attributes
        index, limit = self.indexes[own["layer"]], own["limit"]
        if recorder.inputs.tilings:
            raise UnsupportedNode("indexers in steps of many rows")
        q, k, weights = (node.input(role) for role in ("q", "k", "weights"))
        heads, dim = self._width(q, 1), self._width(q, 2)
        assert q is not None, "an indexer has queries"
        assert k is not None, "an indexer has keys"
        assert weights is not None, "an indexer weighs its heads"
        group, rows = recorder.inputs.group(index.group), recorder.rows
        constants = {"DIM": dim, "BLOCK": index.block_size, "THREADS": _THREADS}
        kinds = {name: self._rows_of(value) for name, value in (("q", q), ("k", k))}
        factors = self._rows_of(weights)
        reads = self._read([q, k, weights])
        capacity = most_keys(recorder.max_rows)
        scores = recorder.buffer(4 * recorder.max_rows * capacity, reads)

        parameters = [kinds["k"].parameter("k"), "const int* blocks", "const int* offsets"]
        arguments = [rows, kinds["k"].address, group.blocks, group.offsets, index.address]
        text = kernel_source(
            "store_rows", [*parameters, "__nv_bfloat16* keys"], constants, threads=_THREADS
        )
        # The scores are named as written here, too, so that they are computed after the keys.
        recorder.add(
            text,
            (recorder.max_rows, 1, 1),
            _THREADS,
            arguments=arguments,
            reads=reads,
            writes=[scores],
        )

        constants |= {"HEADS": heads, "LIMIT": limit, "CAPACITY": capacity}
        parameters = [kinds["q"].parameter("q"), factors.parameter("weights")]
        parameters += [_TILE, "const int* table", "const __nv_bfloat16* keys", "float* scores"]
        arguments = [rows, kinds["q"].address, factors.address, group.tiles, recorder.inputs.table]
        arguments += [index.address, scores.address]
        grid = recorder.max_rows, blocks_of_row(recorder.max_rows), 1
        text = kernel_source("index_scores", parameters, constants, threads=_THREADS)
        recorder.add(text, grid, _THREADS, arguments=arguments, reads=reads, writes=[scores])

        self._chosen[own["layer"]] = self._best(scores, index, limit, capacity=capacity)
        recorder.release(scores)

    def _best(self, scores: Buffer, index: Index, limit: int, capacity: int) -> ChosenKeys:
        """Record the kernel that chooses keys by their scores."""
        recorder, unit = self._recorder, max(_UNIT, index.block_size)
        group, room = recorder.inputs.group(index.group), -(-limit // unit) * unit
        keys = recorder.buffer(4 * recorder.max_rows * limit, [scores])
        tiles = recorder.buffer(4 * 6 * recorder.max_rows, [scores])
        constants = {
            "LIMIT": limit,
            "ROOM": room,
            "BLOCK": index.block_size,
            "CAPACITY": capacity,
            "THREADS": _CHOOSING_THREADS,
        }
        parameters = ["const float* scores", _TILE, "int* chosen", "int* found"]
        arguments = [recorder.rows, scores.address, group.tiles, keys.address, tiles.address]
        text = kernel_source("choose", parameters, constants, threads=_CHOOSING_THREADS)
        grid = recorder.max_rows, 1, 1
        recorder.add(
            text, grid, _CHOOSING_THREADS, arguments=arguments, reads=[scores], writes=[keys, tiles]
        )
        return ChosenKeys(keys, tiles, limit, room=room, block_size=index.block_size)

    def _chosen_by(self, layer: int | None) -> ChosenKeys | None:
        """Return the keys that a layer's indexer chose; None for None.

        Raises:
            UnsupportedNode: its kernels were not recorded.
        """
        if layer is None:
            return None
        if layer not in self._chosen:
            raise UnsupportedNode("attention over keys that an indexer chooses")
        return self._chosen[layer]

    def _has_attended(self, layer: int | None) -> None:
        """Release what a layer's indexer chose once the last layer has attended to it."""
        if layer is None:
            return
        self._readers[layer] -= 1
        if not self._readers[layer]:
            chosen = self._chosen.pop(layer)
            self._recorder.release(chosen.keys)
            self._recorder.release(chosen.tiles)


def has_indexers(program: Program) -> bool:
    """Whether indexers choose the keys that rows attend to."""
    return any(node.kind == "choose" for node in program.nodes)


def blocks_of_row(max_rows: int) -> int:
    """Return how many thread blocks score, or copy, a row's keys in graphs of `max_rows` rows."""
    return max(1, _BLOCKS // max_rows)


def most_keys(max_rows: int) -> int:
    """Return the most keys of a sequence that indexers score in graphs of `max_rows` rows."""
    return _SCORES // max_rows


def kernel_source(
    name: str, parameters: Sequence[str], constants: Mapping[str, int], threads: int
) -> str:
    """Return the source of a kernel; see `source.source_text`."""
    body = own_text(f"{name}.cuh")
    return source_text(parameters, [body], threads, constants=constants)
