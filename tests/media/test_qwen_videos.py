"""Videos for Qwen2-VL and its heirs: frames, sizes, items and times."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.ImageFont
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.media.kinds import KINDS
from quire.media.processors.base import Placeholders, VideoProcessor
from quire.media.processors.glm_video import GlmVideoProcessor
from quire.media.processors.qwen import fitted
from quire.media.source import FileLimits
from quire.media.video import VideoInfo
from tests.media.files import greys, tone, video

QWEN2: dict[str, Any] = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 768},
}
GLM: dict[str, Any] = {
    "video_processor_type": "Glm4vVideoProcessor",
    "size": {"shortest_edge": 12544, "longest_edge": 47_040_000},
}
QWEN3: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
}


def opened(folder: Path, model_type: str, values: dict[str, Any]) -> VideoProcessor:
    config = {"model_type": model_type, "vision_config": {}, "video_token_id": 8}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(values))
    found = KINDS["video"].open(folder)
    assert isinstance(found, VideoProcessor)
    return found


OMNI: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
}


def omni(folder: Path) -> VideoProcessor:
    """Return the video processor of a folder like the published Qwen3-Omni."""
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_config": {},
        "vision_config": {},
        "audio_token_id": 9,
        "video_token_id": 8,
        "position_id_per_seconds": 13,
    }
    (folder / "config.json").write_text(json.dumps({"thinker_config": thinker}))
    (folder / "preprocessor_config.json").write_text(json.dumps(OMNI))
    found = KINDS["video"].open(folder)
    assert isinstance(found, VideoProcessor)
    return found


def test_a_video_is_heard_where_that_is_asked_for(tmp_path: Path) -> None:
    ours = omni(tmp_path)
    data = video(greys(40, (128, 96)), sound=tone(3.2))  # four seconds
    (silent,) = ours.read(data, param="p")
    assert (silent.before, silent.after, silent.item.shape) == ("", "", (4, 20, 28, 1_000_000))
    assert ours.tokens(silent.item) == [8] * 560
    (part,) = ours.read(data, param="p", sound=True)
    assert (part.before, part.after) == ("<|audio_start|>", "<|audio_end|>")
    item = part.item
    frames, bins = item.shape[4:]
    assert (item.shape[:4], bins, abs(frames - 320) < 8) == (silent.item.shape, 128, True)
    assert item.features[: len(silent.item.features)] == silent.item.features
    assert len(item.features) == len(silent.item.features) + 4 * frames * bins
    found = ours.tokens(item)
    assert len(found) == item.tokens
    assert found[: 2 * (140 + 13)] == ([8] * 140 + [9] * 13) * 2


def test_a_video_without_sound_is_as_if_that_were_not_asked_for(tmp_path: Path) -> None:
    ours, data = omni(tmp_path), video(greys(20, (128, 96)))
    assert ours.read(data, param="p", sound=True) == ours.read(data, param="p")


def test_models_that_hear_no_video_say_so(tmp_path: Path) -> None:
    ours = opened(tmp_path, "qwen2_5_vl", QWEN2)
    with pytest.raises(RequestError, match="'p' cannot be used: the model hears no") as found:
        ours.read(video(greys(4)), param="p", sound=True)
    assert found.value.code == "media_unsupported"


def shown(features: bytes, moments: int) -> list[int]:
    """Return the indices of `greys` that the frames of an item show."""
    raw = np.frombuffer(features, np.uint8).reshape(moments, -1, 2, 14 * 14 * 3)
    return [round((each - 20) / 3) for each in raw.mean(axis=(1, 3)).ravel()]


def test_a_video_is_one_item(tmp_path: Path) -> None:
    ours = opened(tmp_path, "qwen2_5_vl", QWEN2)
    assert ours.placeholders == Placeholders(8)
    (part,) = ours.read(video(greys(40, (112, 84))), param="p")  # four seconds
    item = part.item
    assert (part.before, part.after, item.kind, item.bidirectional) == ("", "", "video", False)
    assert item.shape == (4, 6, 8, 1_000_000)
    assert item.tokens == 4 * 12
    assert shown(item.features, 4) == [0, 5, 10, 15, 20, 25, 30, 35]


def test_each_moment_is_an_item_behind_its_time(tmp_path: Path) -> None:
    ours = opened(tmp_path, "qwen3_vl", QWEN3)
    assert ours.placeholders.mark == "<|vision_start|><|video_pad|><|vision_end|>"
    parts = ours.read(video(greys(40, (128, 96))), param="p")
    assert [part.item.shape for part in parts] == [(1, 6, 8, 0)] * 4
    assert [part.item.tokens for part in parts] == [12] * 4
    assert [part.before for part in parts] == [
        f"<{seconds} seconds><|vision_start|>" for seconds in (0.3, 1.4, 2.5, 3.6)
    ]
    assert {part.after for part in parts} == {"<|vision_end|>"}


def test_glm_has_the_time_behind_each_moment(tmp_path: Path) -> None:
    ours = opened(tmp_path, "glm4v", GLM)
    assert ours.placeholders == Placeholders(8)
    parts = ours.read(video(greys(40, (112, 84))), param="p")  # four seconds
    assert [part.item.shape for part in parts] == [(1, 6, 8, 0)] * 4
    assert {part.before for part in parts} == {"<|begin_of_image|>"}
    assert [part.after for part in parts] == [f"<|end_of_image|>{n}" for n in range(4)]
    finer = opened(tmp_path, "glm4v", GLM | {"video_processor_type": "Glm46VVideoProcessor"})
    (first, second, *_) = finer.read(video(greys(40, (112, 84))), param="p")
    assert first.after == "<|end_of_image|>0.0 seconds"
    assert second.after == "<|end_of_image|>0.4 seconds"
    limited = ours.read(video(greys(80)), param="p", limits=FileLimits(frames=6))
    assert [part.after for part in limited] == [f"<|end_of_image|>{n}" for n in (0, 2, 5)]


@pytest.mark.parametrize(
    ("model_type", "values"), [("qwen2_vl", QWEN2), ("qwen3_5", QWEN3)], ids=["one", "apart"]
)
def test_few_frames_and_limits(tmp_path: Path, model_type: str, values: dict[str, Any]) -> None:
    ours = opened(tmp_path, model_type, values)
    (single,) = ours.read(video(greys(1)), param="p")
    assert single.item.shape[0] == 1
    limited = ours.read(video(greys(80)), param="p", limits=FileLimits(frames=6))
    assert sum(part.item.shape[0] for part in limited) == 3
    coarse, fine = (
        ours.read(video(greys(8, (640, 480))), param="p", detail=detail)
        for detail in ("low", "auto")
    )
    assert coarse[0].item.tokens / coarse[0].item.shape[0] <= 256
    assert fine[0].item.tokens > coarse[0].item.tokens


def test_settings_for_pictures_serve_where_there_are_no_others(tmp_path: Path) -> None:
    ours = opened(tmp_path, "qwen2_5_vl", QWEN2)
    (tmp_path / "video_preprocessor_config.json").unlink()
    assert KINDS["video"].open(tmp_path) is None
    pictures = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 3136, "fps": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    found = KINDS["video"].open(tmp_path)
    assert found is not None
    (part,) = found.read(video(greys(20, (640, 480))), param="p")
    assert part.item.tokens > 3136 // 28**2
    assert part.item.shape[0] == 2
    pictures["image_processor_type"] = "Other"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    assert KINDS["video"].open(tmp_path) is None
    assert ours.placeholders == found.placeholders


def test_bad_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="fps"):
        opened(tmp_path, "qwen2_vl", QWEN2 | {"fps": "2"})
    with pytest.raises(ModelError, match="image_mean"):
        opened(tmp_path, "qwen3_vl", QWEN3 | {"image_mean": [0.4] * 3})


ERNIE: dict[str, Any] = {
    "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
    "size": {"shortest_edge": 234_416, "longest_edge": 937_664},
    "font": "letters.ttf",
    "fps": 2,
    "min_frames": 4,
}


def test_ernie_writes_the_time_on_frames(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"letters\.ttf"):
        opened(tmp_path, "ernie4_5_vl_moe", ERNIE)
    font = PIL.ImageFont.load_default(10)
    assert isinstance(font, PIL.ImageFont.FreeTypeFont)
    assert isinstance(font.path, io.BytesIO)
    (tmp_path / "letters.ttf").write_bytes(font.path.getvalue())
    film = video(greys(25, (560, 420)))  # two and a half seconds
    written, plain = (
        opened(tmp_path, "ernie4_5_vl_moe", ERNIE | {"draw_on_frames": each}).read(film, param="p")
        for each in (True, False)
    )
    (item,) = (part.item for part in written)
    assert item.shape == (3, 30, 40, 0)  # of five frames the last counts twice
    assert item.tokens == 3 * 300
    ours, bare = (
        np.frombuffer(parts[0].item.features, np.uint8).reshape(6, 15, 20, 4 * 14 * 14 * 3)
        for parts in (written, plain)
    )
    changed = (ours.astype(int) != bare).any(axis=3)
    assert changed[:, 0, 0].all()
    assert not changed[:, 3:].any()
    assert not changed[:, :, 15:].any()
    assert (ours[4] == ours[5]).all()
    assert not np.array_equal(ours[0] - bare[0], ours[1] - bare[1])


class TestAgainstTransformers:
    @pytest.mark.parametrize("fps", [None, 2])
    def test_frames_of_ernie(self, tmp_path: Path, fps: int | None) -> None:
        torch = pytest.importorskip("torch")
        ours = opened(
            tmp_path,
            "ernie4_5_vl_moe",
            ERNIE | {"draw_on_frames": False, "fps": fps, "min_frames": 16},
        )
        draw = random.Random(8)
        for _ in range(300):
            frames, rate = draw.randrange(1, 4000), draw.choice([1.0, 10.0, 23.976, 30.0, 60.0])
            wanted = frames if fps is None else frames / rate * fps
            wanted = min(max(wanted, 16), 180, frames)
            expected = torch.arange(0, frames, frames / wanted).int().tolist()
            assert ours.sample_frames(VideoInfo(frames, rate), 1000) == expected

    def test_layout_of_a_video_with_sound(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        name = "transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe"
        oracle = pytest.importorskip(name).Qwen3OmniMoeProcessor
        if not hasattr(oracle, "replace_video_with_audio_token"):
            pytest.skip("this transformers lays out whole prompts alone")
        theirs = SimpleNamespace(
            audio_bos_token="<",
            audio_eos_token=">",
            audio_token="a",
            video_token="v",
            video_processor=SimpleNamespace(merge_size=2),
        )
        ours, draw = omni(tmp_path), random.Random(7)
        for _ in range(200):
            grid = draw.randrange(1, 9), 2 * draw.randrange(1, 4), 2 * draw.randrange(1, 4)
            step, sounds = draw.choice([320_000, 500_000, 1_000_000, 1_060_000]), draw.randrange(80)
            tokens = grid[0] * grid[1] * grid[2] // 4 + sounds
            found = ours.tokens(MediaItem.of("video", b"", (*grid, step, 1, 128), tokens))
            expected = oracle.replace_video_with_audio_token(
                theirs,
                {"video_grid_thw": [np.array(grid)], "video_second_per_grid": [step / 1e6]},
                0,
                {"num_audio_tokens": [sounds]},
                0,
                position_id_per_seconds=13.0,
            )
            assert f"<{''.join(' va'[token - 7] for token in found)}>" == expected

    def test_frames_and_times(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
        metadata = pytest.importorskip("transformers.video_utils").VideoMetadata
        theirs = oracle.Qwen3VLVideoProcessor()
        ours = opened(tmp_path, "qwen3_vl", QWEN3)
        draw = random.Random(3)
        for _ in range(300):
            frames, fps = draw.randrange(1, 4000), draw.choice([1.0, 10.0, 23.976, 30.0, 60.0])
            expected = theirs.sample_frames(metadata(total_num_frames=frames, fps=fps))
            assert ours.sample_frames(VideoInfo(frames, fps), 768) == expected.tolist()

    @pytest.mark.parametrize("kind", ["Glm4vVideoProcessor", "Glm46VVideoProcessor"])
    def test_frames_of_glm(self, tmp_path: Path, kind: str) -> None:
        pytest.importorskip("torch")
        name = kind.removesuffix("VideoProcessor").lower()
        oracle = pytest.importorskip(f"transformers.models.{name}.video_processing_{name}")
        metadata = pytest.importorskip("transformers.video_utils").VideoMetadata
        theirs = getattr(oracle, kind)()
        ours = opened(tmp_path, "glm4v", GLM | {"video_processor_type": kind})
        draw = random.Random(5)
        for _ in range(100):
            frames, fps = draw.randrange(1, 20_000), draw.choice([1.0, 10.0, 23.976, 30.0, 60.0])
            known = metadata(total_num_frames=frames, fps=fps, duration=frames / fps)
            expected = list(dict.fromkeys(theirs.sample_frames(known).tolist()))
            assert ours.sample_frames(VideoInfo(frames, fps), 10_000) == expected

    def test_sizes_of_glm(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.glm4v.video_processing_glm4v")
        ours = opened(tmp_path, "glm4v", GLM)
        assert isinstance(ours, GlmVideoProcessor)
        draw = random.Random(6)
        for _ in range(1000):
            height, width = (draw.randrange(20, 1500) for _ in range(2))
            frames = 2 * draw.randrange(1, 300)
            expected = oracle.smart_resize(frames, height, width, 2, 28, 12544, 47_040_000)
            assert ours.size(height, width, frames, "auto") == expected

    def test_sizes(self) -> None:
        pytest.importorskip("torch")
        oracle = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
        draw = random.Random(4)
        for _ in range(3000):
            height, width = (draw.randrange(32, 2000) for _ in range(2))
            frames, most = draw.randrange(2, 300), draw.choice([500_000, 25_165_824])
            expected = oracle.smart_resize(frames, height, width, 2, 32, 4096, most)
            assert fitted(height, width, 32, 4096, most, frames) == expected
