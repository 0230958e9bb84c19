"""Mel spectrograms: the window, and filters, triangles that overlap by half, evenly in mels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Filters = npt.NDArray[np.float64]

_SLANEY_STEP = math.log(6.4) / 27
"""Of a mel above 1000 Hz, which is 15 mels; below it a mel is 200/3 Hz."""


def hann_window(frame: int) -> npt.NDArray[np.float32]:
    """`[frame]`; periodic, as for a spectrogram."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)).astype(np.float32)


def htk_filters(frequencies: int, bins: int, lowest: float, highest: float, rate: int) -> Filters:
    """Of height one, in HTK's mels: `[frequencies, bins]`.

    Args:
        frequencies: of the spectrum, from 0 to half the rate.
        lowest, highest: where the first triangle begins and the last ends, in Hz.
        rate: samples a second.
    """

    def mels(hertz: float) -> float:
        return 2595.0 * math.log10(1.0 + hertz / 700.0)

    corners = 700.0 * (10.0 ** (np.linspace(mels(lowest), mels(highest), bins + 2) / 2595.0) - 1.0)
    return _triangles(frequencies, corners, rate)


def slaney_filters(frequencies: int, bins: int, highest: float, rate: int) -> Filters:
    """Of equal area, in the mels of Slaney's Auditory Toolbox, from 0 Hz: `[frequencies, bins]`.

    Args:
        frequencies: of the spectrum, from 0 to half the rate.
        highest: where the last triangle ends, in Hz, from 1000 up.
        rate: samples a second.
    """
    mels = np.linspace(0.0, 15.0 + math.log(highest / 1000.0) / _SLANEY_STEP, bins + 2)
    corners = np.where(mels < 15.0, mels * 200 / 3, 1000.0 * np.exp((mels - 15.0) * _SLANEY_STEP))
    areas: Filters = _triangles(frequencies, corners, rate) * 2.0 / (corners[2:] - corners[:-2])
    return areas


def _triangles(frequencies: int, corners: npt.NDArray[np.float64], rate: int) -> Filters:
    hertz = np.linspace(0, rate // 2, frequencies)[:, None]
    rising = (hertz - corners[:-2]) / np.diff(corners)[:-1]
    falling = (corners[2:] - hertz) / np.diff(corners)[1:]
    triangles: Filters = np.maximum(0, np.minimum(rising, falling))
    return triangles
