"""The comparison with other systems on a GPU: its loads, and how pieces of its table are merged."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

from loads import LOADS, PICTURE_ROWS, Answered, Asked, Options
from systems import picture
from versus import merged

from quire.media.processors.gemma4 import Cutter


class Scripted:
    """A system that gives each request one token a step; tokens are the numbers of steps."""

    caches_prefixes = sees = True

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.asked: list[Asked] = []
        self._left: dict[str, int] = {}
        self._steps = 0

    def prepare(self, asked: Asked) -> Asked:
        return asked

    def add(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._left[asked.name] = asked.max_tokens

    def step(self) -> list[Answered]:
        self._steps += 1
        found = []
        for name in list(self._left):
            self._left[name] -= 1
            found.append(Answered(name, [self._steps], not self._left[name]))
            if not self._left[name]:
                del self._left[name]
        return found


def test_bursts_ask_all_at_once() -> None:
    system = Scripted()
    rows = list(LOADS["bursts"](system, Options(streams=(1, 3), tokens=5, rounds=2)))
    assert [(row["streams"], row["steps"]) for row in rows] == [(1, 5), (3, 5)] * 2
    assert len({asked.prompt for asked in system.asked}) == 8
    assert all(row["tokens_s"] > 0 for row in rows)
    assert {row["last_tokens"] for row in rows} == {1}  # every stream has the step's number


def test_agents_share_a_prompt_and_read_their_answers_again() -> None:
    system = Scripted()
    (row,) = LOADS["agents"](system, Options(rounds=1, short=100))
    assert len(system.asked) == row["sessions"] * row["turns"] == 160
    by_session = [each for each in system.asked if each.name.split()[1] == "3"]
    for before, after in pairwise(by_session):
        known = len(before.prompt)
        assert after.prompt[:known] == before.prompt
        assert len(after.prompt) == known + before.max_tokens + 6
    assert len({asked.prompt[:80] for asked in system.asked}) == 1


def test_pictures_stand_beside_text_as_long() -> None:
    system = Scripted()
    rows = list(LOADS["pictures"](system, Options(pictures=(2,), rounds=1)))
    assert [row["pictures"] for row in rows] == [True, False]
    seen, text = system.asked[0], system.asked[-1]
    item = Cutter(patch=16, pooling=3, max_soft_tokens=280).item("image", picture(1), "", "auto")
    assert item.tokens == PICTURE_ROWS
    assert len(text.prompt) == len(seen.prompt) + item.tokens + 2


@pytest.mark.parametrize("failed", [True, False])
def test_a_piece_replaces_its_own_rows(failed: bool) -> None:
    def row(system: str, **own: Any) -> dict[str, Any]:
        return {"system": system, "shape": "s", "weights": "w", "load": "bursts", **own}

    old = [row("quire", seconds=2), row("vllm", seconds=3)]
    new = [row("quire", error="stopped") if failed else row("quire", seconds=1)]
    expected = old if failed else [old[1], *new]
    assert merged(old, new) == expected
    assert merged([row("quire", error="stopped")], [row("quire", seconds=1)]) == [
        row("quire", seconds=1)
    ]
