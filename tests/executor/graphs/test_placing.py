"""Rows that a kernel places behind right drafts have the inputs of rows that the host places."""

from __future__ import annotations

import ctypes
import random
from array import array
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.specs import ChunkedKV, FullKV, KVLayout, LayerSpec, RecurrentState, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.host_copy import HostCopy
from quire.executor.following import Following, Kept, resolved
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.layout import InputLayout, group_of, step_type
from quire.executor.graphs.placing import RowPlacing, places_rows
from quire.scheduler.plan import BlockIds, KVPlacement, ScheduledSequence, StepPlan
from tests.support.emulated_card import EmulatedCompiler
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import launch, memory_of
from tests.support.nvrtc import assert_compiles

SIZE, LONGEST, MOST, STREAMS = 16, 300, 64, 16
LAYOUTS: dict[str, tuple[LayerSpec, ...]] = {
    "one group": (FullKV(1, 64),),
    "windows": (WindowKV(1, 64, 50), FullKV(2, 64)),
}


def pointer(array: mx.array) -> int:
    return int(memory_of(array).ctypes.data)


def placing_of(layout: KVLayout) -> tuple[RowPlacing, InputLayout]:
    inputs = InputLayout(len(layout.groups), MOST, 4000, pointer)
    compiler = EmulatedCompiler()
    return RowPlacing(layout.groups, inputs, SIZE, pointer, compiler), inputs  # type: ignore[arg-type]


class Step:
    """A step of which some rows follow drafts of the one before, drawn at random."""

    def __init__(self, dice: random.Random, groups: int) -> None:
        self.sampled, self.lasts = array("i"), list[int]()
        self.sequences = [self._drawn(dice, number, groups) for number in range(STREAMS)]
        self.guesses = mx.array([[1000 + 10 * n + k for k in range(3)] for n in range(STREAMS)])
        self.before = Kept(
            HostCopy(mx.array(list(self.sampled), mx.int32)),
            HostCopy(self.guesses.astype(mx.int32)),
            rows=None,
            lasts=self.lasts,
            places={number: number for number in range(STREAMS)},
        )

    def _drawn(self, dice: random.Random, number: int, groups: int) -> ScheduledSequence:
        behind, further = dice.randrange(4), dice.randrange(4)
        drafts = [dice.randrange(3) for _ in range(behind)]
        self.sampled.extend([dice.randrange(3) for _ in range(behind + 1)])
        self.lasts.append(len(self.sampled) - 1)
        start = dice.randrange(behind, LONGEST - 8)
        known = array("i", [7 + number]) if not behind and dice.random() < 0.3 else array("i")
        run = tuple(dice.randrange(50, 99) for _ in range(behind + further + 2))
        count = 1 if known else 1 + further
        blocks = -(-LONGEST // SIZE)
        tables = [array("i", dice.sample(range(1, 500), blocks)) for _ in range(groups)]
        return ScheduledSequence(
            id=str(number),
            number=number,
            format=KVFormat(),
            start=start,
            count=count,
            tokens=known,
            positions=range(start, start + count),
            placement=KVPlacement(tuple(BlockIds(each, blocks) for each in tables)),
            verified=tuple(drafts),
            run=run if further and not known and dice.random() < 0.5 else (),
        )


def placed(step: Step, layout: KVLayout, placing: RowPlacing, inputs: InputLayout) -> np.ndarray:
    """Return the integers of a step's inputs once the kernel has run."""
    following = Following(step.sequences, step.before)
    numbers = step_numbers(step.sequences, layout, inputs, SIZE, max_rows=MOST, following=following)
    assert numbers is not None
    ctypes.memmove(inputs.numbers, numbers.tobytes(), numbers.nbytes)
    for at, given in placing.given(following).items():
        memory = memory_of(given)
        ctypes.memmove(at, memory.ctypes.data, memory.nbytes)
    launch(placing._kernel, 8)
    return memory_of(inputs._memory).copy()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_placed_as_by_the_host(name: str) -> None:
    layout = KVLayout.of(LAYOUTS[name])
    placing, inputs = placing_of(layout)
    dice, moved, many = random.Random(1), 0, 0
    for _ in range(20):
        step = Step(dice, len(layout.groups))
        found = placed(step, layout, placing, inputs)
        plan = resolved(StepPlan(tuple(step.sequences), follows=True), step.before)
        rows = list(plan.sequences)
        tokens = [token for each in rows for token in (*each.tokens, *_last(step, each))]
        wanted = step_numbers(rows, layout, inputs, SIZE, max_rows=MOST, tokens=tokens)
        assert wanted is not None
        count = len(tokens)
        assert found[:count].tolist() == tokens
        rejected, placed_tokens = memory_of(placing._found)[:, :count]
        assert placed_tokens.tolist() == tokens
        latest = [position for each in step.sequences for position in each.positions]
        own = [position for each in rows for position in each.positions]
        assert rejected.tolist() == [a - b for a, b in zip(latest, own, strict=True)]
        moved += int(rejected.any())
        many += count > 32
        ours, theirs = (_records(each, layout) for each in (found, wanted))
        assert np.array_equal(ours["positions"][0, :count], theirs["positions"][0, :count])
        for number in range(len(layout.groups)):
            _assert_alike(
                *(group_of(each, number) for each in (ours, theirs)),
                tables=[each[inputs.index(inputs.table) :] for each in (found, wanted)],
                count=count,
            )
    assert moved > 10
    assert many > 5, "arrays make the inputs of other steps of so many rows"


def _last(step: Step, each: ScheduledSequence) -> list[int]:
    """Return the token that the step before ended with, where the host had not read it."""
    return [] if each.tokens else [step.sampled[step.lasts[each.number]]]


def _records(numbers: np.ndarray, layout: KVLayout) -> np.ndarray:
    return np.ndarray(1, step_type(MOST, len(layout.groups)), numbers, offset=4 * MOST)


def _assert_alike(
    ours: np.ndarray, theirs: np.ndarray, tables: list[np.ndarray], count: int
) -> None:
    """Assert that rows of a group see and write the same; tables may begin at other blocks."""
    for field in ("blocks", "offsets", "visible"):
        assert np.array_equal(ours[field][0, :count], theirs[field][0, :count]), field
    tiles = [each["tiles"][0, :count] for each in (ours, theirs)]
    assert np.array_equal(*(np.delete(each, 4, axis=1) for each in tiles))
    for own, other in zip(*tiles, strict=True):
        seen = range(own[2] // SIZE, -(-own[3] // SIZE))
        assert [tables[0][own[4] + n] for n in seen] == [tables[1][other[4] + n] for n in seen]


def test_the_kernel_compiles(tmp_path: Path) -> None:
    placing, _ = placing_of(KVLayout.of(LAYOUTS["windows"]))
    assert_compiles(str(placing._kernel.source), tmp_path)


@pytest.mark.parametrize(
    "specs",
    [
        (ChunkedKV(1, 64, 40), FullKV(1, 64)),
        (FullKV(1, 64), RecurrentState((("s", (2,), ""),))),
    ],
)
def test_rows_of_chunks_and_states_are_not_placed(specs: tuple[LayerSpec, ...]) -> None:
    assert not places_rows(KVLayout.of(specs).groups)
