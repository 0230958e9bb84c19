"""Promise 1 for tokens that look at pictures: as if alone, in any company, under any format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem
from quire.core.request import Request
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.crossing import CONFIG, MARK, picture
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    Company,
    Generated,
    alone,
    assert_same,
    count_encodes,
    executor_of,
    prompts,
    with_media,
)
from tests.support.tiny_models import write_model

FORMATS = (KVFormat(), KVFormat("page", 4, 4), KVFormat("uniform", 8, 8, 32))
DAILY = (("batch of unequal lengths", "page-4"),)
Shown = tuple[tuple[int, MediaItem], ...]


def slow_but(*daily: Any) -> Callable[..., Any]:
    def case(*values: Any) -> Any:
        named = tuple(each.name if isinstance(each, KVFormat) else each for each in values)
        return pytest.param(*values, marks=() if named in daily else pytest.mark.slow)

    return case


def showing(request: Request, shown: Shown) -> Request:
    """Return the request with pictures inserted, each after the given number of text tokens."""
    return with_media(request, shown, lambda item: [MARK])


SHOWN: tuple[Shown, ...] = (
    ((3, picture(1, 2, 2)),),
    ((0, picture(2, 1, 1)), (30, picture(3, 1, 3))),
    (),
    ((10, picture(4, 1, 2)), (0, picture(5, 2, 1)), (25, picture(1, 2, 2))),
    ((40, picture(3, 1, 3)),),
    ((60, picture(6, 1, 4)),),
)


def requests() -> list[Request]:
    plain = prompts((20, 45, 50, 60, 65, 130), 20)
    return [showing(request, shown) for request, shown in zip(plain, SHOWN, strict=True)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, EngineConfig]:
    folder = write_model(Path(tmp_path_factory.mktemp("looks")), CONFIG)
    loaded = open_model(str(folder), dtype="float32")
    return loaded, EngineConfig(str(folder), kv_memory=64 << 20, kv_skip_layers=())


Opened = tuple[LoadedModel, EngineConfig]
Expected = Callable[[KVFormat], dict[str, Generated]]


@pytest.fixture(scope="module")
def expected(opened: Opened) -> Expected:
    """Return what each request gets alone, computed once."""
    known: dict[KVFormat, dict[str, Generated]] = {}

    def find(format: KVFormat) -> dict[str, Generated]:
        if format not in known:
            loaded, config = opened
            known[format] = alone(loaded, replace(config, kv_format=format), requests())
        return known[format]

    return find


def test_pictures_change_the_answer(opened: Opened) -> None:
    """If pictures changed nothing, the other tests of this file would prove nothing."""
    loaded, config = opened
    (text,) = prompts((30,), 1)
    asked = [
        replace(showing(text, shown), id=name)
        for name, shown in (
            ("one", ((5, picture(1, 1, 2)),)),
            ("other", ((5, picture(2, 1, 2)),)),
            ("two", ((5, picture(1, 1, 2)), (5, picture(2, 1, 2)))),
        )
    ]
    got = alone(loaded, config, asked)
    first = [np.array(got[each.id].logits[len(each.prompt)]) for each in asked]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(first[a] - first[b]).max() / np.abs(first[b]).max() > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("scenario", "format"), [slow_but(*DAILY)(*each) for each in product(SCENARIOS, FORMATS)]
)
def test_as_if_alone(opened: Opened, expected: Expected, scenario: str, format: KVFormat) -> None:
    loaded, config = opened
    config = replace(config, kv_format=format)
    wanted = requests()
    if scenario == "pre-empted and resumed":
        got = pre_empted(loaded, config, wanted)
    else:
        got = SCENARIOS[scenario](loaded, replace(config, prefix_cache=False), wanted)
    assert_same(got, expected(format), [request.id for request in wanted])


def pre_empted(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    limits = Company(loaded, config).engine._scheduler.limits
    media = max((loaded.model.cross_media(each.media) for each in wanted), key=_keys)
    blocks = sum(-(-each.keys // config.block_size) for each in media)
    budget = limits.worst_case_bytes(config.kv_format, 200, 0, blocks)
    company = Company(loaded, replace(config, kv_memory=budget))
    company.run(wanted)
    assert company.engine.stats().preemptions > 0
    return company.answers


def _keys(media: Any) -> int:
    return sum(each.keys for each in media)


def test_formats_side_by_side(opened: Opened, expected: Expected) -> None:
    """One step has rows of all formats, of which each attends to pictures of its own."""
    loaded, config = opened
    company = Company(loaded, replace(config, max_step_tokens=33))
    wanted = []
    for number, request in enumerate(requests()):
        format = FORMATS[number % 3]
        wanted.append((format, request.id))
        company.add(replace(request, kv_format=format))
    company.run([])
    for format, name in wanted:
        assert_same(company.answers, expected(format), [name])


LONG = showing(prompts((150,), 8)[0], ((20, picture(1, 2, 2)), (70, picture(2, 1, 3))))
FOLLOWERS: dict[str, tuple[Request, int]] = {
    "exact repeat": (LONG, 151),
    "another first picture": (
        showing(prompts((150,), 8)[0], ((20, picture(9, 2, 2)), (70, picture(2, 1, 3)))),
        20,
    ),
    "another second picture": (
        showing(prompts((150,), 8)[0], ((20, picture(1, 2, 2)), (70, picture(9, 1, 3)))),
        91,
    ),
    "the mark, and no picture": (replace(LONG, media=()), 20),
    "gone on": (replace(LONG, prompt=LONG.prompt + LONG.prompt[30:49]), 152),
}


@pytest.mark.parametrize("format", [FORMATS[0], pytest.param(FORMATS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_warm_equals_cold(opened: Opened, name: str, format: KVFormat) -> None:
    loaded, config = opened
    config = replace(config, kv_format=format, max_step_tokens=33)
    request, reusable = FOLLOWERS[name]
    wanted = replace(request, id="second")
    cold = alone(loaded, config, [wanted])
    company = Company(loaded, config)
    company.run([LONG])
    company.run([wanted])
    assert_same(company.answers, cold, ["second"])
    page = config.block_size if format.has_tail else 1
    assert company.answers["second"].ends[0].cached_tokens == reusable // page * page


def test_a_picture_is_encoded_once_and_its_keys_are_kept(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions at once, and one when nobody needs it any more."""
    loaded, config = opened
    asked = count_encodes(loaded, "image", monkeypatch)
    company = Company(loaded, replace(config, max_step_tokens=9))
    questions = [showing(text, ((7, picture(1, 2, 2)),)) for text in prompts((30, 31, 32), 5)]
    company.run(questions[:2])
    executor_of(company.engine).media.clear()  # rows that were encoded are gone, keys are not
    company.run([questions[2]])
    assert asked == [(2, 2)]


def test_keys_that_nobody_looks_at_make_room(opened: Opened) -> None:
    """Many pictures come one after the other, in a budget with room for two."""
    loaded, config = opened
    probe = Company(loaded, config)
    room = probe.engine._scheduler.limits.worst_case_bytes(KVFormat(), 64, 0, 4)
    company = Company(loaded, replace(config, kv_memory=room))
    texts = prompts((20,) * 6, 5)
    shown = [showing(text, ((7, picture(n, 2, 2)),)) for n, text in enumerate(texts)]
    company.run(shown)
    assert_same(company.answers, alone(loaded, config, shown), [each.id for each in shown])


def test_what_never_fits_is_refused(opened: Opened) -> None:
    loaded, config = opened
    limits = Company(loaded, config).engine._scheduler.limits
    company = Company(loaded, replace(config, kv_memory=limits.worst_case_bytes(KVFormat(), 256)))
    (text,) = prompts((20,), 5)
    many = tuple((1, picture(n, 2, 2)) for n in range(12))
    company.run([showing(text, many)])
    (end,) = company.answers["r0"].ends
    assert end.error is not None
    assert end.error.status == 400
