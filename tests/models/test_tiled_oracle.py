"""Families that see tiles, against transformers: rows, logits and greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.media import MediaItem, PlacedMedia
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.parity import TOLERANCE, answered
from tests.support.seeing import prompt
from tests.support.tiled import (
    CONFIGS,
    IN_GRIDS,
    OTHER_DECODERS,
    SIZES,
    TILE,
    cases,
    film,
    in_grid,
    tiles,
)

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

ANSWER = 8
DAILY = "two of different sizes"
Both = tuple[Any, LoadedModel]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp(name))
            config = AutoConfig.for_model(**deepcopy((CONFIGS | OTHER_DECODERS)[name]))
            reference = oracle.save_random(config, folder)
            if name == "llama4":
                reference.language_model.register_forward_hook(_without_images)
            known[name] = reference, open_model(str(folder))
        return known[name]

    return find


def _without_images(module: Any, given: Any, output: Any) -> None:
    """Give Llama 4's decoder's output the field that transformers 5.24 reads from it."""
    output.image_outputs = None


def pixels(loaded: LoadedModel, items: list[MediaItem]) -> Any:
    """Return tiles as image processors give them, `[tiles, 3, TILE, TILE]`."""
    kind = loaded.model.encoders["image"].visual.kind
    colours, side, patch = kind.colours, kind.side, kind.patch
    raw = np.frombuffer(b"".join(item.features for item in items), np.uint8)
    grid = raw.reshape(-1, side, side, patch, patch, 3).swapaxes(2, 3)
    scaled = (grid.reshape(-1, TILE, TILE, 3) / 255 - np.array(colours.mean)) / colours.std
    return torch.from_numpy(scaled.transpose(0, 3, 1, 2).astype(np.float32))


def pictures(loaded: LoadedModel, items: list[MediaItem]) -> dict[str, Any]:
    """Return pictures as their image processor gives them."""
    if not items:
        return {}
    name = loaded.config["model_type"]
    if name in ("idefics3", "smolvlm"):  # all tiles of a prompt
        return {"pixel_values": pixels(loaded, items)[None]}
    if name not in IN_GRIDS:
        return {"pixel_values": pixels(loaded, items)}
    # A padded batch, and the sizes that the grids follow from.
    each = [pixels(loaded, [item]) for item in items]
    most = max(map(len, each))
    padded = [torch.cat([one, torch.zeros(most - len(one), *one.shape[1:])]) for one in each]
    sizes = {in_grid(name, seed).digest: size for seed, size in enumerate(SIZES, start=1)}
    found = torch.tensor([sizes[item.digest] for item in items])
    return {"pixel_values": torch.stack(padded), "image_sizes": found}


def inputs(loaded: LoadedModel, tokens: list[int], media: list[PlacedMedia]) -> dict[str, Any]:
    """Return inputs as transformers' processor gives them."""
    if not media:
        return {}
    given = pictures(loaded, [each.item for each in media if each.item.kind == "image"])
    films = [each.item for each in media if each.item.kind == "video"]
    if films:
        given["pixel_values_videos"] = torch.stack([pixels(loaded, [film]) for film in films])
    if loaded.config["model_type"] == "gemma3":
        kinds = torch.zeros(1, len(tokens), dtype=torch.long)
        for each in media:
            kinds[0, each.start : each.end] = 1
        given["token_type_ids"] = kinds
    return given


def rows_of(reference: Any, loaded: LoadedModel, item: MediaItem) -> Any:
    """Return what their encoder makes of a picture, `[rows, hidden]`."""
    given = pictures(loaded, [item])
    with torch.no_grad():
        if loaded.config["model_type"] == "llama4":  # whose encoder leaves the last layer out
            inner = reference.get_image_features(**given).last_hidden_state
            found = reference.multi_modal_projector(inner)
        else:
            found = reference.model.get_image_features(**given).pooler_output
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    items = [placed.item for _, media in cases(name).values() for placed in media]
    for item in items:
        encoder = loaded.model.encoders["image"]
        (ours,) = encoded(encoder, item)
        theirs = rows_of(reference, loaded, item) * encoder.visual.multiplier
        assert differ(ours, theirs) < 2e-4


def watched(name: str) -> tuple[list[int], list[PlacedMedia]]:
    """Return a video: all frames are one item; of InternVL, each is an item in a picture's
    place.
    """
    if name == "llava_onevision":
        return prompt(4, film(1, 3), 9, in_grid(name, 3), 5)
    tokens, media = prompt(4, *(tiles(seed, 1, whole=False) for seed in range(3)), 9)
    frames = [replace(each.item, kind="video") for each in media]
    return tokens, [replace(each, item=item) for each, item in zip(media, frames, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        "llava_onevision",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("internvl", "internvl-norms")),
    ],
)
def test_videos_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    tokens, media = watched(name)
    videos = [each.item for each in media if each.item.kind == "video"]
    given = inputs(loaded, tokens, media)
    if name != "llava_onevision":
        given = {"pixel_values": given["pixel_values_videos"].flatten(0, 1)}
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), **given).logits[0]
        if name == "llava_onevision":
            found = reference.model.get_video_features(given["pixel_values_videos"])
        else:
            found = reference.model.get_image_features(**given)
    rows = list(found.pooler_output)
    for item, theirs in zip(videos, rows, strict=True):
        (ours,) = encoded(loaded.model.encoders["video"], item)
        assert differ(ours, theirs.reshape(len(ours), -1)) < 2e-4
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    greedy = oracle.reference_greedy(reference, tokens, ANSWER, **given)
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy


def every_case() -> list[Any]:
    """Return all cases. `DAILY` of each family runs every day, and of one family on another's
    decoder.
    """
    daily = {*CONFIGS, "internvl-gpt_oss"}
    return [
        pytest.param(name, case, marks=() if name in daily and case == DAILY else pytest.mark.slow)
        for name, case in product(CONFIGS | OTHER_DECODERS, cases("gemma3"))
    ]


@pytest.mark.parametrize(("name", "case"), every_case())
def test_logits_and_tokens_match(opened: Callable[[str], Both], name: str, case: str) -> None:
    reference, loaded = opened(name)
    tokens, media = cases(name)[case]
    given, ids = inputs(loaded, tokens, media), torch.tensor([tokens])
    with torch.no_grad():
        logits = reference(ids, **given).logits[0]
        greedy = oracle.reference_greedy(reference, tokens, ANSWER, **given)

    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    # Seven tokens a step: pictures are cut, where their rows do not see each other.
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"


def test_internlm3_within_internvl(tmp_path: Path) -> None:
    """Transformers lacks that decoder: it is a Llama whose projections all have biases."""
    biases = {"attention_bias": True, "mlp_bias": True}
    text = {**CONFIGS["llava"]["text_config"], **biases}
    config = AutoConfig.for_model(**deepcopy(CONFIGS["internvl"] | {"text_config": text}))
    reference = oracle.save_random(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in saved["text_config"].items() if key not in biases}
    own = {"model_type": "internlm3", "bias": True, "qkv_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(saved | {"text_config": kept | own}))
    loaded = open_model(str(tmp_path))

    tokens, media = cases("internvl")[DAILY]
    given = inputs(loaded, tokens, media)
    logits, greedy = oracle.reference_answer(reference, tokens, ANSWER, **given)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
