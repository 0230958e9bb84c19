"""Plans written by hand become the inputs of a step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.attention.registry import open_backends
from quire.attention.step import Attention
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVLayout, LayerSpec, RecurrentState, SharedKV
from quire.cache.states import StateSlots
from quire.core.kv_format import KVFormat
from quire.executor.inputs import StepInputs
from quire.scheduler.plan import Positions, ScheduledSequence, StepPlan
from tests.engine.rows import SIZE, scheduled

PLAIN, SEALED = KVFormat(), KVFormat("page", 4, 4)
SPECS: tuple[LayerSpec, ...] = (
    RecurrentState((("s", (2,), ""),)),
    FullKV(1, 8),
    SharedKV(1),
)


def inputs_of(
    rows: list[ScheduledSequence],
    drawn: dict[str, int] | None = None,
    previous: mx.array | None = None,
) -> StepInputs:
    layout = KVLayout.of(SPECS)
    attention = Attention(layout, Pools(layout.groups, SIZE, mx.float32), open_backends())
    places = {ord(name): place for name, place in (drawn or {}).items()}
    return StepInputs(StepPlan(tuple(rows)), attention, places, previous)


def names(inputs: StepInputs) -> list[str]:
    return [rows.id for rows in inputs.sequences]


def single(
    name: str, position: int, format: KVFormat = PLAIN, *, unread: bool = False
) -> ScheduledSequence:
    tables = [[0], list(range(position // SIZE + 1))]
    return scheduled(name, position, 1, tables, format, unread=unread)


def chunk(
    name: str,
    start: int,
    count: int,
    *,
    slot: int = 0,
    sampled: int = 1,
    positions: Positions | None = None,
    snapshots: tuple[tuple[int, int], ...] = (),
    drafted_states: tuple[tuple[int, int], ...] = (),
) -> ScheduledSequence:
    tables = [[slot], list(range((start + count - 1) // SIZE + 1))]
    return scheduled(
        name,
        start,
        count,
        tables,
        PLAIN,
        sampled=sampled,
        positions=positions,
        snapshots=snapshots,
        drafted_states=drafted_states,
    )


def test_single_tokens_come_before_chunks_and_formats_stay_together() -> None:
    rows = [chunk("a", 0, 5), single("b", 3), single("c", 4, SEALED), single("d", 9)]
    order = names(inputs_of(rows))
    assert order in (["b", "d", "a", "c"], ["c", "b", "d", "a"])


def test_positions_and_the_rows_whose_logits_are_wanted() -> None:
    inputs = inputs_of([chunk("a", 2, 3, sampled=0), chunk("b", 0, 4), single("c", 7)])
    assert names(inputs) == ["c", "a", "b"]
    assert inputs.positions.tolist() == [7, 2, 3, 4, 0, 1, 2, 3]
    assert inputs.wanted is not None
    assert inputs.wanted.tolist() == [0, 7]
    assert [rows.id for rows in inputs.ending] == ["c", "b"]


def test_where_every_row_is_sampled_no_rows_are_picked() -> None:
    inputs = inputs_of([single("a", 3), single("b", 5)])
    assert inputs.wanted is None
    assert inputs.positions.tolist() == [3, 5]


def test_tokens_that_the_host_has_not_read_come_from_the_step_before() -> None:
    previous = mx.array([70, 71, 72], dtype=mx.int32)
    drawn = {"a": 0, "b": 1, "c": 2}
    unread = [single("a", 3, unread=True), single("c", 5, unread=True)]
    assert inputs_of(unread, drawn, previous).tokens.tolist() == [70, 72]
    mixed = [unread[0], single("d", 2), unread[1], chunk("e", 0, 2)]
    inputs = inputs_of(mixed, drawn, previous)
    own = {rows.id: rows.tokens for rows in mixed}
    assert inputs.tokens.tolist() == [70, *own["d"], 72, *own["e"]]


def test_the_same_rows_again_take_the_tokens_as_they_are() -> None:
    previous = mx.array([70, 71], dtype=mx.int32)
    rows = [single("a", 3, unread=True), single("b", 5, unread=True)]
    assert inputs_of(rows, {"a": 0, "b": 1}, previous).tokens is previous


def test_layers_that_share_read_from_their_owner() -> None:
    layout = KVLayout.of(SPECS)
    assert layout.group == (0, 1, 1)
    assert layout.owner == (0, 1, 1)


def recurrent_of(sequences: list[ScheduledSequence]) -> tuple[list[list[int]], list[StateSlots]]:
    """Return the row numbers and the states of each segment, by the order of a step's rows."""
    own = inputs_of(sequences).recurrent
    states = own._states(0)
    assert all(isinstance(each, StateSlots) for each in states)
    return [rows.tolist() for rows in own._rows], list(states)  # type: ignore[arg-type]


