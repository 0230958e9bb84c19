"""Cuts sound into pieces that a model hears, and writes them as files."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator

import numpy as np

from quire.media.sound import Samples

RATE = 16_000
"""Samples per second that the encoders of all families take."""
_LONGEST_S, _SHORTEST_S = 28.0, 20.0
"""Bounds of a piece's length in seconds; it ends at the quietest moment between them. All models
hear at least 30 s.
"""
_QUIET = RATE // 10
"""Number of samples over which loudness is averaged."""


def pieces(samples: Samples) -> Iterator[tuple[int, int]]:
    """Yield the first sample of each piece, and the sample after its last."""
    start, longest = 0, int(_LONGEST_S * RATE)
    while len(samples) - start > longest:
        first = start + int(_SHORTEST_S * RATE)
        loud = samples[first : start + longest]
        loud = loud[: len(loud) // _QUIET * _QUIET].reshape(-1, _QUIET)
        quietest = int(np.argmin(np.square(loud).sum(axis=1)))
        end = first + quietest * _QUIET + _QUIET // 2
        yield start, end
        start = end
    yield start, len(samples)


def as_url(samples: Samples) -> str:
    """Return samples as a `data:` URL of a WAV file."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return "data:audio/wav;base64," + base64.b64encode(written.getvalue()).decode()
