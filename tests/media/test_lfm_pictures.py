"""Pictures for LFM2-VL: sizes, tiles, words, pixels, settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.media.kinds import KINDS
from quire.media.parts import Parts
from quire.media.processors.base import MediaProcessor, Placeholders
from tests.media.test_images import encoded, noise
from tests.media.test_siglip_pictures import pixels

CONFIG: dict[str, Any] = {
    "model_type": "lfm2_vl",
    "image_token_id": 7,
    "downsample_factor": 2,
    "vision_config": {"model_type": "siglip2_vision_model", "patch_size": 16},
}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "do_resize": False,  # as published, and as nobody reads
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "max_num_patches": 1024,
}
SMALL = {"tile_size": 64, "min_image_tokens": 2, "max_image_tokens": 4}


def opened(path: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(config))
    settings = {key: each for key, each in (SETTINGS | changes).items() if each is not None}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = KINDS["image"].open(path)
    assert found is not None
    return found


def prepared(ours: MediaProcessor, width: int, height: int, detail: Any = "auto") -> Parts:
    return ours.read(encoded(noise(width, height)), param="p", detail=detail)


def whole(item: MediaItem) -> np.ndarray:
    """Return an item's pixels, `[height, width, 3]`."""
    rows, columns = item.shape
    raw = np.frombuffer(item.features, np.uint8)
    squares = raw.reshape(rows // 2, columns // 2, 2, 2, 16, 16, 3)
    found: np.ndarray = squares.transpose(0, 2, 4, 1, 3, 5, 6)
    return found.reshape(rows * 16, columns * 16, 3)


@pytest.mark.parametrize(
    ("size", "patches"),
    [
        ((700, 300), (18, 44)),
        ((29, 784), (84, 4)),
        ((24, 18), (14, 20)),
        ((1182, 110), (6, 74)),
        ((720, 720), (32, 32)),
        ((1, 1), (16, 16)),
    ],
)
def test_small_pictures_are_read_whole(
    tmp_path: Path, size: tuple[int, int], patches: tuple[int, int]
) -> None:
    """Small pictures have as many patches as in transformers."""
    ours = opened(tmp_path)
    assert ours.placeholders == Placeholders(7)
    (part,) = prepared(ours, *size)
    assert part.item.shape == patches
    assert part.item.tokens == patches[0] * patches[1] // 4
    assert (part.before, part.after) == ("<|image_start|>", "<|image_end|>")
    expected = pixels(noise(*size), patches[0] * 16, patches[1] * 16)
    assert np.abs(whole(part.item) / 127.5 - 1 - expected).max() < 1e-3


def test_large_pictures_become_tiles(tmp_path: Path) -> None:
    """The whole picture follows its tiles; text stands before each."""
    parts = prepared(opened(tmp_path, **SMALL), 130, 90)
    names = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2, 3)]
    starts = ["<|image_start|>" + names[0], *names[1:], "<|img_thumbnail|>"]
    assert [part.before for part in parts] == starts
    assert [part.after for part in parts] == [""] * 6 + ["<|image_end|>"]
    assert [part.item.shape for part in parts] == [(4, 4)] * 6 + [(2, 4)]
    assert [part.item.tokens for part in parts] == [4] * 6 + [2]
    tiles = [whole(part.item) for part in parts]
    grid = np.concatenate([np.concatenate(tiles[at : at + 3], axis=1) for at in (0, 3)])
    for found, (height, width) in ((grid, (128, 192)), (tiles[-1], (32, 64))):
        expected = pixels(noise(130, 90), height, width)
        assert np.abs(found / 127.5 - 1 - expected).max() < 1e-3
    parts = prepared(opened(tmp_path, **SMALL, use_thumbnail=False), 130, 90)
    assert [part.before for part in parts] == starts[:-1]
    assert parts[-1].after == "<|image_end|>"


@pytest.mark.parametrize(
    "changes", [{"do_image_splitting": False}, {"min_tiles": 1, "max_tiles": 1}]
)
def test_pictures_may_always_be_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    (part,) = prepared(opened(tmp_path, **SMALL, **changes), 130, 90)
    assert part.item.shape == (2, 4)


