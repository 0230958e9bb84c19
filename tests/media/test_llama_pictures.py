"""Pictures for Llama 3.2 Vision: tiles and pixels as transformers has them, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.core.media import CLIP_COLOURS
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor
from tests.media.test_images import encoded, noise, read

TILE, PATCH = 56, 14
SETTINGS: dict[str, Any] = {
    "image_processor_type": "MllamaImageProcessor",
    "size": {"height": TILE, "width": TILE},
    "max_image_tiles": 4,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": list(CLIP_COLOURS.mean),
    "image_std": list(CLIP_COLOURS.std),
}
SIZES = [(56, 56), (20, 10), (500, 90), (90, 500), (113, 112), (112, 112), (3, 200), (57, 168)]


def opened(folder: Path, **changes: Any) -> MediaProcessor:
    vision = {"patch_size": PATCH, "image_size": TILE}
    config = {"model_type": "mllama", "vision_config": vision, "image_token_index": 9}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    processor = KINDS["image"].open(folder)
    assert processor is not None
    return processor


def test_tiles_and_pixels_match_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="transformers' processors need it")
    mllama = pytest.importorskip("transformers.models.mllama.image_processing_pil_mllama")
    known = {key: value for key, value in SETTINGS.items() if key != "image_processor_type"}
    theirs = mllama.MllamaImageProcessorPil(**known)
    ours = opened(tmp_path)
    for width, height in SIZES:
        picture = noise(width, height)
        given = theirs.preprocess(picture, return_tensors="np")
        item = read(ours, encoded(picture), param="p")
        shapes = [(a, b) for a in range(1, 5) for b in range(1, 5) if a * b <= 4]
        assert shapes[int(given["aspect_ratio_ids"][0, 0]) - 1] == item.shape
        count, side = item.shape[0] * item.shape[1], TILE // PATCH
        raw = np.frombuffer(item.features, np.uint8).reshape(count, side, side, PATCH, PATCH, 3)
        tiles = raw.transpose(0, 1, 3, 2, 4, 5).reshape(count, TILE, TILE, 3) / 255
        scaled = (tiles - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
        wanted = given["pixel_values"][0, 0, :count].transpose(0, 2, 3, 1)
        assert np.abs(scaled - wanted).max() < 1e-3


def test_low_detail_is_one_tile(tmp_path: Path) -> None:
    processor = opened(tmp_path)
    data = encoded(noise(500, 500))
    assert read(processor, data, param="p").shape == (2, 2)
    assert read(processor, data, param="p", detail="low").shape == (1, 1)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": {"height": 56, "width": 28}}, "squares"),
        ({"size": {"height": 28, "width": 28}}, "encoder's"),
        ({"size": 56}, "size"),
        ({"resample": 3}, "resample"),
        ({"image_std": [1, 1, 1]}, "image_std"),
    ],
)
def test_settings_that_are_not_known_are_named(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelError, match=word):
        opened(tmp_path, **changes)
