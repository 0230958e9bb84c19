"""Random schedules of requests with pictures, sounds and videos, each in a KV format of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.core.kv_choice import parse_format
from quire.core.media import MediaItem
from quire.models.weights.loader import LoadedModel
from tests.engine.test_seeing_parity import CONFIGS as SEEING
from tests.engine.test_seeing_parity import FILMS, SHAPES, film, picture
from tests.engine.test_sound_parity import FAMILIES as HEARING
from tests.engine.test_sound_parity import MARKS
from tests.support import crossing, seeing
from tests.support.parity import Opened, opener
from tests.support.schedules import Schedule, deviation
from tests.support.seeing import heard_film, speech

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECURRENT, LOOKING = "qwen3_5", "mllama"
SEEN = tuple(name for name in SHAPES if not name.startswith(("multi_modality", "qwen3_omni")))
"""The others' decoders and encoders are among these and those that hear."""
NAMES = (*SEEN, *HEARING, RECURRENT, LOOKING)
FORMATS = [
    parse_format(name)
    for name in ("page-4", "plain", "page-4", "page-8", "turbo-4", "uniform-8", "plain-bfloat16")
]
SEEDS = range(8)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    heard = {name: family.config for name, family in HEARING.items()}
    return opener(tmp_path_factory.mktemp("media"), SEEING | heard)


def items(loaded: LoadedModel, name: str) -> list[MediaItem]:
    """Return a family's items; the first and the last of the pictures have one shape."""
    if name == LOOKING:
        return [crossing.picture(n, *grid) for n, grid in enumerate(((2, 2), (1, 3), (2, 2)))]
    if name == RECURRENT:
        pictures = [seeing.picture(n, 6, size) for n, size in enumerate((10, 4, 10))]
        return [*pictures, seeing.film(3, 1, 6, 8, 0)]
    if name in HEARING:
        own = HEARING[name]
        more = [heard_film(own.watch(2, 4, 4), speech(5, 120))] if name == "Qwen3-Omni" else []
        return [own.see(1, 4, 10), own.hear(3, 200), own.see(2, 4, 10), own.hear(4, 90), *more]
    pictures = [picture(loaded, name, n, small=n == 2) for n in (1, 2, 3)]
    return [*pictures, *([film(loaded, name, 4)] if name in FILMS else [])]


def stands(item: MediaItem, name: str) -> list[int]:
    """Return the tokens in an item's place."""
    if name == LOOKING:
        return [crossing.MARK]
    if len(seeing.parts_of(item)) > 1:
        return seeing.prompt(item)[0][2:-2]
    return [MARKS[item.kind]] * item.tokens


@pytest.mark.parametrize("name", NAMES)
def test_as_if_alone(opened: Callable[[str], Opened], name: str) -> None:
    loaded, config = opened(name)
    files = items(loaded, name)
    for seed in SEEDS:
        schedule = Schedule.draw(seed).with_files(
            seed, files, lambda item: stands(item, name), FORMATS
        )
        # What is looked at takes room of its own, whatever the length.
        tight = name != LOOKING and seed % 2 == 1
        got = deviation(schedule, loaded, schedule.tight(loaded, config) if tight else config)
        assert got.within, f"{seed} {name}: {got}"
