"""Videos with sound for Qwen3-Omni (arXiv:2509.17765): rows of both, in order of time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from quire.core.media import Pieces, sound_rows
from quire.models.audio.qwen import QwenSoundEncoder
from quire.models.base import Encoding
from quire.models.vision.qwen import QwenVideoEncoder, VisionTower

_SEEN = 4
"""Length of the shape of a video without sound."""
HEARD = _SEEN + 2
"""Length of the shape of a video with sound: frames and bins of the spectrogram are added."""


class QwenVideoAudioEncoder(QwenVideoEncoder):
    """The encoder of videos, with or without sound, as a `MediaEncoder`.

    The sound's features follow the video's.
    """

    def __init__(self, visual: VisionTower, sounds: QwenSoundEncoder) -> None:
        super().__init__(visual)
        self._sounds = sounds

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        seen, heard = shape[:_SEEN], shape[_SEEN:]
        own = super().feature_bytes(seen)
        return own + self._sounds.feature_bytes(heard) if heard else own

    def rows(self, shape: tuple[int, ...]) -> int:
        seen, heard = shape[:_SEEN], shape[_SEEN:]
        own = super().rows(seen)
        return own + self._sounds.rows(heard) if heard else own

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        seen, heard = shape[:_SEEN], shape[_SEEN:]
        own = super().pieces(seen)
        if not heard:
            return own
        more = self._sounds.pieces(heard)
        return Pieces(own.count + more.count, max(own.rows, more.rows))

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        seen, heard = shape[:_SEEN], shape[_SEEN:]
        size = super().feature_bytes(seen)
        levels = yield from super().encode(features[:size], seen)
        if not heard:
            return levels
        yield levels
        (sounds,) = yield from self._sounds.encode(features[size:], heard)
        moments, _, _, step = seen
        squares = len(levels[0])
        of_sound = np.array(
            sound_rows(
                moments, squares // moments, step, rate=self.visual.kind.times, sounds=len(sounds)
            )
        )
        # Row by row, where it is in what was seen and then heard.
        source = np.empty(len(of_sound), np.int32)
        source[~of_sound] = np.arange(squares)
        source[of_sound] = np.arange(squares, len(of_sound))
        order = mx.array(source)
        first, *deeper = levels
        still = mx.zeros_like(sounds)
        return (
            mx.concatenate([first, sounds])[order],
            *(mx.concatenate([level, still])[order] for level in deeper),
        )
