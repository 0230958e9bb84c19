"""Pictures for Llama 4: canvases, pixels and words as transformers has them; settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.media.parts import Parts
from quire.media.processors.base import MediaProcessor, Placeholders
from quire.serving.placing import MediaPlaces
from quire.text.template import ChatTemplate
from tests.media.test_images import encoded, noise
from tests.media.test_tiles import processor

TILE, PATCH = 56, 14
CONFIG: dict[str, Any] = {
    "model_type": "llama4",
    "vision_config": {
        "model_type": "llama4_vision_model",
        "image_size": TILE,
        "patch_size": PATCH,
        "pixel_shuffle_ratio": 0.5,
    },
    "image_token_index": 7,
}
SETTINGS: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "max_patches": 16,
    "resample": 2,
    "size": {"height": TILE, "width": TILE},
    "resize_to_max_canvas": False,
}
TYPE = {"image_processor_type": "Llama4ImageProcessorFast"}
X, Y = "<|tile_x_separator|>", "<|tile_y_separator|>"
SIZES = [(56, 56), (1, 1), (20, 10), (3, 200), (57, 168), (112, 112), (160, 112), (500, 90)]
LARGE = [(640, 480), (481, 1023), (300, 290), (1000, 60)]


def opened(path: Path, **changes: Any) -> MediaProcessor:
    return processor(path, CONFIG, SETTINGS | TYPE | changes)


def spelled(parts: Parts) -> str:
    return "".join(part.before + "*" * part.item.tokens + part.after for part in parts)


def pixels(parts: Parts) -> np.ndarray:
    """Return all tiles, from -1 to 1, `[tiles, 3, TILE, TILE]`."""
    side = TILE // PATCH
    raw = np.frombuffer(b"".join(part.item.features for part in parts), np.uint8)
    grid = raw.reshape(-1, side, side, PATCH, PATCH, 3).transpose(0, 5, 1, 3, 2, 4)
    scaled: np.ndarray = grid.reshape(-1, 3, TILE, TILE) / 127.5 - 1
    return scaled


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((10, 20), (1, 1)),
        ((57, 57), (2, 2)),
        ((57, 20), (1, 2)),
        ((20, 57), (2, 1)),
        ((112, 112), (2, 2)),
        ((500, 90), (2, 8)),  # too long for any, and these shrink it least
        ((60, 1000), (16, 1)),
    ],
)
def test_a_picture_is_on_the_canvas_that_fits_it(
    tmp_path: Path, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    (down, across), tile = grid, "*" * 4
    parts = opened(tmp_path).read(encoded(noise(*size)), param="p")
    lines = (X.join([tile] * across) + Y) * down if down * across > 1 else ""
    assert spelled(parts) == f"<|image_start|>{lines}<|image|>{tile}<|image_end|>"
    assert {(part.item.tokens, part.item.bidirectional) for part in parts} == {(4, False)}


def test_a_picture_lies_in_the_upper_left_of_black(tmp_path: Path) -> None:
    picture = noise(56, 30)
    (tile,) = pixels(opened(tmp_path).read(encoded(picture), param="p"))
    assert np.abs(tile[:, :30] * 127.5 + 127.5 - np.asarray(picture).transpose(2, 0, 1)).max() < 1
    assert (tile[:, 30:] == -1).all()


@pytest.mark.parametrize("changes", [{}, {"max_patches": 4}])
def test_pixels_and_words_are_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("torchvision", reason="transformers' processor needs it")
    folder = "transformers.models.llama4"
    theirs = pytest.importorskip(f"{folder}.image_processing_llama4").Llama4ImageProcessor(
        **SETTINGS | changes
    )
    words = pytest.importorskip(f"{folder}.processing_llama4").Llama4Processor._prompt_split_image
    ours = opened(tmp_path, **changes)
    assert ours.placeholders == Placeholders(7, mark="<|image|>")
    for seed, size in enumerate([*SIZES, *LARGE]):
        picture = noise(*size, seed)
        parts = ours.read(encoded(picture), param="p")
        given = theirs.preprocess([picture], return_tensors="pt")
        wanted = given["pixel_values"].float().numpy()
        found = pixels(parts)
        assert found.shape == wanted.shape
        # A level is 0.0078; bfloat16 rounds to half of one.
        assert np.abs(found - wanted).max() < 0.0125
        text = words(SimpleNamespace(), given["aspect_ratios"][0].tolist(), 4)
        assert spelled(parts) == text.replace("<|patch|>", "*")


def test_the_published_template_marks_pictures(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="transformers' processors need it")
    theirs = pytest.importorskip("transformers.models.llama4.processing_llama4")
    template = ChatTemplate({"default": theirs.chat_template}, {"bos_token": "<s>"})
    ours = opened(tmp_path)
    parts = ours.read(encoded(noise(10, 20)), param="p")
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    rendered = template.render([{"role": "user", "content": content}])
    assert MediaPlaces({"image": ours}, {"image": "<|patch|>"}).spell(rendered, [parts]) == (
        "<s><|header_start|>user<|header_end|>\n\n<|image_start|><|image|><|patch|><|image_end|>"
        "What is it?<|eot|><|header_start|>assistant<|header_end|>\n\n"
    )


def test_fewer_tokens_are_fewer_tiles(tmp_path: Path) -> None:
    ours = opened(tmp_path)
    data = encoded(noise(300, 290))

    def tokens(detail: Any) -> int:
        return sum(part.item.tokens for part in ours.read(data, param="p", detail=detail))

    details = ("high", "low", 4, 7, 20, 39, 40, 67, 68, 999)
    assert [tokens(detail) for detail in details] == [68, 4, 4, 4, 20, 28, 40, 52, 68, 68]
    with pytest.raises(RequestError, match="max_soft_tokens is 3, and it takes at least 4"):
        tokens(3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"size": {"height": 336, "width": 336}}, "size"),
        ({"resample": 3}, "resample"),
        ({"resize_to_max_canvas": True}, "resize_to_max_canvas"),
        ({"max_patches": 0}, "max_patches"),
        ({"image_mean": [0.4] * 3}, "image_mean"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        opened(tmp_path, **changes)
