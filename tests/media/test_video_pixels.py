"""Pixels of videos against transformers' processors, which need torchvision.

Where frames have the size that they are brought to, pixels are equal. Where not, torchvision's
bicubic filter and Pillow's differ by a step of 255 in some pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.core.media import CLIP_COLOURS, EVEN_COLOURS, Colours
from quire.media.kinds import KINDS
from quire.media.parts import Parts
from quire.media.processors.base import VideoProcessor
from quire.media.video import Frame, VideoInfo
from tests.media.test_images import noise
from tests.media.test_qwen_videos import ERNIE, GLM, QWEN2, QWEN3
from tests.media.test_tiles import (
    INTERNVL,
    INTERNVL_SETTINGS,
    ONEVISION,
    ONEVISION_SETTINGS,
    pixels,
)

pytest.importorskip("torchvision", reason="transformers reads videos with it")
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = [pytest.mark.slow, pytest.mark.oracle]

Values = npt.NDArray[np.float64]
FRAMES, FPS = 5, 2.0
STEP = 1 / 255


def opened(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> VideoProcessor:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": settings}))
    found = KINDS["video"].open(folder)
    assert isinstance(found, VideoProcessor)
    return found


def watched(ours: VideoProcessor, size: tuple[int, int], count: int) -> tuple[Parts, Any]:
    """Return the features of a video of noise, and the video, `[frames, 3, height, width]`."""
    pictures = [noise(*size, seed) for seed in range(count)]
    frames = (Frame(index, picture) for index, picture in enumerate(pictures))
    parts = ours.preprocess(VideoInfo(count, FPS), frames, count, "p", "auto")
    video = np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)
    return parts, torch.from_numpy(video.copy())


def check(ours: Values, theirs: Any, colours: Colours, *, fits: bool) -> None:
    """Pixels scaled by `colours`."""
    wanted = np.asarray(theirs, dtype=np.float64)
    assert ours.shape == wanted.shape
    bound = 1e-3 if fits else 1e-3 + 2 * STEP / min(colours.std)
    assert np.abs(ours - wanted).max() < bound


def theirs_of(module: str, kind: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a processor of transformers, which takes all frames of a video."""
    found = pytest.importorskip(f"transformers.models.{module}.video_processing_{module}")
    processor = getattr(found, kind)(**settings)
    return lambda video: processor.preprocess([video], do_sample_frames=False, return_tensors="pt")


PATCHED: dict[str, tuple[str, dict[str, Any], str, str, Colours]] = {
    "Qwen2-VL": ("qwen2_5_vl", QWEN2, "qwen2_vl", "Qwen2VLVideoProcessor", CLIP_COLOURS),
    "Qwen3-VL": ("qwen3_vl", QWEN3, "qwen3_vl", "Qwen3VLVideoProcessor", EVEN_COLOURS),
    "GLM-4.1V": ("glm4v", GLM, "glm4v", "Glm4vVideoProcessor", CLIP_COLOURS),
    "GLM-4.6V": (
        "glm_ocr",
        GLM | {"video_processor_type": "Glm46VVideoProcessor"},
        "glm46v",
        "Glm46VVideoProcessor",
        CLIP_COLOURS,
    ),
}


@pytest.mark.parametrize("count", [2, 4, FRAMES])
@pytest.mark.parametrize("size", [(448, 336), (448, 448), (300, 211)])
@pytest.mark.parametrize("name", PATCHED)
def test_patches_of_moments(tmp_path: Path, name: str, size: tuple[int, int], count: int) -> None:
    model_type, settings, module, kind, colours = PATCHED[name]
    config = {"model_type": model_type, "vision_config": {}, "video_token_id": 8}
    parts, video = watched(opened(tmp_path, config, settings), size, count)
    capped = {"cap_pixels_per_frame": True} if name.startswith("Qwen") else {}
    given = {key: value for key, value in settings.items() if key != "video_processor_type"}
    out = theirs_of(module, kind, **given, **capped)(video)

    patch = settings.get("patch_size", 14)
    moments, rows, columns = out["video_grid_thw"][0].tolist()
    assert sum(part.item.shape[0] for part in parts) == moments
    assert {part.item.shape[1:3] for part in parts} == {(rows, columns)}
    assert sum(part.item.tokens for part in parts) == moments * rows * columns // 4
    raw = np.frombuffer(b"".join(part.item.features for part in parts), np.uint8)
    frames = raw.reshape(-1, 2, patch, patch, 3) / 255
    scaled = (frames - np.array(colours.mean)) / np.array(colours.std)
    found = scaled.transpose(0, 4, 1, 2, 3).reshape(len(frames), -1)
    fits = size == (columns * patch, rows * patch)
    check(found, out["pixel_values_videos"], colours, fits=fits)


