"""Pictures for Qwen2-VL and its heirs: sizes, layout, pixels as transformers has them, settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import CLIP_COLOURS, EVEN_COLOURS, Colours
from quire.media.kinds import KINDS
from quire.media.processors.base import Placeholders
from quire.media.processors.qwen import (
    ErnieImageProcessor,
    GlmImageProcessor,
    PaddleImageProcessor,
    QwenImageProcessor,
    fitted,
)
from tests.media.test_images import encoded, noise, read

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 100352,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": list(CLIP_COLOURS.mean),
    "image_std": list(CLIP_COLOURS.std),
}


def processor(**options: Any) -> QwenImageProcessor:
    options = {"patch": 14, "merge": 2, "pixels": (3136, 100352)} | options
    return QwenImageProcessor(Placeholders(7), **options)


def folder(path: Path, model_type: str = "qwen2_vl", **changes: Any) -> Path:
    config = {"model_type": model_type, "vision_config": {}, "image_token_id": 7}
    (path / "config.json").write_text(json.dumps(config))
    values = {key: value for key, value in (SETTINGS | changes).items() if value is not None}
    (path / "preprocessor_config.json").write_text(json.dumps(values))
    return path


def test_the_layout_of_patches() -> None:
    height, width = 56, 84
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(height)[:, None], np.arange(width)
    item = read(processor(), encoded(PIL.Image.fromarray(pixels)), param="p")
    assert (item.shape, item.tokens, item.bidirectional) == ((4, 6), 6, False)
    patches = np.frombuffer(item.features, np.uint8).reshape(24, 14, 14, 3)
    # The second square starts behind the four patches of the first, two columns further.
    assert patches[4, 0, 0].tolist() == [0, 28, 0]
    assert patches[6, 0, 0].tolist() == [14, 28, 0]
    assert patches[12, 3, 5].tolist() == [31, 5, 0]


def test_low_detail_takes_fewer_rows() -> None:
    large = processor(pixels=(3136, 28 * 28 * 1280))
    data = encoded(noise(1200, 900))
    low, high = (read(large, data, param="p", detail=detail) for detail in ("low", "high"))
    assert low.tokens <= 256 < high.tokens <= 1280


def test_a_strip_is_refused() -> None:
    read(processor(), encoded(noise(2000, 10)), param="p")
    with pytest.raises(RequestError, match="2001 x 10 pixels") as caught:
        read(processor(), encoded(noise(2001, 10)), param="p")
    assert caught.value.code == "media_invalid"


class TestAgainstTransformers:
    @pytest.mark.parametrize("colours", [CLIP_COLOURS, EVEN_COLOURS], ids=["clip", "even"])
    @pytest.mark.parametrize(
        ("patch", "pixels"), [(14, (3136, 100352)), (16, (65536, 200000)), (14, (56 * 56, 56 * 56))]
    )
    def test_pixels_grids_and_counts(
        self, patch: int, pixels: tuple[int, int], colours: Colours
    ) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        theirs = oracle.Qwen2VLImageProcessorPil(
            patch_size=patch,
            size={"shortest_edge": pixels[0], "longest_edge": pixels[1]},
            image_mean=list(colours.mean),
            image_std=list(colours.std),
        )
        ours = processor(patch=patch, pixels=pixels)
        sizes = [(1, 1), (7, 3), (56, 84), (112, 160), (640, 480), (481, 1023), (2000, 10)]
        for seed, (width, height) in enumerate(sizes):
            picture = noise(width, height, seed)
            out = theirs.preprocess(picture, return_tensors="np")
            item = read(ours, encoded(picture), param="p")
            assert [1, *item.shape] == out["image_grid_thw"][0].tolist()
            assert item.tokens == item.shape[0] * item.shape[1] // 4
            raw = np.frombuffer(item.features, np.uint8).reshape(-1, patch, patch, 3)
            scaled = (raw / 255 - np.array(colours.mean)) / np.array(colours.std)
            frames = np.repeat(scaled.transpose(0, 3, 1, 2)[:, :, None], 2, axis=2)
            assert np.abs(frames.reshape(len(raw), -1) - out["pixel_values"]).max() < 1e-3

    def test_glm_counts_a_picture_twice(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v")
        size = {"shortest_edge": 12544, "longest_edge": 400_000}
        theirs = oracle.Glm4vImageProcessorPil(size=size)
        ours = GlmImageProcessor(Placeholders(7), patch=14, merge=2, pixels=(12544, 400_000))
        for seed, (width, height) in enumerate([(9, 20), (28, 27), (160, 112), (640, 480)]):
            picture = noise(width, height, seed)
            out = theirs.preprocess(picture, return_tensors="np")
            (part,) = ours.read(encoded(picture), param="p")
            assert [1, *part.item.shape] == out["image_grid_thw"][0].tolist()
            raw = np.frombuffer(part.item.features, np.uint8).reshape(-1, 14, 14, 3)
            scaled = (raw / 255 - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
            frames = np.repeat(scaled.transpose(0, 3, 1, 2)[:, :, None], 2, axis=2)
            assert np.abs(frames.reshape(len(raw), -1) - out["pixel_values"]).max() < 1e-3

    def test_ernie(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip(
            "transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe"
        )
        theirs = oracle.Ernie4_5_VLMoeImageProcessorPil(
            size={"shortest_edge": 3136, "longest_edge": 400_000}
        )
        ours = ErnieImageProcessor(Placeholders(7), patch=14, merge=2, pixels=(3136, 400_000))
        for seed, (width, height) in enumerate([(30, 90), (160, 112), (900, 700)]):
            picture = noise(width, height, seed)
            out = theirs.preprocess(picture, return_tensors="np")
            item = read(ours, encoded(picture), param="p")
            assert [1, *item.shape] == out["image_grid_thw"][0].tolist()
            raw = np.frombuffer(item.features, np.uint8).reshape(-1, 14 * 14, 3)
            scaled = (raw / 255 - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
            planes = scaled.swapaxes(1, 2).reshape(len(raw), -1)
            assert np.abs(planes - out["pixel_values"]).max() < 1e-3

    def test_paddle_has_sizes_of_its_own(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip(
            "transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl"
        )
        size = {"shortest_edge": 147_384, "longest_edge": 400_000}
        halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        theirs = oracle.PaddleOCRVLImageProcessorPil(size=size, **halves)
        bounds = (size["shortest_edge"], size["longest_edge"])
        ours = PaddleImageProcessor(Placeholders(7), patch=14, merge=2, pixels=bounds)
        sizes = [(9, 20), (27, 300), (300, 11), (160, 112), (640, 480)]
        for seed, (width, height) in enumerate(sizes):
            picture = noise(width, height, seed)
            out = theirs.preprocess(picture, return_tensors="np")
            item = read(ours, encoded(picture), param="p")
            assert [1, *item.shape] == out["image_grid_thw"][0].tolist()
            squares = np.frombuffer(item.features, np.uint8).reshape(
                item.shape[0] // 2, item.shape[1] // 2, 2, 2, 14, 14, 3
            )
            rows = squares.transpose(0, 2, 1, 3, 6, 4, 5).reshape(-1, 3, 14, 14)
            assert np.abs(rows / 127.5 - 1 - out["pixel_values"]).max() < 1e-3

    def test_sizes(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        draw = random.Random(5)
        for _ in range(20_000):
            height, width = (int(10 ** draw.uniform(0, 4)) for _ in range(2))
            if max(height, width) > 200 * min(height, width):
                continue
            cell, least = draw.choice([28, 32]), draw.choice([3136, 65536])
            most = draw.choice([100_352, 1_003_520, 16_777_216])
            expected = oracle.smart_resize(height, width, cell, least, most)
            assert fitted(height, width, cell, least, most) == expected


class TestOpening:
    @pytest.mark.parametrize(
        "kind",
        ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor"],
    )
    def test_names(self, tmp_path: Path, kind: str) -> None:
        found = KINDS["image"].open(folder(tmp_path, image_processor_type=kind))
        assert found is not None
        assert found.placeholders == Placeholders(7)
        assert read(found, encoded(noise(600, 600)), param="p").tokens == 121

    @pytest.mark.parametrize(
        "changes",
        [
            {"size": {"min_pixels": 3136, "max_pixels": 100352}},
            {"size": {"shortest_edge": 3136, "longest_edge": 100352}},
        ],
    )
    def test_spellings_of_the_bounds(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        changes = {"min_pixels": None, "max_pixels": None} | changes
        found = KINDS["image"].open(folder(tmp_path, **changes))
        assert found is not None
        assert read(found, encoded(noise(600, 600)), param="p").tokens == 121

    def test_each_model_has_its_colours(self, tmp_path: Path) -> None:
        assert KINDS["image"].open(folder(tmp_path, "qwen3_vl", **HALVES)) is not None
        with pytest.raises(ModelError, match="image_mean"):
            KINDS["image"].open(folder(tmp_path, "qwen2_5_vl", **HALVES))
        with pytest.raises(ModelError, match="image_mean"):
            KINDS["image"].open(folder(tmp_path, "qwen3_5"))

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"min_pixels": 200_000}, "200000"),
            ({"min_pixels": 0}, "min_pixels"),
            ({"patch_size": "14"}, "patch_size"),
            ({"do_normalize": False}, "do_normalize"),
            ({"image_std": [0.5, 0.5]}, "image_std"),
            ({"image_mean": "x"}, "image_mean"),
        ],
    )
    def test_bad_values_are_named(self, tmp_path: Path, changes: dict[str, Any], word: str) -> None:
        with pytest.raises(ModelError, match=word):
            KINDS["image"].open(folder(tmp_path, **changes))


def test_ernies_own_folders_mark_pictures_by_a_text(tmp_path: Path) -> None:
    path = folder(tmp_path, image_processor_type="Ernie4_5_VLImageProcessor")
    config = {"model_type": "ernie4_5_moe_vl", "vision_config": {}, "im_patch_id": 9}
    (path / "config.json").write_text(json.dumps(config))
    found = KINDS["image"].open(path)
    assert isinstance(found, ErnieImageProcessor)
    assert found.placeholders == Placeholders(9, mark="<|image@placeholder|>")
