"""Pictures for Youtu-VL and Phi-4: sizes, layout, pixels, settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor, Placeholders
from quire.media.processors.siglip import filling, shrunk
from tests.media.test_images import encoded, noise, read

CONFIGS: dict[str, dict[str, Any]] = {
    "youtu_vl": {
        "model_type": "youtu_vl",
        "image_token_id": 7,
        "vision_config": {"model_type": "siglip2_vision_model", "patch_size": 16},
    },
    "phi4-siglip": {
        "model_type": "phi4-siglip",
        "pad_token_id": 7,
        "min_num_patches": 16,
        "max_num_patches": 60,
        "vision_config": {"model_type": "siglip2_vision_model"},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "youtu_vl": {
        "image_processor_type": "Siglip2ImageProcessorFast",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_num_patches": 256,
        "patch_size": 16,
        "resample": 2,
    },
    "phi4-siglip": {
        "image_processor_type": "Siglip2ImageProcessorNoUpscale",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_num_patches": 3600,
        "min_num_patches": 256,
        "patch_size": 16,
        "resample": 2,
    },
}


def opened(path: Path, name: str, **changes: Any) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    values = {k: v for k, v in (SETTINGS[name] | changes).items() if v is not None}
    (path / "preprocessor_config.json").write_text(json.dumps(values))
    found = KINDS["image"].open(path)
    assert found is not None
    return found


def pixels(picture: PIL.Image.Image, height: int, width: int) -> np.ndarray:
    """Return an image resized and scaled by transformers, `[height, width, 3]`."""
    pytest.importorskip("torch")
    transforms = pytest.importorskip("transformers.image_transforms")
    last = {"input_data_format": "channels_last"}
    whole = transforms.resize(np.asarray(picture), (height, width), resample=2, **last)
    scaled = transforms.normalize(whole / 255, [0.5] * 3, [0.5] * 3, **last)
    assert scaled.shape == (height, width, 3)
    return np.array(scaled)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((1, 1), (32, 32)),
        ((33, 64), (64, 64)),  # rounded up, and no further
        ((480, 640), (480, 640)),
        ((4000, 3000), (3520, 2656)),  # by 0.88, the first that fits
        ((2, 40_000), (32, 40_000)),
    ],
)
def test_youtu_shrinks_large_pictures(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert shrunk(*size, 32, 36_864 * 16**2) == wanted


def test_youtus_pixels_come_square_by_square(tmp_path: Path) -> None:
    processor = opened(tmp_path, "youtu_vl")
    assert processor.placeholders == Placeholders(7)
    for seed, (width, height) in enumerate([(9, 70), (100, 50), (64, 96), (301, 255)]):
        picture = noise(width, height, seed)
        item = read(processor, encoded(picture), param="p")
        rows, columns = item.shape
        assert (rows * 16, columns * 16) == shrunk(height, width, 32, 36_864 * 256)
        assert item.tokens == rows * columns // 4
        squares = np.frombuffer(item.features, np.uint8).reshape(
            rows // 2, columns // 2, 2, 2, 16, 16, 3
        )
        whole = squares.transpose(0, 2, 4, 1, 3, 5, 6).reshape(rows * 16, columns * 16, 3)
        expected = pixels(picture, rows * 16, columns * 16)
        assert np.abs(whole / 127.5 - 1 - expected).max() < 1e-3


def test_phis_pixels_fill_as_many_patches_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.siglip2.image_processing_pil_siglip2")
    processor = opened(tmp_path, "phi4-siglip")
    assert processor.placeholders == Placeholders(7, mark="<image>")
    sizes = {(9, 70): 16, (100, 50): 18, (70, 96): 24, (301, 255): 60, (16, 3000): 60, (1, 1): 16}
    for seed, ((width, height), most) in enumerate(sizes.items()):
        picture = noise(width, height, seed)
        theirs = oracle.Siglip2ImageProcessorPil(max_num_patches=most)
        out = theirs.preprocess(picture, return_tensors="np")
        item = read(processor, encoded(picture), param="p")
        assert list(item.shape) == out["spatial_shapes"][0].tolist()
        raw = np.frombuffer(item.features, np.uint8).reshape(item.tokens, -1)
        assert np.abs(raw / 127.5 - 1 - out["pixel_values"][0][: item.tokens]).max() < 1e-3


def test_phis_sizes_are_transformers() -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.siglip2.image_processing_pil_siglip2")
    draw = random.Random(5)
    for _ in range(2000):
        height, width = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
        most = draw.choice([256, 1000, 3600])
        wanted = oracle.get_image_size_for_max_num_patches(height, width, 16, most)
        assert filling(height, width, 16, most) == wanted


def test_low_detail_takes_fewer_rows(tmp_path: Path) -> None:
    data = encoded(noise(1200, 900))
    processor = opened(tmp_path, "youtu_vl")
    low, high = (read(processor, data, param="p", detail=detail) for detail in ("low", "high"))
    assert low.tokens <= 256 < high.tokens == 38 * 29


def test_bounds_of_patches_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS["phi4-siglip"], "min_num_patches", 61)
    with pytest.raises(ModelError, match="min_num_patches = 61, over max_num_patches, 60"):
        opened(tmp_path, "phi4-siglip")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "changes", [{"resample": 3}, {"image_mean": [0.4] * 3}, {"do_resize": False}]
)
def test_other_pixels_are_refused(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        opened(tmp_path, name, **changes)