def test_words_and_numbers_are_transformers(tmp_path: Path) -> None:
    """Words and numbers in a picture's place are those of transformers' processor."""
    pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.lfm2_vl.processing_lfm2_vl").Lfm2VlProcessor
    words = object.__new__(theirs)
    for word in ("image_start", "image_end"):
        setattr(words, f"{word}_token", f"<|{word}|>")
    words.image_token, words.image_thumbnail_token = "*", "<|img_thumbnail|>"
    for size, down, across in (((130, 90), 2, 3), ((70, 40), 1, 1)):
        parts = prepared(opened(tmp_path, **SMALL), *size)
        text = "".join(part.before + "*" * part.item.tokens + part.after for part in parts)
        last = parts[-1].item.tokens
        assert text == words._build_image_tokens(down, across, 4, last, True, True)


def test_pixels_are_transformers(tmp_path: Path) -> None:
    """Pixels differ by at most the last bit, in which torchvision and Pillow round differently."""
    pytest.importorskip("torchvision", exc_type=ImportError)
    module = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    theirs = pytest.importorskip(module).Lfm2VlImageProcessor()
    ours = opened(tmp_path)
    draw = random.Random(1)
    for seed in range(30):
        width, height = (int(10 ** draw.uniform(1.2, 3.2)) for _ in range(2))
        picture: PIL.Image.Image = noise(width, height, seed)
        parts = ours.read(encoded(picture), param="p")
        out = theirs.preprocess([[picture]], return_tensors="np")
        assert [list(part.item.shape) for part in parts] == out["spatial_shapes"].tolist()
        for part, patches in zip(parts, out["pixel_values"], strict=True):
            rows, columns = part.item.shape
            grid = patches[: rows * columns].reshape(rows, columns, 16, 16, 3).swapaxes(1, 2)
            wanted = grid.reshape(rows * 16, columns * 16, 3)
            assert np.abs(whole(part.item) - 127.5 * (wanted + 1)).max() < 1.01


@pytest.mark.parametrize(
    ("detail", "tokens"),
    [("low", 26), (1, 1), (2, 1), (9, 2), (10, 10), (19, 18), (26, 26), (1000, 26)],
)
def test_fewer_tokens_are_fewer_tiles(tmp_path: Path, detail: Any, tokens: int) -> None:
    parts = prepared(opened(tmp_path, **SMALL), 130, 90, detail)
    assert sum(part.item.tokens for part in parts) == tokens


def test_low_detail_is_no_tiles(tmp_path: Path) -> None:
    (part,) = prepared(opened(tmp_path), 1200, 900, "low")
    assert part.item.tokens == 13 * 18


def test_a_strip_has_no_fewer_tokens_than_lie_along_it(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    assert prepared(ours, 9, 1700, 60)[0].item.shape == (2 * 53, 2)
    with pytest.raises(RequestError, match="max_soft_tokens is 3, and it takes at least"):
        prepared(ours, 9, 1700, 3)
    with pytest.raises(RequestError, match="one side is over 200"):
        prepared(ours, 9, 1801)


@pytest.mark.parametrize("model_type", ["lfm2_vl", "lfm2-vl"])
def test_conversions_that_name_no_processor_are_read(tmp_path: Path, model_type: str) -> None:
    config = CONFIG | {"model_type": model_type, "image_token_index": 9, "image_token_id": None}
    ours = opened(tmp_path, config, image_processor_type=None)
    assert ours.placeholders.token == 9
    assert len(prepared(ours, 800, 800)) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"resample": 0},
        {"image_mean": [0.4] * 3},
        {"do_normalize": False},
        {"encoder_patch_size": 14},
        {"downsample_factor": 3},
        {"tile_size": 500},
        {"min_tiles": 11},
        {"min_image_tokens": 257},
        {"max_pixels_tolerance": 0},
        {"use_image_special_tokens": False},
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        opened(tmp_path, **changes)
