"""Pictures as tiles: pixels, sizes and words as transformers has them; settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import TOWER_COLOURS, MediaItem
from quire.media.processors import KINDS, MediaProcessor
from tests.media.test_images import encoded, noise

SIGLIP = {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": SIGLIP,
    "mm_tokens_per_image": 4,
    "image_token_index": 7,
}
GEMMA3_SETTINGS: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
    "size": {"height": 56, "width": 56},
}
SIZES = [(56, 56), (1, 1), (7, 3), (160, 112), (112, 500), (640, 480), (481, 1023)]


def processor(
    path: Path, config: dict[str, Any], settings: dict[str, Any], kind: str = "image"
) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = KINDS[kind].open(path)
    assert found is not None
    return found


def pixels(item: MediaItem, config: dict[str, Any]) -> np.ndarray:
    """An item's tiles as transformers gives them, `[tiles, 3, seen, seen]`."""
    vision = config["vision_config"]
    side, patch = vision["image_size"] // vision["patch_size"], vision["patch_size"]
    raw = np.frombuffer(item.features, np.uint8).reshape(-1, side, side, patch, patch, 3)
    tiles = raw.swapaxes(2, 3).reshape(len(raw), side * patch, side * patch, 3)
    colours = TOWER_COLOURS[vision["model_type"]]
    scaled: np.ndarray = (tiles / 255 - np.array(colours.mean)) / colours.std
    return scaled.transpose(0, 3, 1, 2)


def test_gemma3_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    theirs = oracle.Gemma3ImageProcessorPil(**GEMMA3_SETTINGS)
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS)
    for seed, size in enumerate(SIZES):
        picture = noise(*size, seed)
        (part,) = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"]
        assert np.abs(pixels(part.item, GEMMA3) - wanted).max() < 1e-3
        assert (part.item.tokens, part.item.bidirectional) == (4, True)
        assert (part.before, part.after) == ("\n\n<start_of_image>", "<end_of_image>\n\n")


def test_a_picture_cannot_take_fewer_tokens_than_a_tile(tmp_path: Path) -> None:
    ours = processor(tmp_path, GEMMA3, GEMMA3_SETTINGS)
    with pytest.raises(RequestError, match="max_soft_tokens is 3"):
        ours.read(encoded(noise(9, 9)), param="p", detail=3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": {"height": 56, "width": 28}}, "size"),
        ({"size": {"height": 28, "width": 28}}, "56 by 56"),
        ({"resample": 0}, "resample"),
        ({"image_mean": [0.4] * 3}, "image_mean"),
        ({"do_resize": None}, "do_resize"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        processor(tmp_path, GEMMA3, GEMMA3_SETTINGS | changes)
