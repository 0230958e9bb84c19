"""The kernels of a layer's attention that all kinds of KV block share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.device.cuda import boxes
from quire.executor.graphs.attention import attention_kernels
from quire.executor.graphs.attention.chosen_keys import COPYING_THREADS, ChosenKeys, blocks_of_row
from quire.executor.graphs.attention.layer_attention import LayerAttention
from quire.executor.graphs.layout import GroupInputs
from quire.executor.graphs.recorder import Buffer, Recorder

_INVARIANT_ROWS = 8
"""Number of rows that decides how keys are split in batch-invariant graphs of any size."""
_MOSTLY_PROMPTS = 1024
"""Fewest rows of a graph most of whose rows are those of prompts, not single ones."""


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The plain keys and values of a step's rows.

    Attributes:
        arrays, tiles, table: addresses of keys and values, of a tile for each row, and of the block
            table.
        written: buffers among these that earlier kernels of the step write.
    """

    arrays: tuple[int, ...]
    tiles: int
    table: int
    written: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionRecorder:
    """Records the attention kernels of a layer, which follow `heads.cuh`.

    Attributes:
        group: the KV group whose inputs locate a step's rows.
        q: queries, in the coordinates of the stored keys.
        numbers: address of `score_numbers`.
        ending: last arguments: addresses of the result, of sinks if there are any, and of the
            result's digits if they are wanted.
    """

    recorder: Recorder
    group: int
    layer: LayerAttention
    shape: paged.Shape
    q: Buffer
    numbers: int
    ending: tuple[int, ...]

    @property
    def inputs(self) -> GroupInputs:
        """Addresses of the step's inputs for the KV group."""
        return self.recorder.inputs.group(self.group)

    @property
    def table(self) -> int:
        """Address of the block tables."""
        return self.recorder.inputs.table

    @property
    def in_key(self) -> bool:
        """Whether a value is the beginning of its key."""
        return self.layer.spec.value_in_key

    @property
    def has_tiles(self) -> bool:
        """Whether rows of prompts are read in tiles of several, beside single rows."""
        return bool(self.recorder.inputs.tilings)

    def splits(self, rows: int | None = None) -> int:
        """Return how many thread blocks share a row's keys.

        Args:
            rows: the most rows that are split; None for all.
        """
        recorder = self.recorder
        most = _INVARIANT_ROWS if recorder.batch_invariant else rows or recorder.max_rows
        return self.shape.splits(most, recorder.card)

    def partial(self, splits: int, rows: int | None = None) -> tuple[Buffer, Buffer]:
        """Allocate the results of splits: sums of values, and softmax statistics.

        Args:
            rows: the first rows, which alone are split; None for all.
        """
        parts = (rows or self.recorder.max_rows) * self.shape.heads * splits
        partial = self.recorder.buffer(4 * parts * self.shape.value_dim, [self.q])
        return partial, self.recorder.buffer(8 * parts, [self.q])

    def add(
        self,
        source: str,
        grid: tuple[int, int, int],
        arguments: Sequence[int],
        *,
        writes: Sequence[Buffer],
        after: Sequence[Buffer] = (),
        threads: int = paged.LANES,
        shared: int = 0,
    ) -> None:
        """Record a kernel behind the one that makes the queries.

        Args:
            after: further buffers that it reads.
        """
        self.recorder.add(
            source,
            grid,
            threads,
            arguments=arguments,
            reads=[self.q, *after],
            writes=writes,
            shared=shared,
        )

    def attend_chosen(self, chosen: ChosenKeys, copy: str, arguments: Sequence[int]) -> None:
        """Record the kernels that copy chosen keys side by side, and attend to the copies.

        Args:
            copy: source of the first of them.
            arguments: its arguments between the block tables and the copies.
        """
        recorder, rows = self.recorder, self.recorder.max_rows
        size = 2 * rows * chosen.room * self.shape.key_dim
        copies = recorder.buffer(size, [self.q, chosen.keys])
        places = [recorder.rows, chosen.tiles.address, chosen.keys.address, self.inputs.tiles]
        self.add(
            copy,
            (rows, blocks_of_row(rows), 1),
            [*places, self.table, *arguments, copies.address],
            writes=[copies],
            after=[chosen.keys, chosen.tiles],
            threads=COPYING_THREADS,
        )
        arrays, table = (copies.address, copies.address), chosen.table(recorder)
        written = copies, chosen.tiles
        self.attend_rows(PlainRows(arrays, chosen.tiles.address, table, written=written))
        recorder.release(copies)

    def attend_rows(self, rows: PlainRows) -> None:
        """Record the kernels that attend to plain keys, one row a tile."""
        shape, recorder, made = self.shape, self.recorder, bool(rows.written)
        splits = self.splits()
        stores_digits = bool(self.layer.digits)
        parts = self.partial(splits) if splits > 1 else ()
        places = [each.address for each in parts] or [0, 0]
        arguments = [self.q.address, *rows.arrays, rows.tiles, rows.table]
        arguments += [self.numbers, *places, *self.ending]
        few = self.has_tiles and recorder.max_rows >= _MOSTLY_PROMPTS
        source = attention_kernels.attend(
            shape,
            recorder.card,
            ordered=self.has_tiles,
            most_tiles=recorder.inputs.max_rows if few else 0,
            value_in_key=self.in_key,
            tiles_are_made=made,
            stores_digits=stores_digits,
        )
        blocks = recorder.max_rows
        if few:
            blocks = min(blocks, shape.tiles_at_once(recorder.card))
        self.add(
            source,
            (blocks, shape.blocks, splits),
            arguments,
            writes=[*parts, self.layer.result],
            after=rows.written,
            shared=paged.single_memory(shape),
        )
        if parts:
            combine = attention_kernels.combine(
                shape, splits, recorder.card, tiles_are_made=made, stores_digits=stores_digits
            )
            self.add_up(parts, combine, given=[rows.tiles], after=rows.written)

    def attend_tiles(self, arrays: Sequence[int], tiles: int, after: Sequence[Buffer] = ()) -> None:
        """Record the kernel that attends to plain keys, several rows of a sequence a tile.

        Args:
            arrays: addresses of keys and values.
            tiles: address of the tiles.
            after: further buffers that it reads.
        """
        shape, recorder = self.shape, self.recorder
        arguments = [self.q.address, *arrays, tiles, self.table]
        arguments += [self.inputs.visible, self.numbers, *self.ending]
        tiling = recorder.inputs.tilings[self.group]
        kernel = attention_kernels.attend_many(
            shape,
            recorder.card,
            value_in_key=self.in_key,
            in_boxes=all(map(boxes.reaches, arrays)),
        )
        sums = list[Buffer]()
        if kernel.piece:
            count = max(1, shape.blocks * tiling.most_shared)
            sums.append(recorder.buffer(kernel.piece * count, [self.q]))
            arguments += [sums[0].address, recorder.constant(mx.zeros((count,), mx.int32))]
            arguments += map(recorder.constant, kernel.maps)
        self.add(
            kernel.source,
            (tiling.room(recorder.max_rows), shape.blocks, 1),
            arguments,
            writes=[self.layer.result, *sums],
            after=after,
            threads=kernel.threads,
            shared=kernel.shared,
        )
        for each in sums:
            recorder.release(each)

    def add_up(
        self,
        parts: Sequence[Buffer],
        source: str,
        given: Sequence[int],
        after: Sequence[Buffer] = (),
        rows: int | None = None,
    ) -> None:
        """Record the kernel that adds up the results of splits. Release these.

        Args:
            parts, rows: see `partial`.
            given: the kernel's arguments between the parts and the end.
            after: further buffers that it reads.
        """
        recorder = self.recorder
        recorder.add(
            source,
            ((rows or recorder.max_rows) * self.shape.heads, 1, 1),
            paged.LANES,
            arguments=[
                recorder.rows,
                *(each.address for each in parts),
                *given,
                *self.ending,
            ],
            reads=[*parts, *after],
            writes=[self.layer.result],
        )
        for each in parts:
            recorder.release(each)
