"""Promise 1 for requests with sound: as if alone, in any company, any chunks, after any hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import Request
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.gemma3n import gemma3n_seeing_config
from tests.support.parity import (
    SCENARIOS,
    Company,
    Generated,
    alone,
    assert_same,
    count_encodes,
    prompts,
    under_pressure,
    with_media,
)
from tests.support.seeing import CONFIGS as SEEING
from tests.support.seeing import film, heard_film, picture, speech
from tests.support.tiny_models import (
    AUDIO,
    IMAGE,
    VIDEO,
    gemma4_audio_config,
    gemma4_ple_config,
    sound,
    write_model,
)
from tests.support.unified import unified_config, wave

PACKED = KVFormat("page", 4, 4)
BATCH = "batch of unequal lengths"
MARKS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}

Placing = Sequence[tuple[int, MediaItem]]


def pixels(seed: int, rows: int, columns: int, kind: str = "image") -> MediaItem:
    """Return random patches of 4 x 4 pixels, four of which become a soft token."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * columns, 48), dtype=np.uint8).tobytes()
    return MediaItem.of(kind, data, (rows, columns), rows * columns // 4)


def watched(seed: int, seen: MediaItem) -> MediaItem:
    return heard_film(seen, speech(seed, 150)) if seed % 2 else seen


def square(seed: int, rows: int, columns: int) -> MediaItem:
    """Return a picture for Gemma 3n, whose pictures all have as many rows."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (64 * rows * 64 * columns * 3,), dtype=np.uint8).tobytes()
    return MediaItem.of("image", data, (64 * rows, 64 * columns), 16, bidirectional=False)


def padded(seed: int, frames: int) -> MediaItem:
    """Return a sound for Gemma 3n, whose sounds all have as many rows."""
    heard = sound(frames, seed)
    return MediaItem.of("audio", heard.features, heard.shape, 20, bidirectional=False)


def holding(request: Request, items: Placing) -> Request:
    """Return the request with media items inserted, each after the given number of text tokens."""
    return with_media(request, items, lambda item: [MARKS[item.kind]] * item.tokens)


@dataclass(frozen=True)
class Family:
    """A configuration, and items for it: of a seed and a size."""

    config: dict[str, Any]
    hear: Callable[[int, int], MediaItem]
    see: Callable[[int, int, int], MediaItem]
    watch: Callable[[int, int, int], MediaItem]


FAMILIES = {
    "Gemma 4": Family(
        gemma4_audio_config(gemma4_ple_config()),
        lambda seed, frames: sound(frames, seed),
        pixels,
        lambda seed, rows, columns: pixels(seed, rows, columns, "video"),
    ),
    "Gemma 4 12B": Family(
        unified_config(),
        lambda seed, frames: wave(-(-frames // 4), seed),
        pixels,
        lambda seed, rows, columns: pixels(seed, rows, columns, "video"),
    ),
    # Pictures have further levels, sounds have none.
    "Qwen3-Omni": Family(
        SEEING["qwen3_omni_moe_thinker"],
        speech,
        picture,
        # Moments between whole positions; every other one is heard, too.
        lambda seed, rows, columns: watched(seed, film(seed, 2, rows, columns, 530_000)),
    ),
    # It watches no videos.
    "Gemma 3n": Family(
        gemma3n_seeing_config(),
        padded,
        lambda seed, rows, columns: square(seed, 2, 1),
        lambda seed, rows, columns: square(seed, 1, 1),
    ),
}
GEMMA = "Gemma 4"
DAILY = (GEMMA, "Qwen3-Omni")
"""The others are slow; one scenario with sounds of Gemma 3n is in `test_gemma3n`."""
GEMMAS = tuple((GEMMA, each, KVFormat()) for each in ("in chunks of 33", "pre-empted and resumed"))
"""The scenarios of every day that one family has alone."""
SOME_SLOW = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in FAMILIES
]


def items(family: str) -> tuple[Placing, ...]:
    """Return sounds; Gemma 4's 50 rows go past its window of 32 and are cut by chunks."""
    own = FAMILIES[family]
    return (
        ((3, own.hear(0, 200)),),
        ((0, own.hear(1, 12)), (30, own.hear(2, 200))),
        (),
        ((10, own.see(1, 4, 10)), (0, own.hear(3, 300))),
        ((5, own.watch(2, 4, 4)), (3, own.watch(3, 4, 4)), (60, own.hear(4, 90))),
    )


def requests(family: str, tokens: int = 24) -> list[Request]:
    plain = prompts((20, 45, 50, 40, 80), tokens)
    return [holding(request, held) for request, held in zip(plain, items(family), strict=True)]


Opened = Callable[[str], tuple[LoadedModel, EngineConfig]]
Expected = Callable[[str, KVFormat], dict[str, Generated]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    @cache
    def find(family: str) -> tuple[LoadedModel, EngineConfig]:
        folder = write_model(Path(tmp_path_factory.mktemp("ears")), FAMILIES[family].config)
        loaded = open_model(str(folder), dtype="float32")
        return loaded, EngineConfig(str(folder), kv_memory=64 << 20, kv_skip_layers=())

    return find


@pytest.fixture(scope="module")
def expected(opened: Opened) -> Expected:
    """Return what each request gets alone."""

    @cache
    def find(family: str, format: KVFormat) -> dict[str, Generated]:
        loaded, config = opened(family)
        return alone(loaded, replace(config, kv_format=format), requests(family))

    return find


@pytest.mark.parametrize("family", SOME_SLOW)
def test_sounds_change_the_answer(opened: Opened, family: str) -> None:
    """If sounds changed nothing, this file would prove nothing. All have one length."""
    (one,) = prompts((30,), 8)
    heard = [
        replace(holding(one, ((5, FAMILIES[family].hear(n, 60)),)), id=f"r{n}") for n in range(3)
    ]
    loaded, config = opened(family)
    together = Company(loaded, config).run(heard)
    assert_same(together, alone(loaded, config, heard), [request.id for request in heard])
    # Of the first tokens: two answers may be of the same tokens all the same.
    logits = [answer.logits[min(answer.logits)] for answer in together.values()]
    assert all(mx.abs(a - b).max() > 0.01 for a, b in itertools.combinations(logits, 2))


@pytest.mark.parametrize(
    ("family", "scenario", "format"),
    [
        pytest.param(
            *case,
            marks=()
            if case == (DAILY[1], BATCH, KVFormat()) or case in GEMMAS
            else pytest.mark.slow,
            id="-".join((*case[:2], case[2].name)),
        )
        for case in itertools.product(FAMILIES, SCENARIOS, (KVFormat(), PACKED))
    ],
)
def test_as_if_alone(
    opened: Opened, expected: Expected, family: str, scenario: str, format: KVFormat
) -> None:
    if format == PACKED and scenario.startswith("pre-empted"):
        pytest.skip("codes leave its memory without pressure; see below")
    loaded, config = opened(family)
    wanted = requests(family)
    config = replace(config, kv_format=format, prefix_cache=False)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected(family, format), [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_pre_empted_and_resumed(opened: Opened, family: str) -> None:
    loaded, config = opened(family)
    config = replace(config, kv_format=PACKED, prefix_cache=False)
    wanted = [request for request in requests(family, 130) if request.media]
    got = under_pressure(loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [each.id for each in wanted])


def long(family: str, *seeds: int) -> Request:
    """Return two sounds, among 150 tokens of text."""
    hear = FAMILIES[family].hear
    held = ((20, hear(seeds[0], 200)), (70, hear(seeds[1], 120)))
    return holding(prompts((150,), 8)[0], held)


def followers(family: str) -> dict[str, tuple[Request, int]]:
    """Return prompts that start as the long one does, by name, and how much of each is reused."""
    first = long(family, 0, 1)
    length = len(first.prompt)
    question = first.prompt[:-30] + prompts((30,), seed=9)[0].prompt
    return {
        "exact repeat": (first, length - 1),
        "another question": (replace(first, prompt=question), length - 30),
        "another first sound of equal length": (long(family, 7, 8), first.media[0].start),
        "another second sound of equal length": (long(family, 0, 8), first.media[1].start),
    }


@pytest.mark.parametrize("name", followers(GEMMA))
@pytest.mark.parametrize(
    ("family", "format"),
    [
        pytest.param(
            *case,
            marks=() if case == (GEMMA, KVFormat()) else pytest.mark.slow,
            id="-".join((case[0], case[1].name)),
        )
        for case in itertools.product(FAMILIES, (KVFormat(), PACKED))
    ],
)
def test_warm_equals_cold(opened: Opened, family: str, name: str, format: KVFormat) -> None:
    loaded, config = opened(family)
    config = replace(config, max_step_tokens=33, kv_format=format)
    request, reused = followers(family)[name]
    wanted = replace(request, id="second")
    cold = alone(loaded, config, [wanted])
    company = Company(loaded, config)
    company.run([long(family, 0, 1)])
    company.run([wanted])
    assert_same(company.answers, cold, ["second"])
    whole = 1 if format == KVFormat() else config.block_size  # coded blocks are shared whole
    assert company.answers["second"].ends[0].cached_tokens == reused // whole * whole


@pytest.mark.parametrize("family", SOME_SLOW)
def test_a_sound_is_encoded_once_for_two_questions(
    opened: Opened, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, config = opened(family)
    asked = count_encodes(loaded, "audio", monkeypatch)
    company = Company(loaded, replace(config, max_step_tokens=9))
    heard = FAMILIES[family].hear(0, 100)
    company.run([holding(text, ((7, heard),)) for text in prompts((30, 31, 32), 5)])
    assert asked == [heard.shape]


def test_a_bad_sound_ends_its_request_alone(opened: Opened, expected: Expected) -> None:
    loaded, config = opened(GEMMA)
    wanted = requests(GEMMA)
    (placed,) = wanted[0].media
    cut = replace(placed.item, features=placed.item.features[:-4])
    bad = replace(wanted[0], id="bad", media=(PlacedMedia(placed.start, cut),))
    company = Company(loaded, config)
    company.run([bad, wanted[0], wanted[1]])
    (end,) = company.answers["bad"].ends
    assert end.error is not None
    assert end.error.status == 400
    assert_same(company.answers, expected(GEMMA, KVFormat()), ["r0", "r1"])
