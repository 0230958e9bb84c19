"""Described families that see, against transformers: rows, positions, logits and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.media import MediaItem, PlacedMedia
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.everyday import everyday
from tests.support.parity import TOLERANCE, answered
from tests.support.seeing import (
    BEGIN,
    CONFIGS,
    END,
    PATCH,
    PROMPTS,
    Prompt,
    film,
    heard_film,
    parts_of,
    picture,
    prompt,
    speech,
)
from tests.support.tiny_models import AUDIO, IMAGE, VIDEO

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

ANSWER = 12
MARKS = (IMAGE, VIDEO, AUDIO)
"""Tokens that stand for media, which no answer has."""
EVERY_CASE = ("qwen2_5_vl", "qwen3_vl")
GRIDS = ((2, 2), (6, 10), (4, 14), (8, 8), (2, 18))
Both = tuple[Any, LoadedModel]


def cases(names: Iterable[str], of: Iterable[str], daily: str) -> list[Any]:
    """Return all names with all cases. `daily` runs every day, and each case of `EVERY_CASE`."""
    return [
        pytest.param(
            name, case, marks=() if case == daily or name in EVERY_CASE else pytest.mark.slow
        )
        for name, case in product(names, of)
    ]


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


def inputs(
    name: str, loaded: LoadedModel, media: list[PlacedMedia], tokens: list[int]
) -> dict[str, Any]:
    """Return media as processors give it, and which tokens stand for it."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(kinds)}
    items = [part for each in media for part in parts_of(each.item)]
    for number, kind in enumerate(("image", "video", "audio"), start=1):
        for each in media:
            if each.item.kind == kind:
                kinds[0, each.start : each.end] = number
        if found := [item for item in items if item.kind == kind]:
            given |= (spectrograms if kind == "audio" else pixels)(loaded, found)
    if len(items) > len(media):
        given["use_audio_in_video"] = True
    as_text = isinstance(loaded.model, TextPositionsModel)
    if "audio" not in loaded.model.encoders and not as_text:  # others look for media's tokens
        given["mm_token_type_ids"] = kinds
    if name == "ernie4_5_vl_moe":  # what stands around media is of media, too
        ids = torch.tensor([tokens])
        given["moe_mm_token_type_ids"] = kinds + (ids == BEGIN) + (ids == END)
    return given


def spectrograms(loaded: LoadedModel, items: list[MediaItem]) -> dict[str, Any]:
    """Return spectrograms padded to the longest, and a mask of what is not padding."""
    longest, bins = max(item.shape[0] for item in items), items[0].shape[1]
    features = torch.zeros(len(items), bins, longest)
    mask = torch.zeros(len(items), longest, dtype=torch.long)
    for row, item in enumerate(items):
        values = np.frombuffer(item.features, np.float32).reshape(item.shape).T.copy()
        features[row, :, : item.shape[0]] = torch.from_numpy(values)
        mask[row, : item.shape[0]] = 1
    return {"input_features": features, "feature_attention_mask": mask}


def pixels(loaded: LoadedModel, items: list[MediaItem]) -> dict[str, Any]:
    """Return the pixels of items of one kind."""
    kind = loaded.model.encoders["image"].visual.kind
    still = items[0].kind == "image"
    parts = []
    for item in items:
        together = 1 if still else kind.frames
        raw = np.frombuffer(item.features, np.uint8).reshape(-1, together, PATCH, PATCH, 3)
        scaled = (raw / 255 - np.array(kind.colours.mean)) / np.array(kind.colours.std)
        if "video" not in loaded.model.encoders:  # row by row, not square by square
            rows, columns = kind.places(*item.shape)
            scaled = scaled[np.argsort(rows * item.shape[1] + columns)]
        frames = np.repeat(scaled, kind.frames, axis=1) if still else scaled
        parts.append(frames.transpose(0, 4, 1, 2, 3).reshape(len(raw), -1).astype(np.float32))
    values = torch.from_numpy(np.concatenate(parts))
    grids = torch.tensor([(1, *item.shape) if still else item.shape[:3] for item in items])
    if "video" not in loaded.model.encoders:
        values = values.reshape(len(values), 3, PATCH, PATCH)
    elif kind.frames == 1 and not still:
        grids[:, 0] *= 2
    if still:
        return {"pixel_values": values, "image_grid_thw": grids}
    videos = {"pixel_values_videos": values, "video_grid_thw": grids}
    if kind.times:
        seconds = [item.shape[3] / 1e6 for item in items]
        hears = "audio" in loaded.model.encoders
        videos |= (
            {"video_second_per_grid": torch.tensor(seconds)}
            if hears
            else {"second_per_grid_ts": seconds}
        )
    return videos


