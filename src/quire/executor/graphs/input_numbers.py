"""Writes the inputs of a step as integers, in the layout that graphs read them from."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import packed
from quire.attention.paged.tiles import cut
from quire.attention.paged.tiling import Tiling
from quire.attention.rows import RowLists
from quire.cache.specs import KVLayout
from quire.core.arrays import Ints
from quire.executor.following import Following
from quire.executor.graphs.attention.prompt_rows import PromptRows, write_prompts
from quire.executor.graphs.few_rows import FewRows, serves_few
from quire.executor.graphs.layout import InputLayout, group_of, states_of, step_type
from quire.executor.graphs.records import StepRecord
from quire.executor.graphs.states import write_states
from quire.scheduler.plan import ScheduledSequence
from quire.scheduler.positions import alike, joined_positions


def step_numbers(
    rows: Sequence[ScheduledSequence],
    layout: KVLayout,
    memory: InputLayout,
    block_size: int,
    *,
    max_rows: int,
    media: bool = False,
    tokens: Sequence[int] | None = None,
    wanted: Sequence[int] | None = None,
    following: Following | None = None,
) -> Ints | None:
    """Return a step's inputs except its media, in the layout of `InputLayout`.

    None if the tables are too long, if prompts' blocks do not fit a workspace or its readers' tiles
    the graph, if positions differ between axes or are fractions, or if a state has too many slots.

    Args:
        max_rows: rows of the graph, at most those of `memory`.
        media: whether rows of media replace embeddings; without it they are attended to.
        tokens: the rows' tokens; None if some are on the device: the inputs start behind tokens.
        wanted: the rows whose results are wanted, in graphs of many rows; None for all.
        following: how rows depend on the running step; see `RowPlacing`, which chooses them.
    """
    if following is not None or (not (memory.tilings or memory.axes) and serves_few(rows)):
        given = rows, layout, memory
        return _few_numbers(*given, block_size=block_size, tokens=tokens, following=following)
    lists = RowLists(rows)
    found = {
        number: build_metadata(
            number, group.spec.attention, rows, block_size=block_size, lists=lists
        )
        for number, group in enumerate(layout.groups)
        if group.spec.attention is not None
    }
    coded = bool(memory.workspace) and rows[0].format.scheme != "plain"
    prompts = {number: PromptRows.of(each) if coded else None for number, each in found.items()}
    tables = [each.block_table for each in found.values()]
    tables += [each.table for each in prompts.values() if each is not None]
    entries = sum(map(len, tables))
    if entries > memory.entries:
        return None
    step, numbers = _empty_step(memory, layout, tokens, entries=entries)
    step["rows"][0, 0] = count = sum(each.count for each in rows)
    if memory.tilings:
        _write_wanted(step, range(count) if wanted is None else wanted)
    if media:
        _write_placed(step, rows)
    if not write_positions(step, rows):
        return None
    if not _write_states(step, layout, rows):
        return None
    if not _write_groups(step, memory, found, prompts=prompts, max_rows=max_rows):
        return None
    if tables:
        np.concatenate(tables, out=numbers[len(numbers) - entries :])
    return numbers


def _empty_step(
    memory: InputLayout, layout: KVLayout, tokens: Sequence[int] | None, entries: int
) -> tuple[StepRecord, Ints]:
    """Return the record of a step's inputs, to be filled, and its memory, which has the tokens, if
    they are given, before it, and room for block table entries behind it.
    """
    inputs = step_type(memory.max_rows, len(layout.groups), memory.axes)
    start = 0 if tokens is None else memory.max_rows
    numbers = np.zeros(start + inputs.itemsize // 4 + entries, np.int32)
    if tokens is not None:
        numbers[: len(tokens)] = tokens
    return np.ndarray(1, inputs, numbers, offset=4 * start), numbers


def _write_groups(
    step: StepRecord,
    memory: InputLayout,
    found: Mapping[int, AttentionMetadata],
    prompts: Mapping[int, PromptRows | None],
    max_rows: int,
) -> bool:
    """Write the inputs of KV groups, by their numbers; see `write_prompts`."""
    entries, behind = 0, sum(len(each.block_table) for each in found.values())
    for number, metadata in found.items():
        own, group = prompts[number], group_of(step, number)
        tiling = memory.tilings[number] if memory.tilings else None
        write_group(group, metadata, entries, tiling=tiling, prompts=own, max_rows=max_rows)
        entries += len(metadata.block_table)
        if own is None:
            continue
        assert tiling is not None, "rows read a workspace in steps of many rows"
        room = memory.workspace[number]
        if not write_prompts(group, own, behind, room=room, tiling=tiling, max_rows=max_rows):
            return False
        behind += len(own.table)
    return True


def _few_numbers(
    rows: Sequence[ScheduledSequence],
    layout: KVLayout,
    memory: InputLayout,
    block_size: int,
    tokens: Sequence[int] | None,
    following: Following | None,
) -> Ints | None:
    """Return what `step_numbers` returns, for few rows over plain blocks."""
    start, index = memory.index(memory.numbers), memory.index
    numbers = array("i", bytes(4 * index(memory.table)))
    most_behind = 0 if following is None else following.behind
    few = FewRows(numbers, rows, block_size, behind=most_behind)
    few.write(index(memory.tokens), tokens or ())
    few.write(index(memory.rows), [sum(each.count for each in rows)])
    few.write(index(memory.positions), chain.from_iterable(map(_whole, rows)))
    for number, group in enumerate(layout.groups):
        if (spec := group.spec.attention) is not None:
            at = memory.group(number)
            places = map(index, (at.blocks, at.offsets, at.visible, at.tiles))
            few.write_group(number, spec, *places)
    behind = array("i")
    if following is not None:
        few.write(index(memory.behind), [len(numbers) + len(few.table)])
        described = following.described()
        behind = described.rows + described.texts
    if len(few.table) + len(behind) > memory.entries:
        return None
    numbers += few.table + behind
    inputs = step_type(memory.max_rows, len(layout.groups))
    step: StepRecord = np.ndarray(1, inputs, numbers, offset=4 * start)
    if not _write_states(step, layout, rows):
        return None
    whole = np.frombuffer(numbers, np.int32)
    return whole[start:] if tokens is None else whole


def _write_states(step: StepRecord, layout: KVLayout, rows: Sequence[ScheduledSequence]) -> bool:
    """Write the inputs of all groups of states; see `write_states`."""
    return all(
        write_states(states_of(step, number), number, rows)
        for number, group in enumerate(layout.groups)
        if group.spec.recurrent is not None
    )


def _whole(rows: ScheduledSequence) -> range:
    """Return the positions of rows of text."""
    assert isinstance(rows.positions, range), "axes of positions agree"
    return rows.positions


def _write_wanted(step: StepRecord, wanted: Sequence[int]) -> None:
    """Write which rows' results are wanted into a step's inputs."""
    step["rows"][0, 1] = len(wanted)
    step["wanted"][0, : len(wanted)] = wanted


def _write_placed(step: StepRecord, rows: Sequence[ScheduledSequence]) -> None:
    """Write which rows are media into a step's inputs."""
    first = 0
    for each in rows:
        for placed in each.media:
            begin, end = max(placed.start, each.start), min(placed.end, each.end)
            step["placed"][0, first + begin - each.start : first + end - each.start] = True
        first += each.count