@pytest.mark.parametrize("size", [(560, 420), (600, 411)])
def test_patches_of_ernie(tmp_path: Path, size: tuple[int, int]) -> None:
    config = {"model_type": "ernie4_5_vl_moe", "vision_config": {}, "video_token_id": 8}
    plain = ERNIE | {"draw_on_frames": False}
    parts, video = watched(opened(tmp_path, config, plain), size, FRAMES)
    found = pytest.importorskip(
        "transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe"
    )
    theirs = found.Ernie4_5_VLMoeVideoProcessor(size=ERNIE["size"])
    out = theirs.preprocess(
        [video], do_sample_frames=False, draw_on_frames=False, return_tensors="pt"
    )
    (item,) = (part.item for part in parts)
    moments, rows, columns = out["video_grid_thw"][0].tolist()
    assert (2 * item.shape[0], *item.shape[1:3]) == (moments, rows, columns)
    frames = np.frombuffer(item.features, np.uint8).reshape(-1, 14, 14, 3) / 255
    scaled = (frames - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
    ours = scaled.transpose(0, 3, 1, 2).reshape(len(frames), -1)
    fits = size == (columns * 14, rows * 14)
    check(ours, out["pixel_values_videos"], CLIP_COLOURS, fits=fits)


@pytest.mark.parametrize("size", [(480, 336), (300, 211)])
def test_patches_of_gemma4(tmp_path: Path, size: tuple[int, int]) -> None:
    config = {"model_type": "gemma4", "vision_config": {}, "boi_token_id": 5, "eoi_token_id": 6}
    settings = {"video_processor_type": "Gemma4VideoProcessor", "max_soft_tokens": 70}
    parts, video = watched(opened(tmp_path, config, settings), size, FRAMES)
    out = theirs_of("gemma4", "Gemma4VideoProcessor")(video)
    assert len(parts) == FRAMES
    for number, part in enumerate(parts):
        rows, columns = part.item.shape
        ours = np.frombuffer(part.item.features, np.uint8).reshape(rows * columns, -1) / 255
        places = out["video_position_ids"][number]
        assert int((places[:, 0] >= 0).sum()) == len(ours)
        assert (places[: len(ours)].amax(dim=0) + 1).tolist() == [columns, rows]
        assert part.item.tokens == int(out["num_soft_tokens_per_video"][0])
        plain = Colours((0.0,) * 3, (1.0,) * 3)
        fits = size == (16 * columns, 16 * rows)
        check(ours, out["pixel_values_videos"][number][: len(ours)], plain, fits=fits)


TILED = {
    "LLaVA-OneVision": (
        ONEVISION,
        ONEVISION_SETTINGS,
        "llava_onevision",
        "LlavaOnevisionVideoProcessor",
    ),
    "InternVL": (INTERNVL, INTERNVL_SETTINGS, "internvl", "InternVLVideoProcessor"),
}


@pytest.mark.parametrize("size", [(56, 56), (90, 50)])
@pytest.mark.parametrize("name", TILED)
def test_frames_as_tiles(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    config, settings, module, kind = TILED[name]
    settings = {key: settings[key] for key in ("image_mean", "image_std", "size")}
    named = settings | {"video_processor_type": kind}
    parts, video = watched(opened(tmp_path, config, named), size, FRAMES)
    out = theirs_of(module, kind, **settings)(video)["pixel_values_videos"][0]
    found = np.concatenate([pixels(part.item, config) for part in parts])
    colours = Colours(settings["image_mean"], settings["image_std"])
    check(found, out, colours, fits=size == (56, 56))
