"""Records indexers, which choose the keys that each row attends to."""

from __future__ import annotations

from collections.abc import Mapping

from quire.executor.graphs.attention.chosen_keys import (
    TILE,
    ChosenKeys,
    blocks_of_row,
    kernel_source,
)
from quire.executor.graphs.attention.pools import LayerPool
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import NodeKinds, ValueRecording
from quire.executor.graphs.recorder import Buffer
from quire.program.values import Node, Program

_SCORES = 1 << 22
"""Scores of keys in memory at a time, of all rows together."""
_THREADS, _CHOOSING_THREADS = 128, 512
_UNIT = 64
"""Tokens that a row's copies have room for are a multiple of this."""


class IndexerRecording(ValueRecording):
    """Records the nodes of indexers."""

    _pools: Mapping[int, LayerPool]

    @property
    def kinds(self) -> NodeKinds:
        return {**super().kinds, "choose": self._choose}

    def _begin(self, program: Program) -> None:
        super()._begin(program)
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
        pool, limit = self._pools[own["layer"]], own["limit"]
        if recorder.inputs.tilings:
            raise UnsupportedNode("indexers in steps of many rows")
        q, k, weights = (node.input(role) for role in ("q", "k", "weights"))
        heads, dim = self._width(q, 1), self._width(q, 2)
        assert q is not None, "an indexer has queries"
        assert k is not None, "an indexer has keys"
        assert weights is not None, "an indexer weighs its heads"
        group, rows = recorder.inputs.group(pool.group), recorder.rows
        constants = {"DIM": dim, "BLOCK": pool.block_size, "THREADS": _THREADS}
        kinds = {name: self._rows_of(value) for name, value in (("q", q), ("k", k))}
        factors = self._rows_of(weights)
        reads = self._read([q, k, weights])
        capacity = most_keys(recorder.max_rows)
        scores = recorder.buffer(4 * recorder.max_rows * capacity, reads)

        parameters = [kinds["k"].parameter("k"), "const int* blocks", "const int* offsets"]
        arguments = [rows, kinds["k"].address, group.blocks, group.offsets, pool.index]
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
        parameters += [TILE, "const int* table", "const __nv_bfloat16* keys", "float* scores"]
        arguments = [rows, kinds["q"].address, factors.address, group.tiles, recorder.inputs.table]
        arguments += [pool.index, scores.address]
        grid = recorder.max_rows, blocks_of_row(recorder.max_rows), 1
        text = kernel_source("index_scores", parameters, constants, threads=_THREADS)
        recorder.add(text, grid, _THREADS, arguments=arguments, reads=reads, writes=[scores])

        self._chosen[own["layer"]] = self._best(scores, pool, limit, capacity=capacity)
        recorder.release(scores)

    def _best(self, scores: Buffer, pool: LayerPool, limit: int, capacity: int) -> ChosenKeys:
        """Record the kernel that chooses keys by their scores."""
        recorder, unit = self._recorder, max(_UNIT, pool.block_size)
        group, room = recorder.inputs.group(pool.group), -(-limit // unit) * unit
        keys = recorder.buffer(4 * recorder.max_rows * limit, [scores])
        tiles = recorder.buffer(4 * 6 * recorder.max_rows, [scores])
        constants = {
            "LIMIT": limit,
            "ROOM": room,
            "BLOCK": pool.block_size,
            "CAPACITY": capacity,
            "THREADS": _CHOOSING_THREADS,
        }
        parameters = ["const float* scores", TILE, "int* chosen", "int* found"]
        arguments = [recorder.rows, scores.address, group.tiles, keys.address, tiles.address]
        text = kernel_source("choose", parameters, constants, threads=_CHOOSING_THREADS)
        grid = recorder.max_rows, 1, 1
        recorder.add(
            text, grid, _CHOOSING_THREADS, arguments=arguments, reads=[scores], writes=[keys, tiles]
        )
        return ChosenKeys(keys, tiles, limit, room=room, block_size=pool.block_size)

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


def most_keys(max_rows: int) -> int:
    """Return the most keys of a sequence that indexers score in graphs of `max_rows` rows."""
    return _SCORES // max_rows
