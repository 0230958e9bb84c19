"""Promise 1 for all families that see and that `test_image_parity` does not have.

Their pictures become other numbers of rows, so the encoder is asked how many and of which bytes. A
family that is registered is here, and fails until its shapes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem
from quire.core.request import Request
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel
from tests.engine.test_image_parity import FAMILIES
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
    under_pressure,
    with_media,
)
from tests.support.registered import CONFIGS
from tests.support.tiny_models import IMAGE, VIDEO

THERE = {config["model_type"] for config in FAMILIES.values()}
"""Model types that `test_image_parity` covers."""
CROSSING = {"mllama"}
"""Model types that `test_cross_parity` covers: their pictures replace no embeddings."""
NAMES = tuple(
    name
    for name, config in CONFIGS.items()
    if config["model_type"] not in THERE | CROSSING and "image" in build(config).encoders
)
Shape = tuple[int, ...]
PATCHES, TILES, ONE = ((8, 12), (4, 6)), ((9,), (4,)), ((1,), (1,))
SHAPES: dict[str, tuple[Shape, Shape]] = {
    "deepseek_vl_hybrid": ONE,
    **dict.fromkeys(
        (
            "deepseek_vl_v2",
            "deepseek_vl_v2-queries",
            "deepseekocr",
            "deepseekocr_2",
            "deepseek_ocr2",
        ),
        ((1, 2), (0, 0)),
    ),
    "ernie4_5_moe_vl": PATCHES,
    "cohere2_vision": TILES,
    "exaone4_5": PATCHES,
    "falcon_ocr": PATCHES,
    "falcon_perception": PATCHES,
    "gemma3n, all": ((128, 128), (128, 64)),
    "glm46v": PATCHES,
    "glm46v, experts": PATCHES,
    "got_ocr2": TILES,
    "hunyuan_vl": PATCHES,
    "dots_ocr": PATCHES,
    "kimi_k25": PATCHES,
    "kimi_vl": PATCHES,
    "lfm2-vl": PATCHES,
    "lfm2_vl": PATCHES,
    "lfm2_vl-experts": PATCHES,
    "idefics3": TILES,
    "lfm3_vl": PATCHES,
    "internvl_chat": TILES,
    "internvl_chat-norms": TILES,
    "lighton_ocr": PATCHES,
    "llama4": TILES,
    "llava_next": ((2, 2, 4, 4, 4, 4), (2, 1, 4, 2, 4, 2)),
    "llava_next-granite": ((2, 2, 4, 4, 4, 4), (2, 1, 4, 2, 4, 2)),
    "llava_onevision": ((2, 2, 4, 4, 4, 4), (3, 1, 6, 2, 6, 2)),
    "minicpmv4_6": ((8, 12), (4, 8)),
    "minicpmv4_6-4x": PATCHES,
    "mistral3": PATCHES,
    **dict.fromkeys(("moondream1", "moondream2", "moondream3"), ((2, 2), (1, 2))),
    "multi_modality": TILES,
    "multi_modality-hybrid": ONE,
    "qwen3_omni_moe": PATCHES,
    "qwen3_omni_moe_thinker": PATCHES,
    "smolvlm": TILES,
}
"""Shapes of two pictures, as encoders take them."""
FILMS: dict[str, Shape] = {
    "ernie4_5_moe_vl": (2, 8, 12, 500_000),
    "exaone4_5": (2, 8, 12, 500_000),
    "glm46v": (1, 8, 12, 0),
    "glm46v, experts": (1, 8, 12, 0),
    "internvl_chat": (9,),
    "internvl_chat-norms": (9,),
    "lfm3_vl": (2, 8, 12, 500_000),
    "llava_onevision": (5,),
    "minicpmv4_6": (8, 12),
    "minicpmv4_6-4x": (8, 12),
    "qwen3_omni_moe": (2, 8, 12, 1_000_000),
    "qwen3_omni_moe_thinker": (2, 8, 12, 1_000_000),
}
"""Shape of a video's item, by family that takes videos."""
WHOLE = {"falcon_ocr", "falcon_perception", "moondream1", "moondream2", "moondream3"}
"""Families in which rows of a picture see each other."""
RECURRENT = {
    *("lfm2-vl", "lfm2_vl", "lfm2_vl-experts", "lfm3_vl"),
    *("minicpmv4_6", "minicpmv4_6-4x"),
}
"""Families with states, which prefixes are resumed from only where there is a snapshot."""
PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4)
DAILY = ("gemma3n, all", "llava_next")
"""Families with an everyday test of two requests in a batch; the others' tests are slow."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    return opener(tmp_path_factory.mktemp("sees"), CONFIGS)


def item(loaded: LoadedModel, name: str, kind: str, shape: Shape, seed: int) -> MediaItem:
    """Return random bytes, as many as the family's encoder takes, and the rows that it makes of
    them.
    """
    encoder = loaded.model.encoders[kind]
    rng = np.random.default_rng(seed)
    tone = rng.integers(0, 200)
    features = (tone + rng.integers(0, 56, encoder.feature_bytes(shape))).astype(np.uint8)
    rows = encoder.rows(shape)
    return MediaItem.of(kind, features.tobytes(), shape, rows, bidirectional=name in WHOLE)


def picture(loaded: LoadedModel, name: str, seed: int, *, small: bool = False) -> MediaItem:
    """Return a picture of either of the family's shapes."""
    return item(loaded, name, "image", SHAPES[name][small], seed)


def film(loaded: LoadedModel, name: str, seed: int) -> MediaItem:
    """Return a video, or a part of one."""
    return item(loaded, name, "video", FILMS[name], seed)


