"""Whisper: sound of 30 seconds as a logarithmic mel spectrogram (arXiv:2212.04356, section 2.2).

The features equal those of transformers' `WhisperFeatureExtractor`.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.processors.base import AudioProcessor, Placeholders
from quire.media.processors.mel import MelSpectrogram, slaney_filters
from quire.media.sound import Samples

_FLOOR = 1e-10
"""Lower bound of a bin before its logarithm."""
_RANGE = 8.0
"""Bins are raised to at least this many powers of ten below the largest."""
_HIGHEST = 8000.0
_NEUTRAL: dict[str, Any] = {"dither": 0.0, "do_normalize": False}
"""Settings that the models do not use, with the values that turn them off."""


def open_mel(settings: Values, bins: int) -> MelSpectrogram:
    """Return the spectrogram that `preprocessor_config.json` describes.

    Args:
        bins: number of bins where the file does not say.

    Raises:
        ModelError: the file asks for different features than `log_mel` computes.
    """
    settings.neutral(_NEUTRAL)
    rate = settings.integer("sampling_rate", default=16_000)
    frame = settings.integer("n_fft", default=400)
    bins = settings.integer("feature_size", default=bins)
    return MelSpectrogram(
        rate=rate,
        frame=frame,
        hop=settings.integer("hop_length", default=160),
        fft=frame,
        filters=slaney_filters(frame // 2 + 1, bins, _HIGHEST, rate=rate),
    )


def log_mel(mel: MelSpectrogram, samples: Samples) -> npt.NDArray[np.float32]:
    """Compute log-mel features: `[samples]` -> `[frames, bins]`.

    The first and the last frame extend beyond the ends, where the sound is mirrored.
    """
    padded = np.pad(samples, mel.frame // 2, mode="reflect")
    frames = mel.frames(padded)[: len(samples) // mel.hop]
    bins = np.log10(np.maximum(mel.bins_of(frames, power=2), _FLOOR))
    found: npt.NDArray[np.float32] = (np.maximum(bins, bins.max() - _RANGE) / 4 + 1).astype(
        np.float32
    )
    return found


class WhisperAudioProcessor(AudioProcessor):
    """Whisper's feature extractor. A sound is filled up with silence to the model's window.

    The token that starts transcripts stands for a sound in a prompt; see `serving.transcripts`.

    Args:
        frames: of the model's window.
    """

    def __init__(self, placeholders: Placeholders, mel: MelSpectrogram, *, frames: int) -> None:
        super().__init__(placeholders, rate=mel.rate, seconds=frames * mel.hop / mel.rate)
        self._mel = mel
        self._frames = frames

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different features than `log_mel` computes.
        """
        return cls(
            Placeholders(token=config.integer("decoder_start_token_id", minimum=0)),
            open_mel(settings, config.integer("num_mel_bins", default=80)),
            frames=2 * config.integer("max_source_positions", default=1500),
        )

    def item(self, samples: Samples, param: str) -> MediaItem:
        features = self.features(samples)
        return MediaItem.of(
            "audio", features.tobytes(), features.shape, tokens=1, bidirectional=False
        )

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Compute log-mel features of the window: `[samples]` -> `[frames, bins]`."""
        window = self._frames * self._mel.hop
        return log_mel(self._mel, np.pad(samples[:window], (0, max(0, window - len(samples)))))
