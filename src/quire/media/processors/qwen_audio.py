"""Qwen3-Omni: sound as Whisper's logarithmic mel spectrogram (arXiv:2212.04356).

The features equal those of transformers' `WhisperFeatureExtractor` for one file that is neither
padded nor cut.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.processors.base import AudioProcessor, Placeholders
from quire.media.processors.mel import MelSpectrogram
from quire.media.processors.whisper import log_mel, open_mel
from quire.media.sound import Samples
from quire.media.source import refusal


class QwenAudioProcessor(AudioProcessor):
    """Qwen3-Omni's audio feature extractor. A sound may have any length.

    Args:
        chunk: frames that the encoder's convolutions process together.
    """

    def __init__(self, placeholders: Placeholders, mel: MelSpectrogram, *, chunk: int) -> None:
        super().__init__(placeholders, rate=mel.rate, seconds=math.inf)
        self._mel = mel
        self._chunk = chunk

    @classmethod
    def open(cls, settings: Values, config: Values) -> QwenAudioProcessor:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different features than this class computes.
        """
        mel = open_mel(settings, bins=128)
        encoder = config.nested("audio_config", needed=False)
        # Chat templates write what goes around a sound.
        placeholders = Placeholders(token=config.integer("audio_token_id", minimum=0))
        return cls(placeholders, mel, chunk=2 * encoder.integer("n_window", default=50))

    def item(self, samples: Samples, param: str) -> MediaItem:
        minimum = max(self._mel.hop, self._mel.frame // 2 + 1)
        if len(samples) < minimum:
            raise refusal(param, f"it lasts less than {minimum / self.rate:g} s")
        features = self.features(samples)
        whole, rest = divmod(len(features), self._chunk)
        # Three convolutions halve a chunk's frames, each rounding up.
        tokens = whole * -(-self._chunk // 8) + -(-rest // 8)
        return MediaItem.of(
            "audio", features.tobytes(), features.shape, tokens=tokens, bidirectional=False
        )

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Compute log-mel features: `[samples]` -> `[frames, bins]`."""
        return log_mel(self._mel, samples)