def levels(reference: Any, loaded: LoadedModel, item: MediaItem) -> list[Any]:
    """Return the outputs of transformers' encoder for an item, `[rows, hidden]` for each level."""
    if len(parts := parts_of(item)) > 1:
        (seen, *deeper), (heard,) = (levels(reference, loaded, part) for part in parts)
        (tokens, (placed,)) = prompt(item)
        of_sound = torch.tensor(tokens)[placed.start : placed.end] == AUDIO
        whole = [torch.zeros(item.tokens, seen.shape[1]) for _ in (seen, *deeper)]
        for level, rows in zip(whole, (seen, *deeper), strict=True):
            level[~of_sound] = rows
        whole[0][of_sound] = heard
        return whole
    given = (spectrograms if item.kind == "audio" else pixels)(loaded, [item])
    for key in ("second_per_grid_ts", "video_second_per_grid"):
        given.pop(key, None)
    with torch.no_grad():
        found = getattr(reference.model, f"get_{item.kind}_features")(**given)
    if item.kind == "audio":
        return [found.pooler_output]
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return [torch.cat(list(part)) for part in parts]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_pictures_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    for number, grid in enumerate(GRIDS):
        item = picture(number, *grid)
        ours = encoded(loaded.model.encoders["image"], item)
        for mine, other in zip(ours, levels(reference, loaded, item), strict=True):
            assert differ(mine, other) < 2e-4


def test_experts_as_wide_as_the_model_are_read(tmp_path: Path) -> None:
    """The experts' last matrices are square."""
    config = deepcopy(CONFIGS["qwen3_vl_moe"])
    config["text_config"] |= {"moe_intermediate_size": config["text_config"]["hidden_size"]}
    reference = oracle.save_random(AutoConfig.for_model(**config), tmp_path)
    tokens, _ = PROMPTS["text alone"]
    ours = solo_logits(open_model(str(tmp_path)).model, tokens)
    assert differ(ours, oracle.reference_logits(reference, tokens)) < 2e-4


WATCHING = [name for name in CONFIGS if name != "paddleocr_vl"]


@pytest.mark.parametrize("name", WATCHING)
def test_rows_of_videos_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    for number, grid in enumerate(((1, 2, 2), (3, 6, 10))):
        item = film(number, *grid)
        ours = encoded(loaded.model.encoders["video"], item)
        for mine, other in zip(ours, levels(reference, loaded, item), strict=True):
            assert differ(mine, other) < 2e-4


HEARING = ("qwen3_omni_moe_thinker",)
SOUNDS: dict[str, Prompt] = {
    "a sound": prompt(30, speech(3, 120), 11),
    "two of different lengths": prompt(5, speech(1, 230), 7, speech(2, 100), 29),
    "within a video": prompt(5, heard_film(film(5, 4, 4, 6, 530_000), speech(5, 230)), 20),
    "longer than its video, shorter than the next": prompt(
        heard_film(film(7, 2, 4, 44, 500_000), speech(6, 120)),
        9,
        picture(9, 6, 4),
        heard_film(film(8, 5, 2, 6, 1_000_000), speech(7, 130)),
        4,
        speech(8, 110),
        21,
    ),
    "beside a picture and a video": prompt(
        4,
        speech(3, 120),
        3,
        picture(8, 4, 6),
        5,
        film(4, 2, 4, 4, 1_000_000),
        2,
        speech(4, 310),
        23,
    ),
}


