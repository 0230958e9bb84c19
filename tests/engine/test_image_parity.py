"""Promise 1 for requests with images: as if alone, in any company, any chunks, after any hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import FinishReason, Request
from tests.support.everyday import everyday
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    Company,
    Expected,
    Opened,
    alone,
    answers_alone,
    assert_same,
    count_encodes,
    opener,
    prompts,
    with_media,
)
from tests.support.seeing import CONFIGS as SEEING
from tests.support.seeing import film
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.siglip import EVERY_PATCH
from tests.support.tiled import CONFIGS as TILED
from tests.support.tiled import OTHER_DECODERS
from tests.support.tiled import WHOLE as TILED_WHOLE
from tests.support.tiny_models import (
    IMAGE,
    VIDEO,
    gemma4_config,
    gemma4_ple_config,
    gemma4_vision_config,
)
from tests.support.unified import unified_config

FAMILIES: dict[str, dict[str, Any]] = {
    "images seen whole": gemma4_vision_config(gemma4_config(use_bidirectional_attention="vision")),
    "images read like text": gemma4_vision_config(gemma4_ple_config()),
    "images without an encoder": unified_config(),
    "three axes, windows in the encoder": SEEING["qwen2_5_vl"],
    "three axes in turns, levels": SEEING["qwen3_vl"],
    "over recurrent layers": SEEING["qwen3_5"],
    "three axes": SEEING["qwen2_vl"],
    "experts, levels": SEEING["qwen3_vl_moe"],
    "experts over recurrent layers": SEEING["qwen3_5_moe"],
    "experts, a cubic table": SEEING["glm4v_moe"],
    "tiles seen whole by full layers": TILED["gemma3"],
    "norms around blocks": SEEING["glm4v"],
    "norms of queries in the encoder": SEEING["glm_ocr"],
    "tiles by CLIP": TILED["llava"],
    "tiles by SigLIP": TILED["deepseek_vl"],
    "a linear table": SEEING["paddleocr_vl"],
    "tiles by InternViT": TILED["internvl"],
    "tiles, windows": TILED["aya_vision"],
    "tiles, windows and sinks": OTHER_DECODERS["internvl-gpt_oss"],
    "experts by token": SEEING["ernie4_5_vl_moe"],
    "latents, windows in the encoder": SIGLIP["youtu_vl"],
    "every patch a row": SIGLIP["phi4-siglip"],
}
WHOLE = "images seen whole"
RECURRENT = ("over recurrent layers", "experts over recurrent layers")
LATENT = "latents, windows in the encoder"
SHARES = {**dict.fromkeys(RECURRENT, 9 / 5), LATENT: 8 / 5}
"""Budget as a share of what the longest request needs, such that two requests outgrow it. Most of a
recurrent layer's memory is the same for all requests; most of latents' is the block that fills."""
DAILY = {
    "images seen whole": ("batch of unequal lengths",),
    "images read like text": (),
    "three axes in turns, levels": (),
    "over recurrent layers": (),
    "tiles seen whole by full layers": (),
}
"""The scenarios of every day; the others are slow."""
FORMATS = (KVFormat("page", 4, 4), KVFormat("uniform", 8, 8, 32), KVFormat("turbo", 3.5, 3.5))
DAILY_FORMATS = (FORMATS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FORMATS[1:]))
"""The format of the everyday run; the slow run has all."""


def families(*others: Any, daily: Callable[..., bool]) -> list[Any]:
    """Return all families with all of the other values; those that are not `daily` are slow."""
    return [
        pytest.param(*case, marks=() if daily(*case) else pytest.mark.slow)
        for case in product(FAMILIES, *others)
    ]


Shapes = tuple[tuple[int, int, int], ...]


def image(seed: int, rows: int, columns: int) -> MediaItem:
    """Return random patches of 4 x 4 pixels, four of which become a row of the decoder's."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (rows * columns, 48), dtype=np.uint8).tobytes()
    digest = blake2b(pixels + bytes([rows, columns]), digest_size=24).digest()
    return MediaItem("image", pixels, (rows, columns), rows * columns // 4, digest)


def showing(request: Request, shapes: Shapes, seed: int = 0) -> Request:
    """Return the request with images inserted, given as (text tokens before it, rows, columns)."""
    shown = [
        (gap, image(seed + number, rows, columns))
        for number, (gap, rows, columns) in enumerate(shapes)
    ]
    return with_media(request, shown, lambda item: [IMAGE] * item.tokens)


# Soft tokens: 48, past the window of 32 and across blocks; 4; 6 and 30 next to each other.
SHAPES: tuple[Shapes, ...] = (
    ((3, 12, 16),),
    ((0, 4, 4), (30, 12, 16)),
    (),
    ((10, 12, 16), (20, 12, 16), (5, 4, 4)),
    ((40, 4, 6), (0, 10, 12)),
    ((60, 12, 12),),
)


def requests(family: str) -> list[Request]:
    plain = prompts((20, 45, 50, 60, 65, 130), 40)
    return [
        as_read(family, showing(request, shapes, 10 * number))
        for number, (request, shapes) in enumerate(zip(plain, SHAPES, strict=True))
    ]


def as_read(family: str, request: Request) -> Request:
    """Return the request with its images shaped as the family's processor shapes them."""
    model_type = FAMILIES[family]["model_type"]
    whole = model_type in ("gemma4", "gemma4_unified", *TILED_WHOLE)

    def item(placed: PlacedMedia) -> MediaItem:
        rows, columns = placed.item.shape
        shape: tuple[int, ...] = (rows, columns)
        if model_type in TILED:
            shape = (placed.item.tokens,)
        elif model_type in EVERY_PATCH:  # of twice the size
            shape = (rows // 2, columns // 2)
        return replace(placed.item, bidirectional=whole, shape=shape)

    media = (replace(each, item=item(each)) for each in request.media)
    return replace(request, media=tuple(media))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    return opener(tmp_path_factory.mktemp("eyes"), FAMILIES)


@pytest.fixture(scope="module")
def expected(opened: Callable[[str], Opened]) -> Expected:
    """Return what each request gets alone, computed once."""
    return answers_alone(opened, requests)


@pytest.mark.parametrize("family", families(daily=lambda family: family in DAILY))
def test_images_change_the_answer(opened: Callable[[str], Opened], family: str) -> None:
    """If images changed nothing, the other tests of this file would prove nothing."""
    loaded, config = opened(family)
    (one,) = prompts((30,), 1)
    shown = [
        as_read(family, replace(showing(one, ((5, 8, 8),), seed), id=f"r{seed}"))
        for seed in range(3)
    ]
    answers = alone(loaded, config, shown)
    first = [np.array(answer.logits[len(shown[0].prompt)]) for answer in answers.values()]
    for a, b in combinations(first, 2):
        assert np.abs(a - b).max() / np.abs(b).max() > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "scenario"),
    families(SCENARIOS, daily=lambda family, scenario: scenario in DAILY.get(family, ())),
)
def test_as_if_alone(
    opened: Callable[[str], Opened], expected: Expected, family: str, scenario: str
) -> None:
    loaded, config = opened(family)
    wanted = requests(family)
    got = SCENARIOS[scenario](loaded, replace(config, prefix_cache=False), wanted)
    assert_same(got, expected(family, KVFormat()), [request.id for request in wanted])


