"""Gemma 3n: sound as the logarithms of a mel spectrogram (USM, arXiv:2303.01037).

The features equal those of transformers' `Gemma3nAudioFeatureExtractor` for one file.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.media.processors.base import AudioProcessor, Parts, Placeholders
from quire.media.processors.mel import Filters, hann_window, htk_filters
from quire.media.settings import Settings
from quire.media.sound import Samples
from quire.media.source import Detail, FileLimits, refusal

_SECONDS = 30.1
"""The extractor keeps 30 s of a file; what coders put around a sound is allowed beside."""
_SAMPLES = 128
"""Silence fills a sound up to a multiple of so many samples."""


class Gemma3nAudioProcessor(AudioProcessor):
    """Gemma 3n's audio feature extractor.

    Args:
        frame: samples a frame.
        hop: samples from one frame's beginning to the next.
        filters: `[frequencies, bins]`.
        floor: the least that a bin is taken for.
        emphasis: the share of the sample before that is taken from each.
        rows: that any sound becomes.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        rate: int,
        frame: int,
        hop: int,
        filters: Filters,
        floor: float,
        emphasis: float,
        rows: int,
    ) -> None:
        super().__init__(placeholders, rate=rate, seconds=_SECONDS)
        self._frame = frame
        self._hop = hop
        self._filters = filters
        self._floor = floor
        self._emphasis = emphasis
        self._rows = rows
        self._window = hann_window(frame)

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Self:
        """As `processor_config.json` and `config.json` say.

        Raises:
            ModelError: a value is missing, or asks for features other than this computes.
        """
        settings.require(_NEUTRAL)
        rate = settings.integer("sampling_rate", 16_000)
        frame = round(rate * settings.number("frame_length_ms", 32.0) / 1000)
        overdrive = 2 if settings.values.get("fft_overdrive", True) else 1
        filters = htk_filters(
            2 ** math.ceil(math.log2(frame)) * overdrive // 2 + 1,
            settings.integer("feature_size", 128),
            settings.number("min_frequency", 125.0),
            settings.number("max_frequency", 7600.0),
            rate,
        )
        return cls(
            Placeholders(config.integer("audio_token_id", 262_273, minimum=0)),
            rate=rate,
            frame=frame,
            hop=round(rate * settings.number("hop_length_ms", 10.0) / 1000),
            filters=filters,
            floor=settings.number("mel_floor", 1e-5),
            emphasis=settings.number("preemphasis", 0.97),
            rows=config.integer("audio_soft_tokens_per_image", 188),
        )

    def prepare(self, data: bytes, param: str, detail: Detail, limits: FileLimits) -> Parts:
        (part,) = super().prepare(data, param, detail, limits)
        return (replace(part, before="\n\n<start_of_audio>", after="<end_of_audio>\n\n"),)

    def listen(self, samples: Samples, param: str) -> MediaItem:
        features = self.features(samples)
        if not len(features):
            raise refusal(param, f"it lasts less than {(self._frame + 1) / self.rate:g} s")
        shape = (len(features), features.shape[1])
        return MediaItem.of("audio", features.tobytes(), shape, self._rows, bidirectional=False)

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """`[samples]` -> `[frames, bins]`."""
        maximum = 30 * self.rate
        heard = np.pad(samples[:maximum], (0, -len(samples[:maximum]) % _SAMPLES))
        if len(heard) <= self._frame:  # the extractor looks one sample further than a frame
            return np.empty((0, self._filters.shape[1]), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(heard, self._frame + 1)[:: self._hop]
        before = np.concatenate([windows[:, :1], windows[:, :-2]], axis=1)
        frames = windows[:, :-1] - self._emphasis * before
        spectrum = np.abs(np.fft.rfft(frames * self._window, n=2 * (len(self._filters) - 1)))
        return np.log(np.maximum(spectrum @ self._filters, self._floor)).astype(np.float32)


_NEUTRAL: dict[str, object] = {
    "preemphasis_htk_flavor": True,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""Settings of the extractor that Gemma 3n does not use, or uses so alone."""