@pytest.mark.parametrize("name", HEARING)
def test_rows_of_sounds_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    encoder = loaded.model.encoders["audio"]
    for frames in (1, 8, 99, 100, 101, 200, 260, 500):
        item = speech(frames, frames)
        assert encoder.rows(item.shape) == item.tokens
        (ours,) = encoded(encoder, item)
        (theirs,) = levels(reference, loaded, item)
        assert differ(ours, theirs) < 2e-4


@pytest.mark.parametrize(("name", "case"), cases(HEARING, SOUNDS, daily="within a video"))
def test_sounds_match(opened: Callable[[str], Both], name: str, case: str) -> None:
    check(opened, name, *SOUNDS[case])


def videos(name: str) -> dict[str, Prompt]:
    """Return videos as the family has them: one item, or one for each moment, with text between."""
    if name in ("exaone4_5", "qwen2_vl", "qwen2_5_vl", "ernie4_5_vl_moe", *HEARING):
        return {
            "a video": prompt(4, film(1, 3, 6, 12), 9),
            "seconds apart": prompt(film(2, 2, 8, 4, 1_000_000), 20, film(3, 1, 2, 4), 5),
        }
    moments = [film(number, 1, 6, 8, 0) for number in range(3)]
    return {"a video": prompt(4, moments[0], 6, moments[1], 7, moments[2], 9)}


@pytest.mark.parametrize(
    "name", everyday(WATCHING, ("qwen2_5_vl", "qwen3_5", "ernie4_5_vl_moe").__contains__)
)
def test_videos_match(opened: Callable[[str], Both], name: str) -> None:
    for tokens, media in videos(name).values():
        check(opened, name, tokens, media)


@pytest.mark.parametrize(("name", "case"), cases(CONFIGS, PROMPTS, daily="in a second turn"))
def test_positions_logits_and_tokens_match(
    opened: Callable[[str], Both], name: str, case: str
) -> None:
    check(opened, name, *PROMPTS[case])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_narrow_checkpoints_are_computed_in_float32(name: str, dtype: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**deepcopy(CONFIGS[name]))
    both = oracle.save_random(config, tmp_path, dtype=getattr(torch, dtype))
    loaded = open_model(str(tmp_path))
    assert loaded.dtype == "float32"
    check(lambda _: (both, loaded), name, *PROMPTS["a picture"])


def their_positions(reference: Any, ids: Any, given: dict[str, Any]) -> np.ndarray:
    """Return transformers' positions `[3, tokens]`."""
    known = {key: value for key, value in given.items() if "pixel" not in key}
    if (mask := known.pop("feature_attention_mask", None)) is not None:
        known["audio_seqlens"] = mask.sum(-1)
        del known["input_features"]
    if (seconds := known.pop("video_second_per_grid", None)) is not None:
        known["second_per_grids"] = seconds
    theirs, _ = reference.model.get_rope_index(ids, **known)
    return theirs[:, 0].numpy()


def check(
    opened: Callable[[str], Both], name: str, tokens: list[int], media: list[PlacedMedia]
) -> None:
    """Positions, logits, and greedy tokens."""
    reference, loaded = opened(name)
    # Seven tokens a step: pictures are cut.
    answer = answered(loaded, tokens, media, ANSWER, never=MARKS).tokens
    before, tokens = len(tokens), tokens + answer
    given = inputs(name, loaded, media, tokens)
    ids = torch.tensor([tokens])
    if name.startswith("glm"):  # where transformers has one token for pictures and videos
        ids = torch.where(ids == VIDEO, IMAGE, ids)
    positions = loaded.model.positions(tokens, media)
    if positions is None:
        heard = {each.item.kind for each in media} <= {"audio"}
        assert heard or isinstance(loaded.model, TextPositionsModel)
    else:
        assert np.allclose(positions, their_positions(reference, ids, given), rtol=1e-6, atol=0)

    with torch.no_grad():
        logits = reference(ids, **given).logits[0]

    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    logits[:, list(MARKS)] = -torch.inf
    best = logits.argmax(dim=-1).tolist()[before - 1 : -1]
    assert answer == best, "each token is the best after those before it"
    assert len(set(answer)) > 2, "a degenerate continuation proves nothing"
