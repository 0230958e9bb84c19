"""Commands that take minutes show their progress."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from quire.cli.kv_quality import Plan, evaluate
from quire.cli.load import Target, closed_loop
from quire.cli.loading import Bars, Lines
from quire.cli.progress import shown
from quire.core.kv_choice import parse_format
from quire.core.messages import Progress
from quire.demo import MODEL_DIR


def test_every_part_of_every_stage_is_reported() -> None:
    parts, done = Counter[str](), Counter[str]()

    def start(what: str, count: int) -> Callable[[], None]:
        parts[what] += count
        return lambda: done.update([what])

    plan = Plan(tokens=200, prompts=1, lengths=(80,))
    evaluate(str(MODEL_DIR), [parse_format("page-4")], plan, start)
    assert list(parts) == ["reading texts", "continuing prompts", "finding needles in 80 tokens"]
    assert done == parts


def test_lines_where_there_is_no_terminal() -> None:
    out = StringIO()
    with shown(Console(file=out, force_terminal=False)) as start:
        start("reading texts", 3)()
    assert out.getvalue() == "reading texts: 3\n"


def test_bars_in_a_terminal() -> None:
    out = StringIO()
    with shown(Console(file=out, force_terminal=True, width=100)) as start:
        done = start("reading texts", 2)
        done()
        done()
    assert "2/2" in out.getvalue()


def test_a_terminal_sees_speed_and_time_left() -> None:
    out = StringIO()
    with shown(Console(file=out, force_terminal=True, width=100)) as start:
        done = start("reading texts", 100)
        for _ in range(10):
            done()
    last = out.getvalue()[out.getvalue().rindex("reading texts") :]
    assert "10/100" in last
    assert re.search(r"\d/(s|min)", last)
    assert re.search(r"\d s left", last)


def test_the_bench_reports_every_answer() -> None:
    done = Counter[str]()
    bodies = [b"{}"] * 3

    async def run() -> None:
        target = Target.parse("http://127.0.0.1:9")
        await closed_loop(target, "/x", bodies, 2, 5.0, lambda _: done.update(["answer"]))

    asyncio.run(run())
    assert done["answer"] == 3


WEIGHTS = [Progress("weights", done, 8_000_000_000) for done in (0, 2_000_000_000, 8_000_000_000)]


def test_a_model_that_loads_has_a_bar_until_it_is_loaded() -> None:
    out = StringIO()
    bars = Bars(Console(file=out, force_terminal=True, width=100))
    for progress in (*WEIGHTS, Progress("warm-up", 3, 9), None):
        bars("org/model", progress)
    bars("org/other", None)
    assert "loading org/model: 25% of 8.0 GB of weights" in out.getvalue()
    assert "100%" not in out.getvalue()
    assert "loading org/model: warm-up, 3 of 9" in out.getvalue()
    shown = len(out.getvalue())
    bars("org/other", WEIGHTS[1])
    assert "loading org/other: 25% of 8.0 GB of weights" in out.getvalue()[shown:]
    bars("org/other", None)


def test_a_log_has_a_line_for_what_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 9.0, 10.0, 12.0))
    lines = Lines(lambda: next(times))
    with caplog.at_level("INFO", logger="quire.loading"):
        for progress in (*WEIGHTS, Progress("warm-up", 3, 9), None):
            lines("org/model", progress)
    assert caplog.messages == ["loading org/model: 100% of 8.0 GB of weights"]
