"""Pictures and videos for MiniCPM-V 4.6: sizes, slices, words, pixels, frames, settings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.media.kinds import KINDS
from quire.media.parts import Parts
from quire.media.processors.base import MediaProcessor, Placeholders
from quire.media.processors.minicpm import MiniCpmVideoProcessor
from quire.media.video import Frame, VideoInfo
from tests.media.test_images import encoded, noise

CONFIG: dict[str, Any] = {
    "model_type": "minicpmv4_6",
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_config": {"patch_size": 14},
}
COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def find(kind: str = "image", config: dict[str, Any] = CONFIG, **settings: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        key = f"{kind}_processor_type"
        name = f"MiniCPMV4_6{kind.capitalize()}Processor"
        file = {"image": "preprocessor", "video": "video_preprocessor"}[kind]
        values = {key: name} | COLOURS | settings
        (tmp_path / f"{file}_config.json").write_text(json.dumps(values))
        return KINDS[kind].open(tmp_path)

    return find


def whole(item: MediaItem, merge: int = 4) -> np.ndarray:
    """Return an item's pixels, `[height, width, 3]`."""
    rows, columns = item.shape
    raw = np.frombuffer(item.features, np.uint8)
    squares = raw.reshape(rows // merge, columns // merge, merge, merge, 14, 14, 3)
    found: np.ndarray = squares.transpose(0, 2, 4, 1, 3, 5, 6)
    return found.reshape(rows * 14, columns * 14, 3)


def prepared(ours: MediaProcessor, width: int, height: int, detail: Any = "auto") -> Parts:
    return ours.read(encoded(noise(width, height)), param="p", detail=detail)


def spelled(parts: Parts) -> str:
    return "".join(part.before + "*" * part.item.tokens + part.after for part in parts)


def test_small_pictures_are_enlarged_and_not_sliced(opened: Open) -> None:
    ours = opened()
    assert ours.placeholders == Placeholders(7, numbered="<image_id>{}</image_id>")
    (part,) = prepared(ours, 100, 50)
    assert part.item.shape == (24, 44)
    assert (part.before, part.after) == ("<image>", "</image>")
    assert part.item.tokens == 24 * 44 // 16


def test_large_pictures_are_followed_by_slices(opened: Open) -> None:
    parts = prepared(opened(), 900, 700)
    assert [part.item.shape for part in parts] == [(28, 36)] + [(28, 36)] * 4
    assert [part.before for part in parts] == ["<image>"] + ["<slice>"] * 4
    after = ["</image>", "</slice>", "</slice>\n", "</slice>", "</slice>"]
    assert [part.after for part in parts] == after


@pytest.mark.parametrize("settings", [{}, {"max_slice_nums": 3}, {"slice_mode": False}])
@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_pixels_and_words_are_transformers(
    opened: Open, mode: str, settings: dict[str, Any]
) -> None:
    pytest.importorskip("torch")
    folder = "transformers.models.minicpmv4_6"
    theirs = pytest.importorskip(f"{folder}.image_processing_pil_minicpmv4_6")
    processing = pytest.importorskip(f"{folder}.processing_minicpmv4_6")
    pixels = theirs.MiniCPMV4_6ImageProcessorPil(downsample_mode=mode, **settings)
    words = object.__new__(processing.MiniCPMV4_6Processor)
    words.slice_mode = pixels.slice_mode
    words.image_token = "*"
    for word in ("image", "slice"):
        setattr(words, f"{word}_start_token", f"<{word}>")
        setattr(words, f"{word}_end_token", f"</{word}>")
    changed = settings | {"downsample_mode": mode}
    ours = opened(config=CONFIG | {"downsample_mode": mode}, **changed)
    merge, draw = (2 if mode == "4x" else 4), random.Random(1)
    for seed in range(12):
        width, height = (int(10 ** draw.uniform(1.2, 3.1)) for _ in range(2))
        picture: PIL.Image.Image = noise(width, height, seed)
        parts = ours.read(encoded(picture), param="p")
        out = pixels.preprocess([picture], return_tensors="np")
        assert [list(part.item.shape) for part in parts] == out["target_sizes"].tolist()
        text = words.replace_image_token(out, 0, image_token_divisor=merge**2)
        assert spelled(parts) == text
        done = 0
        for part in parts:
            rows, columns = part.item.shape
            end = done + rows * columns * 14
            grid = out["pixel_values"][0, :, :, done:end].reshape(3, 14, rows, columns, 14)
            wanted = grid.transpose(2, 1, 3, 4, 0).reshape(rows * 14, columns * 14, 3)
            assert np.abs(whole(part.item, merge) - 127.5 * (wanted + 1)).max() < 0.01
            done = end


@pytest.mark.parametrize(
    ("detail", "shapes"),
    [
        ("low", 1),
        (63, 1),  # 63 rows for the whole picture, and as many for each slice
        (4 * 63, 4),
        (5 * 63 - 1, 4),
        (5 * 63, 5),
        (5000, 5),
    ],
)
def test_rows_are_limited_by_fewer_slices(opened: Open, detail: Any, shapes: int) -> None:
    parts = prepared(opened(), 900, 700, detail)
    assert len(parts) <= shapes
    if isinstance(detail, int):
        assert sum(part.item.tokens for part in parts) <= detail
    assert (len(parts) == 1) == (shapes == 1)


def test_too_few_rows_are_refused(opened: Open) -> None:
    with pytest.raises(RequestError, match="max_soft_tokens is 62, and it takes at least 63"):
        prepared(opened(), 900, 700, 62)


def test_files_may_go_without_numbers(opened: Open) -> None:
    assert opened(use_image_id=False).placeholders == Placeholders(7)


@pytest.mark.parametrize(("frames", "fps"), [(1, 25.0), (24, 25.0), (250, 24.97), (9000, 29.97)])
@pytest.mark.parametrize("most", [16, 128])
def test_frames_are_transformers(opened: Open, frames: int, fps: float, most: int) -> None:
    pytest.importorskip("torch")
    module = "transformers.models.minicpmv4_6.video_processing_minicpmv4_6"
    theirs = object.__new__(pytest.importorskip(module).MiniCPMV4_6VideoProcessor)
    ours: MiniCpmVideoProcessor = opened("video", max_num_frames=most)
    data = SimpleNamespace(total_num_frames=frames, fps=fps, duration=frames / fps)
    found = ours.sample_frames(VideoInfo(frames, fps), 1000)
    assert list(found) == theirs.sample_frames(data, max_num_frames=most, stack_frames=1)
    assert len(ours.sample_frames(VideoInfo(frames, fps), 5)) <= 5


def test_each_frame_is_like_a_picture(opened: Open) -> None:
    ours = opened("video", max_slice_nums=2)
    assert ours.placeholders.token == 8
    pictures = [noise(900, 500, seed) for seed in range(2)]
    frames = (Frame(number, each) for number, each in enumerate(pictures))
    parts = ours.preprocess(VideoInfo(2, 1.0), frames, 2, param="p", detail="auto")
    alone = [opened(max_slice_nums=2).read(encoded(each), param="p") for each in pictures]
    assert spelled(parts) == "".join(map(spelled, alone))
    assert [part.item.features for part in parts] == [
        part.item.features for one in alone for part in one
    ]
    assert {part.item.kind for part in parts} == {"video"}


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("image", {"patch_size": 16}, "patch_size"),
        ("image", {"downsample_mode": "4x"}, "downsample_mode"),
        ("image", {"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
        ("image", {"max_slice_nums": 0}, "max_slice_nums"),
        ("video", {"stack_frames": 2}, "stack_frames"),
        ("video", {"do_sample_frames": False}, "do_sample_frames"),
    ],
)
def test_other_pixels_are_refused(
    opened: Open, kind: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        opened(kind, **settings)
