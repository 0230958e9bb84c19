"""Gemma 4 audio: log-mel spectrograms (USM, arXiv:2303.01037); raw samples for 12B.

The features equal those of transformers' `Gemma4AudioFeatureExtractor` and
`Gemma4UnifiedAudioFeatureExtractor` for one file, but for the padding, of which there is none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.processors import usm
from quire.media.processors.base import AudioProcessor, Placeholders
from quire.media.processors.mel import MelSpectrogram
from quire.media.sound import Samples
from quire.media.source import refusal


class Gemma4AudioProcessor(AudioProcessor):
    """Gemma 4's audio feature extractor.

    Args:
        floor: number added to each bin before its logarithm.
    """

    def __init__(self, placeholders: Placeholders, mel: MelSpectrogram, *, floor: float) -> None:
        super().__init__(placeholders, rate=mel.rate, seconds=usm.SECONDS)
        self._mel = mel
        self._floor = floor

    @classmethod
    def open(cls, settings: Values, config: Values) -> Gemma4AudioProcessor:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different features than this class computes.
        """
        settings.neutral(usm.NEUTRAL | {"preemphasis": 0.0})
        mel = usm.open_spectrogram(
            settings, frame_ms=20.0, lowest=0.0, highest=8000.0, overdrive=False
        )
        floor = settings.number("mel_floor", default=1e-3, minimum=0)
        return cls(_placeholders(config), mel, floor=floor)

    def item(self, samples: Samples, param: str) -> MediaItem:
        features = self.features(samples)
        if not len(features):
            minimum = (self._mel.frame - self._mel.frame // 2 + 1) / self.rate
            raise refusal(param, f"it lasts less than {minimum:g} s")
        # Two convolutions halve the frames, each rounding up.
        tokens = -(-len(features) // 4)
        shape = (len(features), features.shape[1])
        return MediaItem.of("audio", features.tobytes(), shape, tokens=tokens, bidirectional=False)

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Compute log-mel features of the frames within the sound: `[samples]` -> `[frames,
        bins]`.
        """
        padded = np.pad(samples, (self._mel.frame // 2, 0))
        windows = self._mel.frames(padded, beyond=1)  # the extractor looks one sample further
        bins = self._mel.bins_of(windows[:, :-1])
        return np.log(bins + self._floor).astype(np.float32)


class Gemma4UnifiedAudioProcessor(AudioProcessor):
    """The feature extractor of Gemma 4 12B. It cuts the waveform into pieces and pads the last with
    silence.

    Args:
        samples: samples of a piece, which becomes one row.
    """

    def __init__(self, placeholders: Placeholders, rate: int, samples: int) -> None:
        super().__init__(placeholders, rate=rate, seconds=usm.SECONDS)
        self._samples = samples

    @classmethod
    def open(cls, settings: Values, config: Values) -> Gemma4UnifiedAudioProcessor:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different features than this class computes.
        """
        samples = settings.integer("audio_samples_per_token", default=640)
        settings.neutral({"feature_size": samples, "padding_value": 0.0})
        rate = settings.integer("sampling_rate", default=16_000)
        return cls(_placeholders(config), rate, samples)

    def item(self, samples: Samples, param: str) -> MediaItem:
        if not len(samples):
            raise refusal(param, "it has no samples")
        features = self.features(samples)
        shape = (len(features), self._samples)
        return MediaItem.of(
            "audio", features.tobytes(), shape, tokens=len(features), bidirectional=False
        )

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Cut the sound into rows: `[samples]` -> `[rows, samples of a piece]`."""
        filled = np.pad(samples, (0, -len(samples) % self._samples))
        return filled.reshape(-1, self._samples).astype(np.float32)


def _placeholders(config: Values) -> Placeholders:
    """Return the tokens around a sound. Early configurations call the last one
    `eoa_token_index`.
    """
    return Placeholders(
        token=config.integer("audio_token_id", default=258_881, minimum=0),
        before=(config.integer("boa_token_id", default=256_000, minimum=0),),
        after=(config.integer("eoa_token_index", "eoa_token_id", default=258_883, minimum=0),),
    )
