"""Pictures for Kimi K2.5 and Kimi-VL: sizes, pixels, settings."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError
from quire.core.media import MediaItem
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor, Placeholders
from tests.media.test_images import encoded, noise

CONFIG: dict[str, Any] = {"model_type": "kimi_k25", "image_token_id": 7, "vision_config": {}}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"max_height": 40, "max_width": 40},
    "max_patches": 600,
}


def opened(path: Path, settings: dict[str, Any], config: dict[str, Any] = CONFIG) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = KINDS["image"].open(path)
    assert found is not None
    return found


def whole(item: MediaItem) -> np.ndarray:
    """Return an item's pixels, `[height, width, 3]`."""
    rows, columns = item.shape
    raw = np.frombuffer(item.features, np.uint8)
    squares = raw.reshape(rows // 2, columns // 2, 2, 2, 14, 14, 3)
    found: np.ndarray = squares.transpose(0, 2, 4, 1, 3, 5, 6)
    return found.reshape(rows * 14, columns * 14, 3)


@pytest.mark.parametrize(
    ("size", "patches"),
    [
        ((1, 1), (2, 2)),
        ((28, 28), (2, 2)),
        ((29, 28), (2, 4)),
        ((300, 200), (16, 22)),
        ((2000, 20), (2, 40)),
        ((1000, 1000), (26, 26)),
    ],
)
def test_pictures_keep_their_size_as_far_as_they_fit(
    tmp_path: Path, size: tuple[int, int], patches: tuple[int, int]
) -> None:
    ours = opened(tmp_path, SETTINGS)
    assert ours.placeholders == Placeholders(7)
    picture = noise(*size)
    (part,) = ours.read(encoded(picture), param="p")
    assert part.item.shape == patches
    assert part.item.tokens == patches[0] * patches[1] // 4
    if size == (300, 200):
        found = whole(part.item)
        assert np.array_equal(found[:200, :300], np.asarray(picture))
        assert not found[200:].any()
        assert not found[:, 300:].any()


@pytest.mark.parametrize(("detail", "patches"), [("low", (32, 32)), (4, (4, 4))])
def test_a_picture_of_low_detail_has_few_rows(
    tmp_path: Path, detail: Any, patches: tuple[int, int]
) -> None:
    settings = SETTINGS | {"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384}
    ours = opened(tmp_path, settings)
    (part,) = ours.read(encoded(noise(448 * 2, 448 * 2)), param="p", detail=detail)
    assert part.item.shape == patches


def test_pixels_are_transformers(tmp_path: Path) -> None:
    """Pixels differ by no more than torchvision's rounding from Pillow's."""
    pytest.importorskip("torchvision", exc_type=ImportError)
    module = pytest.importorskip("transformers.models.kimi_k25.image_processing_kimi_k25")
    theirs = module.Kimi_K25ImageProcessor(size=SETTINGS["size"], max_patches=600)
    ours = opened(tmp_path, SETTINGS)
    draw = random.Random(1)
    for seed in range(20):
        width, height = (int(10 ** draw.uniform(0.5, 3.2)) for _ in range(2))
        picture: PIL.Image.Image = noise(width, height, seed)
        (part,) = ours.read(encoded(picture), param="p")
        out = theirs.preprocess([picture], return_tensors="np")
        rows, columns = part.item.shape
        assert out["image_grid_thw"].tolist() == [[1, rows, columns]]
        patches = out["pixel_values"].reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2)
        expected = (patches.reshape(rows * 14, columns * 14, 3) + 1) * 127.5
        assert np.abs(whole(part.item) - expected).max() < 3


def test_published_keys_mean_the_same(tmp_path: Path) -> None:
    """Moonshot's processor has its own keys, and one token for all media."""
    media = {
        "in_patch_limit": 600,
        "patch_limit_on_one_side": 40,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fixed_output_tokens": None,
    }
    config = {"model_type": "kimi_k25", "media_placeholder_token_id": 7, "vision_config": {}}
    ours = opened(tmp_path, {"media_proc_cfg": media}, config)
    assert ours.placeholders == Placeholders(7)
    (part,) = ours.read(encoded(noise(1000, 1000)), param="p")
    assert part.item.shape == (26, 26)


KIMI_VL = {"model_type": "kimi_vl", "media_placeholder_token_id": 7, "vision_config": {}}
PUBLISHED = {
    "in_token_limit": 600,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "pad_input": True,
}


@pytest.mark.parametrize("size", [(300, 200), (28, 28), (1000, 900), (411, 1300)])
def test_pixels_of_kimi_vl_are_those_of_its_published_code(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    """It shrinks by Pillow, and pads with black on the right and below."""
    picture = noise(*size)
    (part,) = opened(tmp_path, PUBLISHED, KIMI_VL).read(encoded(picture), param="p")
    patches = (size[0] // 14) * (size[1] // 14)
    if patches > 600:
        scale = math.sqrt(600 / patches)
        width, height = (int(side * scale) for side in size)
        picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
    found = whole(part.item)
    padded = PIL.Image.new("RGB", found.shape[1::-1])
    padded.paste(picture, (0, 0))
    assert np.array_equal(found, np.asarray(padded))
    more = [found.shape[1] - picture.width, found.shape[0] - picture.height]
    assert all(0 <= each < 28 for each in more)


def test_kimi_vl_that_crops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pad_input"):
        opened(tmp_path, PUBLISHED | {"pad_input": False}, KIMI_VL)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
        ({"size": {"max_height": 40, "max_width": 41}}, "size.max_width = 41"),
        ({"media_proc_cfg": {"fixed_output_tokens": 4}}, "media_proc_cfg.fixed_output_tokens = 4"),
        ({"resample": 2}, "resample"),
    ],
)
def test_settings_that_ask_for_other_pixels_are_refused(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        opened(tmp_path, SETTINGS | settings)
