"""Pictures for DeepSeek-OCR 1 and 2: sizes, layout, pixels, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor
from quire.media.source import Detail
from tests.media.test_images import encoded
from tests.support.ocr import CONFIGS
from tests.support.photographs import photograph

FIRST = CONFIGS["deepseek_vl_v2"]
SECOND = {"model_type": "deepseek_ocr2", "image_token_id": 7, "vision_config": {"sam_config": {}}}
SETTINGS = {
    "image_processor_type": "DeepseekOcr2ImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": 1024, "width": 1024},
    "tile_size": 768,
    "background_color": [127, 127, 127],
}
SIZES = ((640, 480), (641, 100), (1200, 900), (333, 1501), (1000, 1000), (90, 20))
"""Width and height."""


def published(name: str) -> dict[str, Any]:
    """Return DeepSeek's configuration, with its own sizes of pictures."""
    config = json.loads(json.dumps(CONFIGS[name]))
    del config["vision_config"]["width"]["sam_vit_b"]["image_size"]
    del config["vision_config"]["width"]["sam_vit_b"]["patch_size"]
    found: dict[str, Any] = config
    return found


def opened(path: Path, config: dict[str, Any], settings: dict[str, Any] | None) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = KINDS["image"].open(path)
    assert found is not None
    return found


def shown(processor: MediaProcessor, size: tuple[int, int], detail: Detail = "auto") -> MediaItem:
    (part,) = processor.read(encoded(photograph(size)), param="image", detail=detail)
    return part.item


def views(item: MediaItem, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tiles `[tiles, tile, tile, 3]`, and the whole picture."""
    count = item.shape[0] * item.shape[1]
    raw = np.frombuffer(item.features, np.uint8)

    def whole(part: np.ndarray, side: int) -> np.ndarray:
        grid = part.reshape(-1, side // 16, side // 16, 16, 16, 3).swapaxes(2, 3)
        return grid.reshape(-1, side, side, 3)

    cut = count * tile**2 * 3
    return whole(raw[:cut], tile), whole(raw[cut:], 1024)[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "tile"), [("deepseek_vl_v2", 640), ("deepseek_vl_v2-queries", 768)]
)
def test_pixels_are_those_of_the_published_code(
    tmp_path: Path, name: str, tile: int, size: tuple[int, int]
) -> None:
    """It pads by Pillow, and cuts what it has resized."""
    item = shown(opened(tmp_path, published(name), None), size)
    picture, (tiles, whole) = photograph(size), views(item, tile)
    assert np.array_equal(
        whole, np.asarray(PIL.ImageOps.pad(picture, (1024, 1024), color=(127,) * 3))
    )
    down, across = item.shape
    assert (down > 0) == (max(size) > tile)
    assert down * across <= (9 if tile == 640 else 6)
    if down:
        large = np.asarray(picture.resize((across * tile, down * tile)))
        for number, found in enumerate(tiles):
            row, column = divmod(number, across)
            part = large[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            assert np.array_equal(found, part)
    side, ends = tile // 64, int(tile == 640)
    assert item.tokens == down * side * (across * side + ends) + 16 * (16 + ends) + 1


@pytest.mark.oracle
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("torch", reason="the oracle needs torch")
    from transformers import DeepseekOcr2ImageProcessorPil

    item = shown(opened(tmp_path, SECOND, SETTINGS), size)
    tiles, whole = views(item, 768)
    found = DeepseekOcr2ImageProcessorPil()(photograph(size), return_tensors="np")
    assert found["num_local_patches"][0] == len(tiles)
    seen = np.asarray(found["pixel_values"][0]).transpose(1, 2, 0)
    assert np.abs(whole / 127.5 - 1 - seen).max() < 1e-3
    if len(tiles):
        cut = np.asarray(found["pixel_values_local"]).transpose(0, 2, 3, 1)
        assert np.abs(tiles / 127.5 - 1 - cut).max() < 1e-3


def test_a_picture_takes_no_more_tokens_than_it_may(tmp_path: Path) -> None:
    processor = opened(tmp_path, published("deepseek_vl_v2"), None)
    assert shown(processor, (1200, 900)).tokens > 600
    assert 273 < shown(processor, (1200, 900), detail=600).tokens <= 600
    assert shown(processor, (1200, 900), detail="low").tokens == 273
    with pytest.raises(RequestError, match="at least 273"):
        shown(processor, (1200, 900), detail=200)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tile_size": 640}, "tile_size = 640"),
        ({"size": {"height": 512, "width": 512}}, "takes 1024 by 1024"),
        ({"crop_to_patches": False}, "crop_to_patches"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
    ],
)
def test_other_pixels_are_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        opened(tmp_path, SECOND, SETTINGS | changes)
