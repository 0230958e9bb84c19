"""Pictures for Mistral Small 3.1 and its heirs: sizes, rows and pixels as transformers has them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import CLIP_COLOURS
from quire.media.kinds import KINDS
from quire.media.processors.base import MediaProcessor, Placeholders
from tests.media.test_images import encoded, noise, read

CONFIG: dict[str, Any] = {
    "model_type": "mistral3",
    "image_token_index": 10,
    "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral", "patch_size": 14},
}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "image_mean": list(CLIP_COLOURS.mean),
    "image_std": list(CLIP_COLOURS.std),
    "patch_size": {"height": 14, "width": 14},
    "resample": 3,
    "size": {"longest_edge": 280},
}


def opened(path: Path, model_type: str = "mistral3", **changes: Any) -> MediaProcessor:
    (path / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    found = KINDS["image"].open(path)
    assert found is not None
    return found


def test_pixels_and_rows_are_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    words = pytest.importorskip("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    counting = object.__new__(words)
    counting.patch_size, counting.spatial_merge_size = 14, 2
    counting.image_token, counting.image_break_token = "*", "/"
    counting.image_end_token = "."
    theirs = oracle.PixtralImageProcessorPil(**SETTINGS)
    ours = opened(tmp_path)
    assert ours.placeholders == Placeholders(10)
    draw = random.Random(3)
    sizes = [(1, 1), (28, 29), (280, 280), (281, 140), (5, 900), (640, 480)]
    sizes += [(int(10 ** draw.uniform(0, 3)), int(10 ** draw.uniform(1, 3))) for _ in range(20)]
    for seed, (width, height) in enumerate(sizes):
        if max(width, height) > 200 * min(width, height):
            continue
        picture = noise(width, height, seed)
        item = read(ours, encoded(picture), param="p")
        # Its processor gives it the side of a square for that of a patch.
        out = theirs.preprocess(picture, return_tensors="np", patch_size=28)
        down, across = (side // 2 for side in item.shape)
        raw = np.frombuffer(item.features, np.uint8).reshape(down, across, 2, 2, 14, 14, 3)
        whole = raw.transpose(0, 2, 4, 1, 3, 5, 6).reshape(down * 28, across * 28, 3)
        scaled = (whole / 255 - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
        assert np.abs(scaled.transpose(2, 0, 1) - out["pixel_values"][0]).max() < 1e-3
        text = counting.replace_image_token({"image_sizes": out["image_sizes"]}, 0)
        assert (item.tokens, text.count("/")) == (len(text), down - 1)


@pytest.mark.parametrize(
    ("detail", "tokens"),
    [("auto", 8 * 11), ("low", 8 * 11), (88, 88), (87, 7 * 10), (20, 3 * 5), (6, 2 * 3), (2, 2)],
)
def test_fewer_tokens_are_smaller_pictures(tmp_path: Path, detail: Any, tokens: int) -> None:
    item = read(opened(tmp_path), encoded(noise(1000, 750)), param="p", detail=detail)
    assert item.tokens == tokens


def test_low_detail_and_least(tmp_path: Path) -> None:
    large = opened(tmp_path, size={"longest_edge": 1540})
    data = encoded(noise(1200, 900))
    tokens = [read(large, data, param="p", detail=each).tokens for each in ("low", "high")]
    assert tokens == [13 * 18, 33 * 44]
    with pytest.raises(RequestError, match="max_soft_tokens is 1, and it takes at least 2"):
        large.read(data, param="p", detail=1)


def test_lightons_lines_have_no_ends(tmp_path: Path) -> None:
    ours = opened(tmp_path, "lighton_ocr", patch_size={"height": 28, "width": 28})
    item = read(ours, encoded(noise(1000, 750)), param="p")
    assert (item.shape, item.tokens) == ((16, 20), 80)
    with pytest.raises(ModelError, match="patch_size = 14, and a row is of 28 by 28 pixels"):
        opened(tmp_path, "lighton_ocr", patch_size=14)
    with pytest.raises(ModelError, match="model_type = 'aya', whose pictures are not known"):
        opened(tmp_path, "aya")


def test_each_patch_of_pixtral_12b_is_a_row(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "spatial_merge_size"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    ours = KINDS["image"].open(tmp_path)
    assert ours is not None
    item = read(ours, encoded(noise(100, 50)), param="p")
    assert (item.shape, item.tokens) == ((4, 8), 4 * 9)


@pytest.mark.parametrize(
    "changes",
    [
        {"resample": 2},
        {"image_mean": [0.5] * 3},
        {"do_resize": False},
        {"size": {"height": 280, "width": 280}},
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        opened(tmp_path, **changes)
