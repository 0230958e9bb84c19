"""Measures how far what kernels computed is from what the model's own code computes.

Whole results are compared by all their rows together: in a mixture rounding may give a row another
expert. Results of one node are compared row by row.
"""

from __future__ import annotations

import math

import mlx.core as mx

from quire.core.kv_format import KVFormat
from quire.device.verified import relative_norm

_SMALL = 0.1
"""Rows below this part of their array's typical norm are measured by that, since what remains of
large terms that cancel is mostly rounding."""
_NOTHING = 1e-6
"""Norm of a row below which it is noise to every layer: norms of layers add as much."""
_ELEMENTS = 1 << 24
"""Most elements that are compared at a time, as float32."""
_TOLERANCE, _TOLERANCE_OF_TOKENS = 5e-2, 0.2
"""Largest errors of a step's results: over blocks of any KV format, and of one that codes each
token by itself. There a number at the edge between two codes may get the other one, in a token that
the step itself reads. 0.13 was seen, of a tiny model.
"""


def tolerance_of(format: KVFormat) -> float:
    """Return the largest `whole_error` of a step's results over blocks of a KV format."""
    return _TOLERANCE_OF_TOKENS if format.scheme in ("uniform", "turbo") else _TOLERANCE


def whole_error(found: mx.array, expected: mx.array) -> float:
    """Return the difference's norm by that of what was expected, infinite if it is no number.

    It is 0 for integers: these are codes, of which one may turn where vectors differ in their last
    bits.
    """
    if not _has_numbers(expected):
        return 0.0
    if bool(mx.array_equal(found, expected, equal_nan=True)):
        return 0.0
    return number_of(relative_norm(found, expected))


def number_of(error: mx.array) -> float:
    """Return an error as a number of Python's, infinite if it is none."""
    number = float(error)
    return number if math.isfinite(number) else math.inf


def worst_row(found: mx.array, expected: mx.array) -> mx.array:
    """Return the largest relative error of a row `[rows, ...]`: its difference by its own norm.

    It is not yet computed. It is 0 for integers, as in `whole_error`.
    """
    if not _has_numbers(expected):
        return mx.array(0.0)
    rows = len(expected) if expected.ndim > 1 else 1
    found, expected = found.reshape(rows, -1), expected.reshape(rows, -1)
    step = max(1, _ELEMENTS // expected.shape[1])
    differences, norms = list[mx.array](), list[mx.array]()
    for first in range(0, rows, step):
        wide, narrow = (each[first : first + step].astype(mx.float32) for each in (expected, found))
        same = (narrow == wide) | (mx.isnan(narrow) & mx.isnan(wide))
        differences.append(mx.linalg.norm(mx.where(same, 0, narrow - wide), axis=-1))
        norms.append(mx.linalg.norm(mx.where(mx.isnan(wide), 0, wide), axis=-1))
        if rows > step:
            mx.eval(differences[-1], norms[-1])
    norm = mx.concatenate(norms)
    least = mx.maximum(_SMALL * mx.sqrt(mx.mean(norm * norm)), _NOTHING)
    return (mx.concatenate(differences) / mx.maximum(norm, least)).max()


def _has_numbers(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating) and array.size > 0