def write_positions(step: StepRecord, rows: Sequence[ScheduledSequence]) -> bool:
    """Write each row's position into a step's inputs.

    Returns:
        False if there is one axis, and a row's position differs between axes, or is no whole
        number.
    """
    if step["positions"].ndim > 2:
        joined = joined_positions([each.positions for each in rows])
        step["positions"][0, : joined.shape[-1]] = joined.T.reshape(joined.shape[-1], -1)
        return True
    if all(isinstance(each.positions, range) for each in rows):
        whole = np.fromiter(chain.from_iterable(each.positions for each in rows), np.int32)
        step["positions"][0, : len(whole)] = whole
        return True
    found = [positions for each in rows if (positions := alike(each.positions)) is not None]
    if len(found) < len(rows):
        return False
    positions = np.concatenate(found)
    whole = positions.astype(np.int32)
    step["positions"][0, : len(positions)] = whole
    return bool((whole == positions).all())


def write_group(
    group: StepRecord,
    metadata: AttentionMetadata,
    entries: int,
    tiling: Tiling | None = None,
    prompts: PromptRows | None = None,
    max_rows: int = 0,
) -> None:
    """Write a KV group's inputs; `write_prompts` adds rows that read a workspace.

    Args:
        group: one record, by the fields of `GroupInputs`.
        entries: number of block table entries before this group's.
        tiling: see `InputLayout`; None if each row is a tile.
        prompts: the rows that read a workspace.
        max_rows: rows of the graph; for a tiling.
    """
    count, slots = metadata.rows, metadata.slots
    few = slice(count if prompts is None else prompts.first)  # rows that read codes
    group["blocks"][0, :count] = slots.blocks
    group["offsets"][0, :count] = slots.offsets
    first, last = metadata.first_visible, metadata.last_visible
    visible = group["visible"][0]
    visible[:count, 0], visible[:count, 1] = first, last
    if metadata.tails is not None:
        group["tails"][0, :count] = metadata.by_row(metadata.tails)
        coded, own = packed.tiles_of(metadata)
        coded[:, 4] += entries
        group["coded"][0, few], group["own"][0, few] = coded[few], own[few]
    tiles = group["tiles"][0, :count]
    tiles[:, 0] = np.arange(count)
    tiles[:, 1] = 1
    tiles[:, 2], tiles[:, 3] = first, last + 1
    places = metadata.table_starts[:-1] - metadata.first_blocks + entries
    fresh = metadata.keys[metadata.query_starts[:-1]]
    tiles[:, 4], tiles[:, 5] = metadata.by_row(places), metadata.by_row(fresh)
    if tiling is None:
        return
    if metadata.tails is None:
        group["coded"][0, few] = tiles[few]
    single, wide, starts = 0, list[Ints](), metadata.query_starts
    keys = last[starts[1:] - 1] + 1 - first[starts[:-1]]
    few_rows = tiling.few_rows(metadata.counts, keys, max_rows)
    for part in cut(metadata, few_rows, 1, rows_many=tiling.rows):
        if part.few:
            end = single + part.rows.stop - part.rows.start
            tiles[single:end] = tiles[part.rows].copy()
            single = end
            continue
        wide.append(part.tiles + np.array([part.rows.start, 0, 0, 0, entries, 0], np.int32))
    tiles[single:] = 0
    if wide:
        found = tiling.shared(np.concatenate(wide))
        group["wide"][0, : len(found)] = found