LONG_ITEMS = ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe")
"""A video of theirs is one item."""


def watched(family: str, seed: int, rows: int, columns: int) -> MediaItem:
    """Return a video's item as the family's processor makes them: of all moments, or of one."""
    kind = FAMILIES[family]["model_type"]
    if kind in ("gemma4", "gemma4_unified"):
        whole = family != "images read like text"
        return replace(image(seed, rows, columns), kind="video", bidirectional=whole)
    if kind in TILED:
        tiles = rows * columns // 4
        return replace(image(seed, rows, columns), kind="video", shape=(tiles,))
    moments, step = (2, 500_000) if kind in LONG_ITEMS else (1, 0)
    return film(seed, moments, rows, columns, step)


def videos(family: str) -> list[Request]:
    """Return two items of a video with text between; the same behind a picture; and a text."""
    wanted = prompts((40, 60, 50), 12)
    for number, request in enumerate(wanted[:2]):
        items = [watched(family, number + each, 8, 12) for each in (0, 5)]
        if number:
            items.insert(0, as_read(family, showing(request, ((4, 4, 6),))).media[0].item)
        tokens: list[int] = []
        media = []
        for item in items:
            tokens += request.prompt[len(media) * 9 : len(media) * 9 + 9]
            media.append(PlacedMedia(len(tokens), item))
            tokens += [VIDEO] * item.tokens
        tokens += request.prompt[len(media) * 9 :]
        wanted[number] = replace(request, prompt=tuple(tokens), media=tuple(media))
    return wanted


STILL = (
    "a linear table",
    LATENT,
    "every patch a row",
    *(name for name in FAMILIES if name.startswith("tiles") and name != "tiles by InternViT"),
)
"""Models that take no videos."""
WATCHED = "three axes, windows in the encoder"


