"""Videos for Qwen3-Omni, with their sound between the moments if a request asks for it."""

from __future__ import annotations

from typing import Self

from quire.core.media import MediaItem, sound_rows
from quire.core.values import Values
from quire.media import sound
from quire.media.kinds import KINDS
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import AudioProcessor, Placeholders, VideoProcessor
from quire.media.processors.qwen_video import QwenVideoProcessor, Sampling, opened
from quire.media.source import Detail, FileLimits

_BEGIN, _END = "<|audio_start|>", "<|audio_end|>"
_SEEN = 4
"""Length of the shape of a video without sound."""


class OmniVideoProcessor(QwenVideoProcessor):
    """The video processor of Qwen3-Omni. A video is one item, with or without its sound.

    With sound, the features and shape of the sound follow the video's.

    Args:
        audio: processor of the sound; None if the folder has none.
        rate: position ids a second.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        sampling: Sampling,
        audio: AudioProcessor | None,
        rate: int,
    ) -> None:
        super().__init__(placeholders, sampling)
        self._audio = audio
        self._rate = rate

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        audio = KINDS["audio"].open(config.file.parent)
        return cls(
            *opened(settings, config),
            audio if isinstance(audio, AudioProcessor) else None,
            config.integer("position_id_per_seconds", default=25),
        )

    def prepare_with_sound(
        self, data: bytes, param: str, detail: Detail, limits: FileLimits
    ) -> Parts:
        audio = self._audio
        if audio is None:
            return super().prepare_with_sound(data, param, detail, limits=limits)
        (seen,) = self.prepare(data, param, detail, limits=limits)
        samples = sound.within(data, param=param, rate=audio.rate, limits=limits)
        if samples is None:
            return (seen,)
        heard = audio.item(samples, param)
        both = MediaItem.of(
            "video",
            seen.item.features + heard.features,
            (*seen.item.shape, *heard.shape),
            tokens=seen.item.tokens + heard.tokens,
            bidirectional=False,
        )
        return (MediaPart(both, _BEGIN, _END),)

    def tokens(self, item: MediaItem) -> list[int]:
        if len(item.shape) == _SEEN or self._audio is None:
            return super().tokens(item)
        moments, rows, columns, step = item.shape[:_SEEN]
        squares = self._sampling.squares(rows, columns)
        sounds = item.tokens - moments * squares
        own, other = self.placeholders.token, self._audio.placeholders.token
        heard = sound_rows(moments, squares, step, rate=self._rate, sounds=sounds)
        return [other if each else own for each in heard]


def open_video(settings: Values, config: Values) -> VideoProcessor:
    """Open the video processor of Qwen2-VL, Qwen2.5-VL or Qwen3-Omni, whose folders name the same
    one.

    Raises:
        ModelError: see `QwenVideoProcessor.open`.
    """
    return _kind(config).open(settings, config)


def open_video_beside_pictures(settings: Values, config: Values) -> VideoProcessor:
    """Open the video processor by the settings of the image processor; see `open_video`."""
    return _kind(config).open_beside_pictures(settings, config)


def _kind(config: Values) -> type[QwenVideoProcessor]:
    return OmniVideoProcessor if config.has("audio_config") else QwenVideoProcessor
