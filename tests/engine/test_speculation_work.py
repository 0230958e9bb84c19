"""Speculation adds little to the host's part of steps, and next to nothing where no draft is worth
its rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.core.speculation import Speculation
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.scheduler.draft_lengths import Candidate, WorthwhileDrafts

_SEEDS = count()
"""No two requests have equal parameters, which would be compared at each step."""
_TOKENS, _FROM = 128, 16
"""Tokens of each answer, and the first step whose calls are counted, once all have begun."""


class _Never(WorthwhileDrafts):
    """Finds no draft worth its rows, and asking dear."""

    def choose(self, candidates: Sequence[Candidate], *args: Any, **named: Any) -> list[int]:
        super().choose(candidates, *args, **named)
        return [0] * len(candidates)

    def steps_to_skip(self, asking_s: float, step_s: float) -> int:
        return 64


class _Three(_Never):
    """Drafts three tokens in each step; other drafters than the head are asked in vain."""

    def choose(self, candidates: Sequence[Candidate], *args: Any, **named: Any) -> list[int]:
        super().choose(candidates, *args, **named)
        return [min(3, each.most) for each in candidates]


def _calls(
    engine: Engine, streams: int, mode: Speculation, temperature: float = 3.0
) -> tuple[float, float]:
    """Return the calls of Python's functions in a step, and of C's, on average."""
    for number in range(streams):
        prompt = tuple(range(10 + number, 40 + number))
        sampling = SamplingParams(temperature=temperature, seed=next(_SEEDS))
        engine.add(
            Request(f"{mode} {number}", prompt, sampling, max_tokens=_TOKENS, speculation=mode)
        )
    begun: set[str] = set()
    steps = counted = 0
    calls = Counter[str]()
    ended = False

    def note(frame: object, event: str, argument: object) -> None:
        calls[event] += 1

    while engine.has_work:
        steps += len(begun) == streams
        counts = steps >= _FROM and not ended
        counted += counts
        sys.setprofile(note if counts else None)
        outputs = engine.step()
        sys.setprofile(None)
        engine.flush()
        begun |= {each.request_id for each in outputs if each.token_ids}
        ended = ended or any(each.finish is not None for each in outputs)
    assert counted > 12
    return calls["call"] / counted, calls["c_call"] / counted


@pytest.mark.parametrize("streams", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_drafters_that_have_nothing_add_a_few_calls(
    streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.engine.WorthwhileDrafts", _Never)
    config = EngineConfig(str(MODEL_DIR), max_sequences=streams, prefix_cache=False, threads=1)
    engine = open_engine(config)
    off, off_c = _calls(engine, streams, "off")
    auto, auto_c = _calls(engine, streams, "auto")
    engine.close()
    assert 400 < off < auto < off + 8
    assert off_c < auto_c < 1.03 * off_c  # most are of the index of each answer's n-grams


def test_a_step_that_follows_drafts_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stream these calls take as long as half of the embedded model's layers."""
    monkeypatch.setattr("quire.engine.engine.WorthwhileDrafts", _Three)
    engine = open_engine(EngineConfig(str(MODEL_DIR), prefix_cache=False, threads=1))
    off, _ = _calls(engine, 1, "off", temperature=0)
    drafting, _ = _calls(engine, 1, "mtp", temperature=0)
    engine.close()
    assert 250 < off < 350
    assert 450 < drafting < 640
