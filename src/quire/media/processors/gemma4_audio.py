"""Gemma 4: sound as the logarithms of a mel spectrogram (USM, arXiv:2303.01037).

The features equal those of transformers' `Gemma4AudioFeatureExtractor` for one file, but for the
padding, of which there is none.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quire.core.media import MediaItem
from quire.media.processors.base import AudioProcessor, Placeholders
from quire.media.processors.mel import hann_window, htk_filters
from quire.media.settings import Settings
from quire.media.sound import Samples
from quire.media.source import refusal

_SECONDS = 30.1
"""The extractor keeps 30 s of a file, and the model was trained with no more. What coders put
around a sound is allowed beside."""


class Gemma4AudioProcessor(AudioProcessor):
    """Gemma 4's audio feature extractor.

    Args:
        frame: samples a frame.
        hop: samples from one frame's beginning to the next.
        filters: `[frequencies, bins]`.
        floor: what is added to a bin before its logarithm.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        rate: int,
        frame: int,
        hop: int,
        filters: npt.NDArray[np.float64],
        floor: float,
    ) -> None:
        super().__init__(placeholders, rate=rate, seconds=_SECONDS)
        self._frame = frame
        self._hop = hop
        self._filters = filters
        self._floor = floor
        self._window = hann_window(frame)

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Gemma4AudioProcessor:
        """As `processor_config.json` and `config.json` say.

        Raises:
            ModelError: a value is missing, or asks for features other than this computes.
        """
        settings.require(_NEUTRAL)
        rate = settings.integer("sampling_rate", 16_000)
        frame = round(rate * settings.number("frame_length_ms", 20.0) / 1000)
        hop = round(rate * settings.number("hop_length_ms", 10.0) / 1000)
        fft = 2 ** math.ceil(math.log2(frame)) * (2 if settings.values.get("fft_overdrive") else 1)
        filters = htk_filters(
            fft // 2 + 1,
            settings.integer("feature_size", 128),
            settings.number("min_frequency", 0.0),
            settings.number("max_frequency", 8000.0),
            rate,
        )
        placeholders = Placeholders(
            token=config.integer("audio_token_id", 258_881, minimum=0),
            before=(config.integer("boa_token_id", 256_000, minimum=0),),
            after=(_end_token(config),),
        )
        floor = settings.number("mel_floor", 1e-3)
        return cls(placeholders, rate=rate, frame=frame, hop=hop, filters=filters, floor=floor)

    def listen(self, samples: Samples, param: str) -> MediaItem:
        features = self.features(samples)
        if not len(features):
            minimum = (self._frame - self._frame // 2 + 1) / self.rate
            raise refusal(param, f"it lasts less than {minimum:g} s")
        # Two convolutions halve the frames, each rounding up.
        tokens = -(-len(features) // 4)
        shape = (len(features), features.shape[1])
        return MediaItem.of("audio", features.tobytes(), shape, tokens, bidirectional=False)

    def features(self, samples: Samples) -> npt.NDArray[np.float32]:
        """`[samples]` -> `[frames, bins]`: the frames that lie within the sound."""
        padded = np.pad(samples, (self._frame // 2, 0))
        if len(padded) <= self._frame:  # the extractor looks one sample further than a frame
            return np.empty((0, self._filters.shape[1]), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._frame + 1)[:: self._hop]
        size = 2 * (len(self._filters) - 1)
        spectrum = np.abs(np.fft.rfft(windows[:, :-1] * self._window, n=size))
        return np.log(spectrum @ self._filters + self._floor).astype(np.float32)


_NEUTRAL: dict[str, object] = {
    "preemphasis": 0.0,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""Settings of the extractor that Gemma 4 does not use, and the values that turn them off."""


def _end_token(config: Settings) -> int:
    """The token behind a sound, which the first configurations call an index."""
    old = "eoa_token_index"
    return config.integer(old if old in config.values else "eoa_token_id", 258_883, minimum=0)
