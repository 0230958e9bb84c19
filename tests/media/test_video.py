"""Videos: films made here; which frames are looked at, and when they are seen."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import RequestError
from quire.demo import MODEL_DIR
from quire.media.kinds import KINDS
from quire.media.parts import Parts
from quire.media.processors.base import VideoProcessor
from quire.media.source import FileLimits
from quire.media.video import VideoInfo
from tests.media.files import encoded_sound, greys, tone, video


@pytest.fixture
def ours() -> VideoProcessor:
    found = KINDS["video"].open(Path(MODEL_DIR))
    assert isinstance(found, VideoProcessor)
    return found


def numbers(parts: Parts) -> list[int]:
    """Return the indices of `greys` that a video's parts show."""
    means = [np.frombuffer(part.item.features, np.uint8).mean() for part in parts]
    return [round((mean - 20) / 3) for mean in means]


def refused(ours: VideoProcessor, data: bytes, code: str, limits: FileLimits) -> str:
    with pytest.raises(RequestError) as caught:
        ours.read(data, param="p", limits=limits)
    assert (caught.value.code, caught.value.param) == (code, "p")
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
def test_frames_and_their_times(ours: VideoProcessor, kind: str, codec: str) -> None:
    parts = ours.read(video(greys(24), kind, codec), param="p", limits=FileLimits(frames=4))
    assert numbers(parts) == [0, 6, 12, 18]
    assert [part.before for part in parts] == ["00:00 ", " 00:00 ", " 00:01 ", " 00:01 "]
    assert {part.item.kind for part in parts} == {"video"}
    assert all(part.item.bidirectional for part in parts)
    assert len({part.item.digest for part in parts}) == 4


def test_times_are_minutes_and_seconds(ours: VideoProcessor) -> None:
    parts = ours.read(video(greys(70), fps=1), param="p", limits=FileLimits(frames=2))
    assert [part.before for part in parts] == ["00:00 ", " 00:35 "]
    parts = ours.read(
        video(greys(70), "webm", "libvpx", 1), param="p", limits=FileLimits(frames=70)
    )
    assert len(parts) == 8
    assert parts[-1].before == " 00:56 "


def test_all_frames_of_a_short_video(ours: VideoProcessor) -> None:
    assert numbers(ours.read(video(greys(5)), param="p")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("frames", [8, 9, 15, 16, 100, 3001])
def test_the_frames_of_transformers_are_chosen(ours: VideoProcessor, frames: int) -> None:
    expected = np.arange(0, frames, frames / 8, dtype=int)
    assert list(ours.sample_frames(VideoInfo(frames, 24.0), 256)) == list(expected)


def test_a_frame_takes_as_many_tokens_as_is_asked(ours: VideoProcessor) -> None:
    data = video(greys(2, (640, 480)))
    fine, coarse = (ours.read(data, param="p", detail=most) for most in (280, 70))
    assert fine[0].item.tokens > coarse[0].item.tokens
    assert coarse[0].item.tokens <= 70


def test_large_videos_are_refused_by_their_header(ours: VideoProcessor) -> None:
    data = video(greys(24))
    message = refused(ours, data, "media_too_large", FileLimits(pixels=64 * 48 - 1))
    assert "64 x 48 pixels, more than 3071" in message
    assert "2.4 s, more than 2 s" in refused(ours, data, "media_too_large", FileLimits(seconds=2))


def test_what_is_no_video(ours: VideoProcessor) -> None:
    limits = FileLimits()
    assert "not a MP4" in refused(ours, b"#EXTM3U\n", "media_invalid", limits)
    song = encoded_sound(tone(0.5), "mov", "aac")
    assert "holds no video" in refused(ours, song, "media_invalid", limits)
    refused(ours, video(greys(24))[:900], "media_invalid", limits)


def test_damaged_files_are_read_or_refused(ours: VideoProcessor) -> None:
    whole = video(greys(6))
    rng = np.random.default_rng(5)
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 6):
            data[at] = rng.integers(0, 256)
        with suppress(RequestError):
            assert ours.read(bytes(data), param="p", limits=FileLimits(seconds=60))
