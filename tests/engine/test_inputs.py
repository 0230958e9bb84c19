"""From planned work to the rows of a step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.cache.block_manager import Block, PoolKey
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, LayerSpec, RecurrentState, SharedKV, group_layers
from quire.core.kv_format import KVFormat
from quire.engine.inputs import Layout, StepInputs
from quire.scheduler.plan import StepPlan, Work
from tests.engine.rows import SIZE, planned

PLAIN, SEALED = KVFormat(), KVFormat("page", 4, 4)
SPECS: tuple[LayerSpec, ...] = (
    RecurrentState((("s", (2,), ""),)),
    FullKV(1, 8),
    SharedKV(1),
)


def inputs_of(
    work: list[Work],
    drawn: dict[str, int] | None = None,
    previous: mx.array | None = None,
    saves: list[tuple[Block, Block]] | None = None,
) -> StepInputs:
    groups = group_layers(SPECS)
    pools = Pools(groups, SIZE, mx.float32)
    plan = StepPlan(list(work), saves=saves or [])
    return StepInputs(plan, Layout.of(SPECS, groups), pools, 0, drawn or {}, previous)


def names(inputs: StepInputs) -> list[str]:
    return [work.seq.id for work in inputs.work]


def single(name: str, position: int, format: KVFormat = PLAIN, known: int | None = None) -> Work:
    return planned(name, position, 1, [[0], list(range(position // SIZE + 1))], format, known=known)


def chunk(name: str, start: int, count: int, *, slot: int = 0, sample: bool = True) -> Work:
    pages = list(range((start + count - 1) // SIZE + 1))
    return planned(name, start, count, [[slot], pages], PLAIN, sample=sample)


def test_single_tokens_come_before_chunks_and_formats_stay_together() -> None:
    work = [chunk("a", 0, 5), single("b", 3), single("c", 4, SEALED), single("d", 9)]
    order = names(inputs_of(work))
    assert order in (["b", "d", "a", "c"], ["c", "b", "d", "a"])


def test_positions_and_the_rows_whose_logits_are_wanted() -> None:
    inputs = inputs_of([chunk("a", 2, 3, sample=False), chunk("b", 0, 4), single("c", 7)])
    assert names(inputs) == ["c", "a", "b"]
    assert inputs.positions.tolist() == [7, 2, 3, 4, 0, 1, 2, 3]
    assert inputs.wanted is not None
    assert inputs.wanted.tolist() == [0, 7]
    assert [work.seq.id for work in inputs.sampled] == ["c", "b"]


def test_where_every_row_is_sampled_no_rows_are_picked() -> None:
    inputs = inputs_of([single("a", 3), single("b", 5)])
    assert inputs.wanted is None
    assert inputs.positions.tolist() == [3, 5]


def test_tokens_that_the_host_has_not_read_come_from_the_step_before() -> None:
    previous = mx.array([70, 71, 72], dtype=mx.int32)
    drawn = {"a": 0, "b": 1, "c": 2}
    unread = [single("a", 3, known=3), single("c", 5, known=5)]
    assert inputs_of(unread, drawn, previous).tokens.tolist() == [70, 72]
    mixed = [unread[0], single("d", 2), unread[1], chunk("e", 0, 2)]
    inputs = inputs_of(mixed, drawn, previous)
    own = {work.seq.id: work.seq.tokens for work in mixed}
    assert inputs.tokens.tolist() == [70, own["d"][2], 72, *own["e"]]


def test_the_same_rows_again_take_the_tokens_as_they_are() -> None:
    previous = mx.array([70, 71], dtype=mx.int32)
    work = [single("a", 3, known=3), single("b", 5, known=5)]
    assert inputs_of(work, {"a": 0, "b": 1}, previous).tokens is previous


def test_layers_that_share_read_from_their_owner() -> None:
    layout = Layout.of(SPECS, group_layers(SPECS))
    assert layout.group == (0, 1, 1)
    assert layout.owner == (0, 1, 1)


def test_recurrent_rows_are_in_one_segment_each() -> None:
    saved = chunk("c", 4, 3, slot=2)
    state = saved.seq.tables[0][0]
    assert state is not None
    target = Block(PoolKey(0, PLAIN), 9)
    work = [single("a", 3), chunk("b", 0, 2, slot=1), saved, single("d", 6, SEALED)]
    inputs = inputs_of(work, saves=[(state, target)])
    segments = inputs.recurrent(0)
    rows = np.sort(np.concatenate([np.array(segment.rows) for segment in segments]))
    assert rows.tolist() == list(range(7))
    assert sorted((s.n, s.t) for s in segments) == [(1, 1), (1, 1), (1, 2), (1, 3)]
    begins = {s.t: s.fresh.tolist() for s in inputs._segments[0] if s.t > 1}
    assert begins == {2: [True], 3: [False]}
    (kept,) = [s.saves for s in inputs._segments[0] if s.saves is not None]
    assert (kept[0].tolist(), kept[1].tolist()) == ([0], [9])


def test_single_tokens_of_one_format_advance_together() -> None:
    (segment,) = inputs_of([single("a", 3), single("b", 8), single("c", 1)]).recurrent(0)
    assert (segment.n, segment.t, segment.rows.tolist()) == (3, 1, [0, 1, 2])