def test_recurrent_rows_are_in_one_segment_each() -> None:
    saved = chunk("c", 4, 3, slot=2, snapshots=((0, 9),))
    rows, states = recurrent_of(
        [single("a", 3), chunk("b", 0, 2, slot=1), saved, single("d", 6, SEALED)]
    )
    assert sorted(number for own in rows for number in own) == list(range(7))
    assert sorted(map(len, rows)) == [1, 1, 2, 3]
    starts = {len(own): each.fresh.tolist() for own, each in zip(rows, states, strict=True)}
    assert (starts[2], starts[3]) == ([True], [False])
    (kept,) = [each.targets for each in states if each.targets is not None]
    assert (kept[0].tolist(), kept[1].tolist()) == ([0, 0], [2, 9])


def test_rows_with_drafts_leave_the_sequence_s_own_state_alone() -> None:
    _, (own,) = recurrent_of([chunk("a", 4, 3, slot=2, sampled=3, drafted_states=((0, 7),))])
    assert own.slots.tolist() == [2]
    assert own.targets is not None
    assert [each.tolist() for each in own.targets] == [[0], [7]]


def test_every_row_behind_a_draft_is_wanted() -> None:
    inputs = inputs_of([chunk("a", 8, 4, sampled=3), single("b", 5), chunk("c", 0, 2, sampled=0)])
    assert names(inputs) == ["b", "a", "c"]
    assert inputs.wanted is not None
    assert inputs.wanted.tolist() == [0, 2, 3, 4]


def test_rows_take_their_positions_from_the_sequence() -> None:
    three = np.array([[5, 5, 5], [5, 6, 6], [5, 6.5, 7]], dtype=np.float32)
    inputs = inputs_of([chunk("a", 2, 3, positions=three), single("b", 9)])
    assert inputs.positions.tolist() == [[9, 5, 5, 5], [9, 5, 6, 6], [9, 5, 6.5, 7]]
    narrowed = inputs.sampled_rows_only()
    assert narrowed is not None
    step, rows = narrowed
    assert rows.tolist() == [0, 3]
    assert step.positions.tolist() == [[9, 5], [9, 6], [9, 7]]


def test_single_tokens_of_one_format_advance_together() -> None:
    rows, _ = recurrent_of([single("a", 3), single("b", 8), single("c", 1)])
    assert rows == [[0, 1, 2]]


def test_arrays_of_tokens_and_positions_are_made_for_steps_that_read_them() -> None:
    """Graphs read both from the step's inputs."""
    known = inputs_of([single("a", 3), chunk("b", 4, 2)])
    assert known.known_tokens is not None
    assert not {"tokens", "positions"} & vars(known).keys()
    assert np.array(known.tokens).tolist() == list(known.known_tokens)
    unread = inputs_of([single("a", 3, unread=True), chunk("b", 4, 2)], {"a": 0}, mx.array([7]))
    assert unread.known_tokens is None
    assert np.array(unread.tokens).tolist()[0] == 7
