"""Cuts sound into pieces that a model hears, and writes them as files."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.media.sound import Samples

RATE = 16_000
"""Samples per second that the encoders of all families take."""
_LONGEST_S, _SHORTEST_S = 28.0, 20.0
"""Bounds of a piece's length in seconds; it ends at the quietest moment between them. All models
hear at least 30 s.
"""
_FLOATS = 3
"""The format number of float32 samples in WAV files."""
_QUIET = RATE // 10
"""Number of samples over which loudness is averaged."""


def pieces(samples: Samples) -> Iterator[tuple[int, int]]:
    """Yield the first sample of each piece, and the sample after its last."""
    start, longest = 0, int(_LONGEST_S * RATE)
    while len(samples) - start > longest:
        first = start + int(_SHORTEST_S * RATE)
        loud = samples[first : start + longest]
        loud = loud[: len(loud) // _QUIET * _QUIET].reshape(-1, _QUIET)
        quietest = int((loud * loud).sum(axis=1).argmin())
        end = first + quietest * _QUIET + _QUIET // 2
        yield start, end
        start = end
    yield start, len(samples)


def as_url(samples: Samples) -> str:
    """Return samples as a `data:` URL of a WAV file of floats, which loses nothing."""
    sound = samples.astype("<f4").tobytes()
    size = samples.itemsize
    head = struct.pack(
        *("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(sound), b"WAVE", b"fmt ", 16, _FLOATS, 1),
        *(RATE, size * RATE, size, 8 * size, b"data", len(sound)),
    )
    return "data:audio/wav;base64," + base64.b64encode(head + sound).decode()
