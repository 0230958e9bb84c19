"""The randomness of a row, which follows from its seed and its position alone. Pure Python."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


def uniforms(seed: int, position: int) -> tuple[float, float]:
    """Return two independent numbers in [0, 1), of 24 bits each so that float32 holds them exactly.

    SplitMix64 (Steele, Lea, Flood 2014), started at the mixed seed, read at `position`.
    """
    bits = _mix((_mix(seed & _U64) + (position + 1) * _GOLDEN) & _U64)
    return (bits >> 40) * 2.0**-24, (bits & 0xFFFFFF) * 2.0**-24


def excludes_top_choices(seed: int, position: int, probability: float) -> bool:
    """Return whether XTC leaves out the likeliest tokens; independent of `uniforms`."""
    bits = _mix((_mix(~seed & _U64) + (position + 1) * _GOLDEN) & _U64)
    return (bits >> 11) * 2.0**-53 < probability


def _mix(z: int) -> int:
    """Apply SplitMix64's finaliser: a bijection on 64 bits in which each bit moves all others."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)
