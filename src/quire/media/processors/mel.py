"""Mel spectrograms: frames, and overlapping triangular filters, evenly spaced on a mel scale."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.media.sound import Samples

Filters = npt.NDArray[np.float64]

_SLANEY_STEP = math.log(6.4) / 27
"""Log-frequency step of a mel above 1000 Hz (15 mels); below it, a mel is 200/3 Hz."""


class MelSpectrogram:
    """Computes mel spectrograms of sound.

    Args:
        rate: sample rate, in samples a second.
        frame: samples a frame.
        hop: samples from one frame's start to the next.
        fft: samples of a transform; frames are padded with zeros.
        filters: `[fft // 2 + 1, bins]`.
    """

    def __init__(self, *, rate: int, frame: int, hop: int, fft: int, filters: Filters) -> None:
        self.rate = rate
        self.frame = frame
        self.hop = hop
        self._fft = fft
        self._filters = filters
        self._window = hann_window(frame)

    def frames(self, samples: Samples, *, beyond: int = 0) -> Samples:
        """Return the frames within the samples as a view: `[samples]` -> `[frames, frame +
        beyond]`.

        Args:
            beyond: samples after each frame that are included.
        """
        size = self.frame + beyond
        if len(samples) < size:
            return np.empty((0, size), samples.dtype)
        return np.lib.stride_tricks.sliding_window_view(samples, size)[:: self.hop]

    def bins_of(
        self, frames: npt.NDArray[np.floating[Any]], *, power: int = 1
    ) -> npt.NDArray[np.float64]:
        """Return filtered sums of spectral magnitudes, raised to `power`: `[frames, frame]` ->
        `[frames, bins]`.
        """
        magnitudes = np.abs(np.fft.rfft(frames * self._window, n=self._fft))
        bins: npt.NDArray[np.float64] = magnitudes**power @ self._filters
        return bins


def hann_window(frame: int) -> npt.NDArray[np.float32]:
    """Return a periodic Hann window: `[frame]`."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)).astype(np.float32)


def htk_filters(frequencies: int, bins: int, lowest: float, highest: float, rate: int) -> Filters:
    """Return triangular filters of height one on HTK's mel scale: `[frequencies, bins]`.

    Args:
        frequencies: number of frequencies of the spectrum, from 0 to half the rate.
        lowest, highest: start of the first triangle and end of the last, in Hz.
        rate: sample rate, in samples a second.
    """

    def mels(hertz: float) -> float:
        return 2595.0 * math.log10(1.0 + hertz / 700.0)

    corners = 700.0 * (10.0 ** (np.linspace(mels(lowest), mels(highest), bins + 2) / 2595.0) - 1.0)
    return _triangles(frequencies, corners, rate)


def slaney_filters(frequencies: int, bins: int, highest: float, rate: int) -> Filters:
    """Return triangular filters of equal area on the mel scale of Slaney's Auditory Toolbox, from 0
    Hz: `[frequencies, bins]`.

    Args:
        frequencies: number of frequencies of the spectrum, from 0 to half the rate.
        highest: end of the last triangle, in Hz; at least 1000.
        rate: sample rate, in samples a second.
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
