"""The host's part of a step grows little with its rows, and with a prompt that it reads."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor.eager import EagerExecutor
from tests.support.tiny_models import tiny_model

_BEGINNING = tuple(range(10, 23))
"""Tokens that all prompts share, as those of a chat template."""


def _calls(engine: Engine, streams: int, answers: int) -> tuple[float, float]:
    """Return the calls of Python's functions in a step that only generates, and in one that reads a
    prompt, too: on average, while so many streams go on with one new prompt after the other.
    """
    calls, counted = Counter[bool](), Counter[bool]()
    added = 0

    def add() -> None:
        nonlocal added
        ending = [(7 * added + place) % 97 + 30 for place in range(40)]
        added += 1
        engine.add(
            Request(
                f"{streams} {added}",
                (*_BEGINNING, *ending),
                SamplingParams(temperature=0),
                max_tokens=5 + 3 * streams,
            )
        )

    def count(frame: object, event: str, argument: object) -> None:
        calls[reads] += event == "call"

    for step in range(3 * streams):
        if step % 3 == 0:
            add()
        engine.step()
        engine.flush()
    while added < streams + answers:
        reads = engine.stats().waiting > 0
        counted[reads] += 1
        sys.setprofile(count)
        outputs = engine.step()
        sys.setprofile(None)
        engine.flush()
        for output in outputs:
            if output.finish is not None:
                add()
    while engine.has_work:
        engine.step()
        engine.flush()
    return calls[False] / counted[False], calls[True] / counted[True]


def test_a_row_and_a_prompt_call_few_functions(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    engine = open_engine(EngineConfig(str(folder), threads=1, speculate="off"))
    for streams in (8, 24):  # steps of each size are checked when they first come
        _calls(engine, streams, answers=24)
    few, few_reading = _calls(engine, 8, answers=24)
    many, many_reading = _calls(engine, 24, answers=24)
    engine.close()
    assert 20 < (many - few) / 16 < 34
    assert 120 < few_reading - few < 220
    assert 120 < many_reading - many < 220


def test_every_step_that_only_generates_knows_its_expected_time_in_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, step_s = EagerExecutor.collect, 0.25  # also of the steps that a start measures
    monkeypatch.setattr(
        EagerExecutor, "collect", lambda executor: replace(collect(executor), seconds=step_s)
    )
    engine = open_engine(EngineConfig(str(tiny_model(tmp_path, "llama")), threads=1))
    for number in range(8):
        prompt = tuple(range(10 + number, 30 + number))
        engine.add(Request(f"{number}", prompt, SamplingParams(temperature=0), max_tokens=40))
    for _ in range(20):
        engine.step()
    step_s = 9.0  # an outlier
    engine.step()
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    expected_s = engine.expected_step_s
    sys.setprofile(None)
    engine.add(Request("long", tuple(range(10, 90)), SamplingParams(temperature=0), max_tokens=1))
    engine.step()
    beside_prompt_s = engine.expected_step_s
    engine.close()
    assert expected_s == 0.25
    assert calls["call"] <= 7
    assert 0.25 < beside_prompt_s < 0.5  # by the tables, in which no outlier counts
