"""Common parts of the audio feature extractors of Gemma 3n and Gemma 4 (USM, arXiv:2303.01037)."""

from __future__ import annotations

import math

from quire.core.values import Values
from quire.media.processors.mel import MelSpectrogram, htk_filters

SECONDS = 30.1
"""The longest sound in seconds. The extractors keep 30 s, and the models were trained with no more;
the rest allows for padding by audio codecs.
"""

NEUTRAL: dict[str, object] = {
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""Settings that neither model uses, with the values that turn them off."""


def open_spectrogram(
    settings: Values, *, frame_ms: float, lowest: float, highest: float, overdrive: bool
) -> MelSpectrogram:
    """Read an extractor's settings. The arguments are defaults.

    Args:
        lowest, highest: start of the first filter and end of the last, in Hz.
        overdrive: whether the transform is twice as long as a frame needs.

    Raises:
        ModelError: a value is not a valid number.
    """
    rate = settings.integer("sampling_rate", default=16_000)
    frame = round(rate * settings.number("frame_length_ms", default=frame_ms, minimum=0) / 1000)
    doubled = bool(settings.values.get("fft_overdrive", overdrive))
    fft = 2 ** math.ceil(math.log2(frame)) * (2 if doubled else 1)
    filters = htk_filters(
        fft // 2 + 1,
        settings.integer("feature_size", default=128),
        settings.number("min_frequency", default=lowest, minimum=0),
        highest=settings.number("max_frequency", default=highest, minimum=0),
        rate=rate,
    )
    hop = round(rate * settings.number("hop_length_ms", default=10.0, minimum=0) / 1000)
    return MelSpectrogram(rate=rate, frame=frame, hop=hop, fft=fft, filters=filters)
