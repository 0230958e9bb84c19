"""Described families that see, against transformers: rows, positions, logits and tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.media import MediaItem, PlacedMedia
from quire.models.base import MediaRows
from quire.models.loader import LoadedModel, open_model
from tests.models.solo import SoloStep, encoded, marked_rows, solo_logits
from tests.support.parity import TOLERANCE, Company, prompts
from tests.support.seeing import CONFIGS, PATCH, PROMPTS, Prompt, film, picture, prompt

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

ANSWER = 12
WATCHING = [name for name in CONFIGS if not name.startswith("glm")]
GRIDS = ((2, 2), (6, 10), (4, 14), (8, 8), (2, 18))
Both = tuple[Any, LoadedModel]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp(name))
            config = AutoConfig.for_model(**deepcopy(CONFIGS[name]))
            known[name] = oracle.save_random(config, folder), open_model(str(folder))
        return known[name]

    return find


def inputs(loaded: LoadedModel, media: list[PlacedMedia], tokens: list[int]) -> dict[str, Any]:
    """Pictures as image processors give them, and which tokens stand for them."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    given: dict[str, Any] = {"mm_token_type_ids": kinds}
    for number, kind in enumerate(("image", "video"), start=1):
        found = [each for each in media if each.item.kind == kind]
        for each in found:
            kinds[0, each.start : each.end] = number
        if found:
            given |= pixels(loaded, [each.item for each in found])
    return given


def pixels(loaded: LoadedModel, items: list[MediaItem]) -> dict[str, Any]:
    """Of items of one kind."""
    kind = loaded.model.encoders["image"].visual.kind
    still = items[0].kind == "image"
    parts = []
    for item in items:
        raw = np.frombuffer(item.features, np.uint8).reshape(-1, 1 if still else 2, PATCH, PATCH, 3)
        scaled = (raw / 255 - np.array(kind.colours.mean)) / np.array(kind.colours.std)
        frames = np.repeat(scaled, 2, axis=1) if still else scaled
        parts.append(frames.transpose(0, 4, 1, 2, 3).reshape(len(raw), -1).astype(np.float32))
    values = torch.from_numpy(np.concatenate(parts))
    grids = torch.tensor([(1, *item.shape) if still else item.shape[:3] for item in items])
    if still:
        return {"pixel_values": values, "image_grid_thw": grids}
    videos = {"pixel_values_videos": values, "video_grid_thw": grids}
    if kind.times:
        videos["second_per_grid_ts"] = [item.shape[3] / 1e6 for item in items]
    return videos


def differ(ours: mx.array, theirs: Any) -> float:
    found = np.array(ours)
    wanted = theirs.float().numpy()
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def levels(reference: Any, loaded: LoadedModel, items: list[MediaItem]) -> list[Any]:
    """What their encoder makes of pictures, `[rows, hidden]` a level."""
    given = pixels(loaded, items)
    given.pop("second_per_grid_ts", None)
    see = getattr(reference.model, f"get_{items[0].kind}_features")
    with torch.no_grad():
        found = see(**given)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return [torch.cat(list(part)) for part in parts]


def logits_of_their_rows(
    reference: Any, loaded: LoadedModel, tokens: list[int], media: list[PlacedMedia]
) -> mx.array:
    first, *deeper = (
        mx.array(level.numpy())
        for level in levels(reference, loaded, [each.item for each in media])
    )
    rows = MediaRows(marked_rows(media), first, tuple(deeper))
    model = loaded.model
    step = SoloStep(model.layout, tokens, rows, media, model.positions(tokens, media))
    return model.logits(model(step))


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_pictures_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    for number, grid in enumerate(GRIDS):
        item = picture(number, *grid)
        ours = encoded(loaded.model.encoders["image"], item)
        for mine, other in zip(ours, levels(reference, loaded, [item]), strict=True):
            assert differ(mine, other) < 2e-4


@pytest.mark.parametrize("name", WATCHING)
def test_rows_of_videos_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    for number, grid in enumerate(((1, 2, 2), (3, 6, 10))):
        item = film(number, *grid)
        ours = encoded(loaded.model.encoders["video"], item)
        for mine, other in zip(ours, levels(reference, loaded, [item]), strict=True):
            assert differ(mine, other) < 2e-4


def videos(name: str) -> dict[str, Prompt]:
    """As the family has them: one item, or one for each moment, with text between."""
    if CONFIGS[name]["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        return {
            "a video": prompt(4, film(1, 3, 6, 12), 9),
            "seconds apart": prompt(film(2, 2, 8, 4, 1_000_000), 20, film(3, 1, 2, 4), 5),
        }
    moments = [film(number, 1, 6, 8, 0) for number in range(3)]
    return {"a video": prompt(4, moments[0], 6, moments[1], 7, moments[2], 9)}


@pytest.mark.parametrize("name", WATCHING)
def test_videos_match(opened: Callable[[str], Both], name: str) -> None:
    for tokens, media in videos(name).values():
        check(opened, name, tokens, media)


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_positions_logits_and_tokens_match(
    opened: Callable[[str], Both], name: str, case: str
) -> None:
    check(opened, name, *PROMPTS[case])


def check(
    opened: Callable[[str], Both], name: str, tokens: list[int], media: list[PlacedMedia]
) -> None:
    """Positions, logits, and greedy tokens."""
    reference, loaded = opened(name)
    given = inputs(loaded, media, tokens)
    ids = torch.tensor([tokens])
    positions = loaded.model.positions(tokens, media)
    if media:
        known = {key: value for key, value in given.items() if "pixel" not in key}
        theirs, _ = reference.model.get_rope_index(ids, **known)
        assert np.array_equal(positions, theirs[:, 0].numpy())
    else:
        assert positions is None

    with torch.no_grad():
        logits = reference(ids, **given).logits[0]
        greedy = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )[0, len(tokens) :].tolist()

    if media:  # random layers make much of the encoder's rounding, so theirs are placed, too
        assert differ(logits_of_their_rows(reference, loaded, tokens, media), logits) < TOLERANCE
    bound = 5 * TOLERANCE if media else TOLERANCE
    assert differ(solo_logits(loaded.model, tokens, media), logits) < bound
    (request,) = prompts([1], tokens=ANSWER)
    asked = replace(request, prompt=tuple(tokens), media=tuple(media))
    # Seven tokens a step: pictures are cut.
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=7)
    assert Company(loaded, config).run([asked])[request.id].tokens == greedy
    assert len(set(greedy)) > 2, "a degenerate continuation proves nothing"
