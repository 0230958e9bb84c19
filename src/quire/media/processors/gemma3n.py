"""Gemma 3n: sound as the logarithms of a mel spectrogram (USM, arXiv:2303.01037).

The features equal those of transformers' `Gemma3nAudioFeatureExtractor` for one file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.core.values import Values
from quire.media.parts import Parts
from quire.media.processors import usm
from quire.media.processors.base import AudioProcessor, Placeholders
from quire.media.processors.mel import MelSpectrogram
from quire.media.sound import Samples
from quire.media.source import Detail, FileLimits, refusal

_SAMPLES = 128
"""Sound is padded with silence to a multiple of this many samples."""


class Gemma3nAudioProcessor(AudioProcessor):
    """Gemma 3n's audio feature extractor.

    Args:
        floor: lower bound of a bin before its logarithm.
        emphasis: pre-emphasis: the share of the preceding sample that is subtracted from each.
        rows: rows of any sound, whatever its length.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        mel: MelSpectrogram,
        *,
        floor: float,
        emphasis: float,
        rows: int,
    ) -> None:
        super().__init__(placeholders, rate=mel.rate, seconds=usm.SECONDS)
        self._mel = mel
        self._floor = floor
        self._emphasis = emphasis
        self._rows = rows

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `processor_config.json` and `config.json`.

        Raises:
            ModelError: a value is missing, or asks for different features than this class computes.
        """
        settings.neutral(usm.NEUTRAL | {"preemphasis_htk_flavor": True})
        mel = usm.open_spectrogram(
            settings, frame_ms=32.0, lowest=125.0, highest=7600.0, overdrive=True
        )
        return cls(
            Placeholders(config.integer("audio_token_id", default=262_273, minimum=0)),
            mel,
            floor=settings.number("mel_floor", default=1e-5, minimum=0),
            emphasis=settings.number("preemphasis", default=0.97, minimum=0),
            rows=config.integer("audio_soft_tokens_per_image", default=188),
        )

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        (part,) = super().prepare(data, param, detail, limits=limits)
        return (replace(part, before="\n\n<start_of_audio>", after="<end_of_audio>\n\n"),)

    def item(self, samples: Samples, param: str) -> MediaItem:
        features = self.features(samples)
        if not len(features):
            raise refusal(param, f"it lasts less than {(self._mel.frame + 1) / self.rate:g} s")
        shape = (len(features), features.shape[1])
        return MediaItem.of(
            "audio", features.tobytes(), shape, tokens=self._rows, bidirectional=False
        )

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """Compute log-mel features: `[samples]` -> `[frames, bins]`."""
        maximum = 30 * self.rate
        heard = np.pad(samples[:maximum], (0, -len(samples[:maximum]) % _SAMPLES))
        windows = self._mel.frames(heard, beyond=1)  # the extractor looks one sample further
        before = np.concatenate([windows[:, :1], windows[:, :-2]], axis=1)
        bins = self._mel.bins_of(windows[:, :-1] - self._emphasis * before)
        return np.log(np.maximum(bins, self._floor)).astype(np.float32)
