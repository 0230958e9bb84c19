"""Encoders run in pieces beside streams that go on; nothing is lost or leaks between two pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.media import MediaItem, Pieces, PlacedMedia
from quire.core.request import FinishReason, Request, SamplingParams
from quire.engine.engine import Engine
from quire.models.base import CutEncoder, Encoding
from quire.models.weights.loader import LoadedModel
from quire.scheduler.encoding_cost import EncodingCost
from quire.scheduler.plan import StepPlan
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.scheduler import Scheduler
from tests.support.opened import opener
from tests.support.parity import Company, Generated, executor_of, prompts

PIECES = 20
AT_ONCE = 2
"""Pieces that a step has time for."""


class _Slow(CutEncoder):
    """Adds a constant to the bytes of a picture in each of its pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def rows(self, shape: tuple[int, ...]) -> int:
        return shape[0]

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        return Pieces(PIECES, shape[0])

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        x = mx.sin(features.astype(mx.float32)[:, None] * (mx.arange(64) + 1))
        for number in range(PIECES):
            self.asked += 1
            x = x + 0.1
            if number < PIECES - 1:
                yield (x,)
        return (x,)


@dataclass
class Watched:
    """An engine whose encoder is slow, and the plans that it made."""

    company: Company
    encoder: _Slow
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.company.engine

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.company.step()
        raise AssertionError("it never came to that")

    def pieces(self) -> list[int]:
        """Return the pieces of each plan."""
        return [sum(each.count for each in plan.encoding) for plan in self.plans]

    def held(self) -> int:
        """Return the number of items of which the runner holds anything."""
        cache = executor_of(self.engine).media
        return len(cache._made) + len(cache._started)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opener(tmp_path_factory)("llama")


@pytest.fixture
def watched(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Watched]:
    """Makes engines in which a piece takes a second, and a step has time for two."""
    monkeypatch.setattr(EncodingCost, "seconds", lambda self, kind, rows: 1.0)
    monkeypatch.setattr(PrefillBudget, "seconds", lambda self, *args, **more: 2.0 * AT_ONCE)
    schedule = Scheduler.schedule

    def make() -> Watched:
        encoder = _Slow()
        monkeypatch.setattr(type(llama.model), "encoders", {"image": encoder})
        company = Company(llama, EngineConfig(model="", kv_memory=8 << 20, block_size=16))
        found = Watched(company, encoder)

        def watching(self: Scheduler) -> StepPlan | None:
            plan = schedule(self)
            if plan is not None and self is company.engine._scheduler:
                found.plans.append(plan)
            return plan

        monkeypatch.setattr(Scheduler, "schedule", watching)
        return found

    return make


def picture(seed: int = 1, rows: int = 20) -> MediaItem:
    return MediaItem.of("image", bytes([seed]) * rows, (rows,), rows, bidirectional=False)


def showing(name: str, item: MediaItem, before: int = 4, tokens: int = 4) -> Request:
    prompt = (*range(3, 3 + before), *(9 for _ in range(item.tokens)), 5, 6)
    sampling = SamplingParams(temperature=0)
    return Request(name, prompt, sampling, tokens, media=(PlacedMedia(before, item),))


def stream(tokens: int = 60) -> Request:
    return replace(prompts((5,), tokens)[0], id="stream")


def ended(company: Company, name: str) -> Callable[[], bool]:
    return lambda: bool(company.answers[name].ends)


def test_a_stream_goes_on_and_text_is_not_held_up(watched: Callable[[], Watched]) -> None:
    served = watched()
    company = served.company
    company.add(stream())
    served.step_until(lambda: len(company.answers["stream"].tokens) > 3)
    served.plans.clear()
    company.add(showing("seen", picture()))
    company.add(replace(prompts((12,), 3)[0], id="text"))
    served.step_until(ended(company, "text"))
    assert served.encoder.asked < PIECES
    served.step_until(ended(company, "seen"))
    pieces = [count for count in served.pieces() if count]
    assert sum(pieces) == PIECES
    assert max(pieces) <= 2 * AT_ONCE
    assert pieces[0] == AT_ONCE, "half of the time is left to prompts that can be read"
    rows = [[each.id for each in plan.sequences] for plan in served.plans if plan.encoding]
    assert all("stream" in ids for ids in rows)
    read = [each for plan in served.plans for each in plan.sequences if each.id == "seen"]
    assert (read[0].start, read[0].count) == (0, 4), "what stands before the picture is read"
    before = served.plans[: len(pieces) - 1]
    assert max(each.end for plan in before for each in plan.sequences if each.id == "seen") == 4