MARKS = {"image": IMAGE, "video": VIDEO}


def showing(request: Request, *shown: tuple[int, MediaItem]) -> Request:
    """Return the request with media inserted, each after the given number of text tokens."""
    return with_media(request, shown, lambda item: [MARKS[item.kind]] * item.tokens)


def requests(loaded: LoadedModel, name: str) -> list[Request]:
    """Return a picture; two; a text; another picture of the first's shape; the first, another
    question.
    """
    texts = prompts((60, 45, 80, 70, 65), 60)
    first = picture(loaded, name, 1)
    return [
        showing(texts[0], (3, first)),
        showing(
            texts[1], (1, picture(loaded, name, 2, small=True)), (30, picture(loaded, name, 3))
        ),
        texts[2],
        showing(texts[3], (20, picture(loaded, name, 4))),
        showing(texts[4], (3, first)),
    ]


@pytest.fixture(scope="module")
def expected(opened: Callable[[str], Opened]) -> Expected:
    """Return what each request gets alone, computed once."""
    return answers_alone(opened, lambda name: requests(opened(name)[0], name))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def test_each_family_that_sees_has_shapes() -> None:
    assert set(NAMES) == SHAPES.keys()
    assert {name for name in NAMES if "video" in build(CONFIGS[name]).encoders} == FILMS.keys()


@pytest.mark.parametrize("name", DAILY)
def test_two_in_a_batch(opened: Callable[[str], Opened], name: str) -> None:
    loaded, config = opened(name)
    wanted = [replace(each, max_tokens=6) for each in requests(loaded, name)[:2]]
    got = SCENARIOS["batch of unequal lengths"](loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("format", [PLAIN, PAGE], ids=lambda format: format.name)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", NAMES)
def test_as_if_alone(
    opened: Callable[[str], Opened],
    expected: Expected,
    name: str,
    scenario: str,
    format: KVFormat,
) -> None:
    if scenario == "pre-empted and resumed" and format is PAGE:
        pytest.skip("the scenario's budget holds one sequence's tail, so that no two ever run")
    loaded, config = opened(name)
    wanted = requests(loaded, name)
    config = replace(config, kv_format=format, prefix_cache=False)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected(name, format), [request.id for request in wanted])


@pytest.mark.parametrize("name", SLOW)
def test_packed_pre_empted_and_resumed(opened: Callable[[str], Opened], name: str) -> None:
    loaded, config = opened(name)
    config = replace(config, kv_format=PAGE, prefix_cache=False)
    wanted = [replace(each, max_tokens=130) for each in requests(loaded, name)]
    got = under_pressure(loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [each.id for each in wanted])


@pytest.mark.parametrize("name", SLOW)
def test_pictures_count(opened: Callable[[str], Opened], name: str) -> None:
    """Other bytes of the same shape make another answer, else nothing here proves anything."""
    loaded, config = opened(name)
    (text,) = prompts((30,), 1)
    shown = [
        replace(showing(text, (5, picture(loaded, name, seed))), id=f"r{seed}") for seed in range(2)
    ]
    at = len(shown[0].prompt)
    first, second = (np.array(each.logits[at]) for each in alone(loaded, config, shown).values())
    assert np.abs(first - second).max() / np.abs(second).max() > 20 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("format", [PLAIN, PAGE], ids=lambda format: format.name)
@pytest.mark.parametrize(
    "scenario", ["batch of unequal lengths", "staggered arrivals", "in chunks of 33"]
)
@pytest.mark.parametrize("name", FILMS)
def test_videos(
    opened: Callable[[str], Opened], name: str, scenario: str, format: KVFormat
) -> None:
    loaded, config = opened(name)
    texts = prompts((40, 60, 50, 45), 24)
    first = film(loaded, name, 1)
    wanted = [
        showing(texts[0], (9, first), (9, film(loaded, name, 2))),
        showing(texts[1], (4, picture(loaded, name, 3)), (9, film(loaded, name, 4))),
        texts[2],
        showing(texts[3], (9, first)),
    ]
    config = replace(config, kv_format=format, prefix_cache=False)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("format", [PLAIN, PAGE], ids=lambda format: format.name)
@pytest.mark.parametrize("chunk", [2048, 33])
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "image") for name in NAMES), *((name, "video") for name in FILMS)]
)
def test_reused(
    opened: Callable[[str], Opened],
    name: str,
    kind: str,
    chunk: int,
    format: KVFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One picture with two questions is read once; another of its shape is never taken for it."""
    loaded, config = opened(name)
    config = replace(config, max_step_tokens=chunk, kv_format=format)
    texts = prompts((160, 160), 20)
    make = {"image": picture, "video": film}[kind]
    first, other = make(loaded, name, 1), make(loaded, name, 2)
    second = replace(texts[0], id="second", prompt=texts[0].prompt[:130] + texts[1].prompt[130:])
    third = replace(texts[0], id="third")
    asked = [showing(texts[0], (3, first)), showing(second, (3, first)), showing(third, (3, other))]
    cold = alone(loaded, config, asked)
    encoded = count_encodes(loaded, kind, monkeypatch)
    company = Company(loaded, config)
    for request in asked:
        company.run([request])
    assert len(encoded) == 2
    assert_same(company.answers, cold, ["r0", "second", "third"])
    reused = [company.answers[each.id].ends[0].cached_tokens for each in asked]
    whole = config.block_size if format is PAGE else 1  # coded blocks are shared whole
    shared = [each // whole * whole for each in (0, 3 + first.tokens + 127, 3)]
    if name in RECURRENT:
        assert all(found <= most for found, most in zip(reused, shared, strict=True))
    else:
        assert reused == shared
