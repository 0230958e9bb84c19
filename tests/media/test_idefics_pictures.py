"""Pictures for Idefics 3 and SmolVLM: tiles, words and pixels as in transformers; settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.media.processors.base import MediaProcessor, Placeholders
from tests.media.test_images import encoded, noise
from tests.media.test_tiles import pixels, processor

CONFIG: dict[str, Any] = {
    "model_type": "smolvlm",
    "vision_config": {"model_type": "smolvlm_vision", "image_size": 56, "patch_size": 14},
    "image_token_id": 7,
    "scale_factor": 2,
}
SETTINGS: dict[str, Any] = {
    "do_image_splitting": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "max_image_size": {"longest_edge": 56},
    "resample": 1,
    "size": {"longest_edge": 224},
}
TYPE = {"image_processor_type": "SmolVLMImageProcessor"}
SIZES = [(56, 56), (1, 1), (7, 3), (160, 112), (112, 500), (640, 480), (481, 1023), (2, 300)]
SIGLIP = CONFIG | {"vision_config": CONFIG["vision_config"] | {"model_type": "siglip_vision_model"}}


def opened(path: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> MediaProcessor:
    return processor(path, config, SETTINGS | TYPE | changes)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"do_image_splitting": False}, {"size": {"longest_edge": 56}}, {"resample": 2}],
    ids=["tiles", "whole", "small", "linear"],
)
def test_pixels_are_transformers(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    kind = {"idefics3": "Idefics3ImageProcessor", "smolvlm": "SmolVLMImageProcessor"}[name]
    module = f"transformers.models.{name}.image_processing_pil_{name}"
    theirs = getattr(pytest.importorskip(module), f"{kind}Pil")(**SETTINGS | changes)
    ours = opened(tmp_path, **changes, image_processor_type=kind)
    assert ours.placeholders == Placeholders(7)
    draw = random.Random(2)
    sizes = [(int(10 ** draw.uniform(0, 3)), int(10 ** draw.uniform(0, 3))) for _ in range(12)]
    for seed, size in enumerate([*SIZES, *sizes]):
        picture = noise(*size, seed)
        parts = ours.read(encoded(picture), param="p")
        wanted = theirs.preprocess(picture, return_tensors="np")["pixel_values"][0]
        found = np.concatenate([pixels(part.item, SIGLIP) for part in parts])
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < 1e-3
        assert {(part.item.tokens, part.item.bidirectional) for part in parts} == {(4, False)}


@pytest.mark.parametrize("size", [(160, 112), (112, 500), (56, 56), (300, 2)])
def test_words_are_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    longest = {"longest_edge": 56 if size == (56, 56) else 224}
    parts = opened(tmp_path, size=longest).read(encoded(noise(*size)), param="p")
    columns = next((at for at, part in enumerate(parts, 1) if part.after == "\n"), 0)
    rows = (len(parts) - 1) // columns if columns else 0
    names = "<fake_token_around_image>", "*", "<global-img>"
    wanted = module.get_image_prompt_string(rows, columns, 4, *names)
    assert "".join(part.before + "*" * part.item.tokens + part.after for part in parts) == wanted
    assert len(parts) == rows * columns + 1


def test_fewer_tokens_are_fewer_tiles(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    data = encoded(noise(600, 400))

    def tokens(detail: Any) -> int:
        return sum(part.item.tokens for part in ours.read(data, param="p", detail=detail))

    assert [tokens(detail) for detail in ("high", "low", 4, 19, 20, 28, 51, 52, 999)] == [
        *(52, 4, 4, 4, 20, 28, 28, 52, 52)
    ]
    with pytest.raises(RequestError, match="max_soft_tokens is 3, and it takes at least 4"):
        tokens(3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": {"longest_edge": 4097}}, "size"),
        ({"size": {"height": 224, "width": 224}}, "size"),
        ({"max_image_size": {"longest_edge": 64}}, "max_image_size"),
        ({"resample": 0}, "resample"),
        ({"image_mean": [0.4] * 3}, "image_mean"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        opened(tmp_path, **changes)