def test_equal_pictures_are_encoded_once_and_kept(watched: Callable[[], Watched]) -> None:
    served = watched()
    for name in ("a", "b"):
        served.company.add(showing(name, picture(), before=4 + (name == "b")))
    served.step_until(lambda: not served.engine.has_work)
    served.company.add(showing("c", picture(), before=2))
    served.step_until(lambda: not served.engine.has_work)
    assert served.encoder.asked == PIECES
    served.company.add(showing("d", picture(2)))
    served.step_until(lambda: not served.engine.has_work)
    assert served.encoder.asked == 2 * PIECES


def _between_pieces(served: Watched) -> None:
    served.company.add(showing("seen", picture()))
    served.step_until(lambda: 0 < served.encoder.asked < PIECES)


def _alone(watched: Callable[[], Watched]) -> Generated:
    return watched().company.run([showing("seen", picture())])["seen"]


def test_preemption_between_pieces_loses_nothing(watched: Callable[[], Watched]) -> None:
    alone = _alone(watched)
    served = watched()
    _between_pieces(served)
    scheduler = served.engine._scheduler
    (sequence,) = scheduler.running
    scheduler._admission.requeue(sequence)
    served.step_until(lambda: not served.engine.has_work)
    assert served.encoder.asked == PIECES
    assert served.company.answers["seen"].tokens == alone.tokens


def test_an_abort_between_pieces_leaves_nothing(watched: Callable[[], Watched]) -> None:
    alone = _alone(watched)
    served = watched()
    _between_pieces(served)
    served.engine.abort("seen")
    served.company.add(stream(2))
    served.step_until(lambda: not served.engine.has_work)
    assert [end.finish for end in served.company.answers["seen"].ends] == [FinishReason.ABORT]
    assert served.held() == 0
    assert served.company.run([showing("seen", picture())])["seen"].tokens == alone.tokens


def test_a_failed_step_between_pieces_leaves_nothing(
    watched: Callable[[], Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = watched()
    _between_pieces(served)

    def failing(*_: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as broken:
        broken.setattr(executor_of(served.engine).media, "advance", failing)
        served.step_until(ended(served.company, "seen"))
    assert served.company.answers["seen"].ends[0].finish is FinishReason.ERROR
    assert served.held() == 0
    again = showing("again", picture())
    assert len(served.company.run([again])["again"].tokens) == 4


def test_a_short_picture_does_not_wait_for_all_of_a_film(watched: Callable[[], Watched]) -> None:
    served = watched()
    frames = [picture(seed) for seed in range(10, 30)]
    film = showing("film", frames[0])
    prompt, media = list(film.prompt), list(film.media)
    for frame in frames[1:]:
        media.append(PlacedMedia(len(prompt), frame))
        prompt += [9] * frame.tokens
    served.company.add(replace(film, prompt=(*prompt, 5, 6), media=tuple(media)))
    served.step_until(lambda: served.encoder.asked > 2 * PIECES)
    served.company.add(showing("seen", picture()))
    served.step_until(ended(served.company, "seen"))
    assert served.encoder.asked < 12 * PIECES
    assert not served.company.answers["film"].ends


def test_plans_with_encoders_work_can_be_pickled(watched: Callable[[], Watched]) -> None:
    served = watched()
    served.company.add(showing("seen", picture()))
    served.step_until(lambda: not served.engine.has_work)
    plan = next(plan for plan in served.plans if plan.encoding)
    (work,), (copied,) = plan.encoding, pickle.loads(pickle.dumps(plan)).encoding
    assert (copied.item, copied.first, copied.count) == (work.item, work.first, work.count)
