"""Inputs of few rows are those that arrays give, and are made without them."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from quire.cache.specs import ChunkedKV, FullKV, KVLayout, LayerSpec, RecurrentState, WindowKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs import input_numbers
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.layout import InputLayout
from quire.scheduler.plan import BlockIds, KVPlacement, ScheduledSequence

SIZE, LONGEST = 16, 300
SPECS: dict[str, tuple[LayerSpec, ...]] = {
    "one group": (FullKV(1, 64),),
    "windows": (WindowKV(1, 64, 50), FullKV(2, 64)),
    "chunks and states": (ChunkedKV(1, 64, 40), RecurrentState((("s", (2,), ""),))),
}


def rows(numbers: random.Random, groups: int) -> list[ScheduledSequence]:
    """Return up to 8 sequences of up to 4 rows, anywhere in their block tables."""
    found = []
    for number in range(numbers.randrange(1, 9)):
        start, count = numbers.randrange(LONGEST - 4), numbers.randrange(1, 5)
        blocks = -(-LONGEST // SIZE)
        tables = [array("i", numbers.sample(range(1, 500), blocks)) for _ in range(groups)]
        found.append(
            ScheduledSequence(
                id=str(number),
                number=number,
                format=KVFormat(),
                start=start,
                count=count,
                tokens=array("i", [numbers.randrange(99) for _ in range(count)]),
                positions=range(start, start + count),
                placement=KVPlacement(tuple(BlockIds(each, blocks) for each in tables)),
            )
        )
    return found


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_few_rows_have_the_inputs_that_arrays_give(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout.of(SPECS[name])
    memory = InputLayout(len(layout.groups), 64, 2000, lambda array: 1 << 40)
    numbers, calls = random.Random(0), list[int]()
    built = input_numbers.build_metadata
    monkeypatch.setattr(
        input_numbers, "build_metadata", lambda *a, **k: calls.append(1) or built(*a, **k)
    )
    for _ in range(20):
        own = rows(numbers, len(layout.groups))
        tokens = [token for each in own for token in each.tokens] if known else None
        few = step_numbers(own, layout, memory, SIZE, max_rows=64, tokens=tokens)
        assert not calls, "no metadata is built for few rows"
        with monkeypatch.context() as patch:
            patch.setattr(input_numbers, "serves_few", lambda rows: False)
            many = step_numbers(own, layout, memory, SIZE, max_rows=64, tokens=tokens)
        assert few is not None
        assert many is not None
        assert np.array_equal(few, many)
        if tokens is not None:
            assert few[: len(tokens)].tolist() == tokens
        calls.clear()


def test_block_tables_longer_than_the_buffer_are_refused() -> None:
    layout = KVLayout.of(SPECS["one group"])
    memory = InputLayout(1, 64, 1, lambda array: 1 << 40)
    (long,) = rows(random.Random(3), 1)[:1]
    assert step_numbers([long._replace(start=40)], layout, memory, SIZE, max_rows=64) is None