@pytest.mark.parametrize(
    "format",
    everyday([KVFormat(), FORMATS[0]], FORMATS[0].__eq__),
    ids=lambda format: format.name,
)
@pytest.mark.parametrize(
    ("family", "scenario"),
    [
        case
        for case in families(
            ("batch of unequal lengths", "staggered arrivals", "in chunks of 33"),
            daily=lambda family, scenario: (family, scenario) == (WATCHED, "in chunks of 33"),
        )
        if case.values[0] not in STILL
    ],
)
def test_videos(
    opened: Callable[[str], Opened], family: str, scenario: str, format: KVFormat
) -> None:
    loaded, config = opened(family)
    config = replace(config, kv_format=format, prefix_cache=False)
    wanted = videos(family)
    names = [request.id for request in wanted]
    assert_same(SCENARIOS[scenario](loaded, config, wanted), alone(loaded, config, wanted), names)


@pytest.mark.slow
@pytest.mark.parametrize("format", [KVFormat(), FORMATS[0]], ids=lambda format: format.name)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in STILL])
def test_a_video_is_reused_and_another_of_its_shape_is_not(
    opened: Callable[[str], Opened],
    family: str,
    format: KVFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded, config = opened(family)
    config = replace(config, kv_format=format, max_step_tokens=33)
    first = videos(family)[0]
    question = replace(first, id="question", prompt=(*first.prompt[:-9], *range(5, 14)))
    second = first.media[1]
    other = replace(second, item=watched(family, 9, 8, 12))
    another = replace(first, id="another", media=(first.media[0], other))
    asked = [first, question, another]
    cold = alone(loaded, config, asked)
    encoded = count_encodes(loaded, "video", monkeypatch)
    company = Company(loaded, config)
    for request in asked:
        company.run([request])
    assert len(encoded) == 3
    assert_same(company.answers, cold, [each.id for each in asked])
    whole = 1 if format == KVFormat() else config.block_size
    for request, same in ((question, len(first.prompt) - 9), (another, second.start)):
        reused = company.answers[request.id].ends[0].cached_tokens
        # Over recurrent layers only where there is a snapshot.
        assert reused <= same if family in RECURRENT else reused == same // whole * whole


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize(
    ("family", "scenario"), list(product(FAMILIES, ("staggered arrivals", "in chunks of 33")))
)
def test_formats(
    opened: Callable[[str], Opened],
    expected: Expected,
    family: str,
    scenario: str,
    format: KVFormat,
) -> None:
    loaded, config = opened(family)
    wanted = requests(family)
    got = SCENARIOS[scenario](loaded, replace(config, kv_format=format), wanted)
    assert_same(got, expected(family, format), [request.id for request in wanted])


@pytest.mark.parametrize("format", DAILY_FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("family", families(daily=lambda family: family == WHOLE))
def test_formats_pre_empted_and_resumed(
    opened: Callable[[str], Opened], expected: Expected, family: str, format: KVFormat
) -> None:
    loaded, config = opened(family)
    wanted = requests(family)
    probe = Company(loaded, replace(config, kv_format=format))
    # Room for one of the longest with an image of 48 tokens, which is read at once, and half as
    # much again, or two thirds where each has tails, so that two start that outgrow it.
    share = SHARES.get(family, 5 / 3 if format.scheme == "page" else 3 / 2)
    budget = int(probe.engine._scheduler.limits.worst_case_bytes(format, 256, 48) * share)
    company = Company(loaded, replace(config, kv_format=format, kv_memory=budget))
    company.run(wanted)
    assert company.engine.stats().preemptions > 0
    names = [request.id for request in wanted]
    assert_same(company.answers, expected(family, format), names)


LONG = showing(prompts((150,), 8)[0], ((20, 12, 16), (70, 12, 16)))
"""Images at 20 to 68 and at 138 to 186."""


QUESTION = LONG.prompt[:-30] + prompts((30,), seed=9)[0].prompt


def followers() -> dict[str, tuple[Request, range]]:
    """Return prompts that start as `LONG` does, by name, and how much of each may be reused."""
    other_first = showing(prompts((150,), 8)[0], ((20, 12, 16), (70, 12, 16)), seed=5)
    images = (LONG.media[0], other_first.media[1])
    return {
        "exact repeat": (LONG, range(245, 246)),
        "another question": (replace(LONG, prompt=QUESTION), range(216, 217)),
        "another first image": (other_first, range(20, 21)),
        "another second image": (replace(LONG, media=images), range(138, 139)),
        "the marks of an image, and no image": (replace(LONG, media=()), range(20, 21)),
        "cut within the second image": (
            replace(LONG, prompt=LONG.prompt[:160], media=LONG.media[:1]),
            range(138, 139),
        ),
        "gone on": (replace(LONG, prompt=LONG.prompt + LONG.prompt[:19]), range(246, 247)),
    }


DAILY_FOLLOWERS = (
    "exact repeat",
    "another first image",
    "the marks of an image, and no image",
    "cut within the second image",
)


@pytest.mark.parametrize(
    ("family", "name", "chunk", "format"),
    families(
        followers(),
        (2048, 33),
        (KVFormat(), FORMATS[0]),
        daily=lambda family, name, chunk, format: (
            format == KVFormat()
            and (
                (family == WHOLE and name in DAILY_FOLLOWERS and chunk == 33)
                or (family == "over recurrent layers" and "first" in name and chunk == 33)
            )
        ),
    ),
)
def test_warm_equals_cold(
    opened: Callable[[str], Opened], family: str, name: str, chunk: int, format: KVFormat
) -> None:
    loaded, config = opened(family)
    config = replace(config, max_step_tokens=chunk, kv_format=format)
    request, reusable = followers()[name]
    if format != KVFormat():  # coded blocks are shared whole
        least = reusable.start // config.block_size * config.block_size
        reusable = range(least, least + 1)
    if family in RECURRENT:  # only where there is a snapshot
        reusable = range(reusable.stop)
    wanted = as_read(family, replace(request, id="second"))
    cold = alone(loaded, config, [wanted])
    company = Company(loaded, config)
    company.run([as_read(family, LONG)])
    company.run([wanted])
    assert_same(company.answers, cold, ["second"])
    assert company.answers["second"].ends[0].cached_tokens in reusable


def test_a_hit_may_end_within_an_image(opened: Callable[[str], Opened]) -> None:
    """A block of the image was evicted: the rest is read again, and attends to the blocks that
    stayed.
    """
    loaded, config = opened("images seen whole")
    # Coded blocks are shared whole, so that the hit ends at 64, within the first image.
    config = replace(config, kv_format=FORMATS[0])
    short = replace(LONG, prompt=LONG.prompt[:70], media=LONG.media[:1])
    cold = alone(loaded, config, [short])
    company = Company(loaded, config)
    company.run([LONG])
    company.run([replace(short, id="second")])
    assert company.answers["second"].ends[0].cached_tokens == 64
    assert_same({"r0": company.answers["second"]}, cold, ["r0"])


def test_equal_images_are_encoded_once(
    opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, config = opened("images read like text")
    asked = count_encodes(loaded, "image", monkeypatch)
    texts = prompts((30, 31, 32), 5)
    company = Company(loaded, replace(config, max_step_tokens=9))
    company.run([showing(text, ((7, 8, 8),)) for text in texts])
    assert asked == [(8, 8)]


def test_equal_images_are_held_once(opened: Callable[[str], Opened]) -> None:
    loaded, config = opened("images read like text")
    company = Company(loaded, config)
    for text in prompts((30, 31), 5):
        company.add(showing(text, ((7, 8, 8),)))
    first, second = company.engine._scheduler.waiting
    assert first.request.media[0].item is second.request.media[0].item
    company.run([])


BAD: dict[str, dict[str, Any]] = {
    "another shape": {"shape": (11, 8)},
    "no pixels": {"features": b""},
    "too few tokens": {"tokens": 5},
    "behind the prompt": {"start": 100},
    "more patches than pixels": {"shape": (100, 2)},
    "a sound": {"kind": "audio"},
}


def bad(request: Request, name: str) -> Request:
    """Return the request with its first image changed as `BAD` says."""
    placed, changes = request.media[0], dict(BAD[name])
    start = changes.pop("start", placed.start)
    changed = PlacedMedia(start, replace(placed.item, **changes))
    return replace(request, id=name, media=(changed, *request.media[1:]))


def test_bad_images_end_their_requests_alone(
    opened: Callable[[str], Opened], expected: Expected
) -> None:
    loaded, config = opened(WHOLE)
    wanted = requests(WHOLE)
    company = Company(loaded, config)
    company.run([wanted[3], *(bad(wanted[1], name) for name in BAD), wanted[0]])
    for name in BAD:
        (end,) = company.answers[name].ends
        assert end.finish == FinishReason.ERROR, name
        assert end.error is not None, name
        assert end.error.status == 400, name
    assert_same(company.answers, expected(WHOLE, KVFormat()), ["r3", "r0"])
