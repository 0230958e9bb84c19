"""The operations of Apple silicon: MLX's, in fewer launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import mlx.core as mx

from quire.device.operations import Operations
from quire.device.rotation import Rotate
from quire.device.weights import HeadPart, JoinedMatrix, Matrix, joined_by


class MetalOperations(Operations):
    """Operations that multiply rows by several matrices at once, where weights are joined.

    Then a layer's queries, keys and values are one product, one norm and one rotation.
    """

    def __init__(self) -> None:
        self._heads: WeakKeyDictionary[HeadPart, _JoinedHeads | None] = WeakKeyDictionary()
        """How the heads of a layer are computed, by its first part; None if one by one."""

    def products(self, x: mx.array, matrices: Sequence[Matrix]) -> list[mx.array]:
        joined = joined_by(matrices)
        if joined is None:
            return super().products(x, matrices)
        return [*mx.split(self._joined(x, joined), list(joined.ends[:-1]), axis=-1)]

    def heads(
        self, x: mx.array, parts: Sequence[HeadPart], eps: float, rotate: Rotate | None
    ) -> list[mx.array]:
        first = parts[0]
        if first not in self._heads:
            self._heads[first] = _JoinedHeads.of(parts)
        joined = self._heads[first]
        if joined is None:
            return super().heads(x, parts, eps, rotate=rotate)
        y = self._joined(x, joined.matrix).reshape(len(x), joined.heads, -1)
        stages = [y]
        if joined.normed:
            stages.append(self.rms_norm(y, None, eps))
        if joined.norms is not None:
            stages.append(stages[-1] * joined.norms)
        if rotate is not None and joined.rotated:
            stages.append(rotate(stages[-1]))
        last = len(stages) - 1
        cut = {at: mx.split(stages[at], joined.ends, axis=1) for at in joined.read(last)}
        return [cut[min(stage, last)][number] for stage, number in joined.parts]

    def _joined(self, x: mx.array, joined: JoinedMatrix) -> mx.array:
        weight = joined.weight
        if isinstance(weight, mx.array):
            return self.linear(x, weight, joined.bias)
        return self.packed_linear(x, weight, joined.bias)


@dataclass(frozen=True, slots=True)
class _JoinedHeads:
    """The heads of a layer whose matrices are joined.

    All heads pass through stages: the product, their norm without weights, its weights, and the
    rotation. A layer skips stages that no part needs.

    Attributes:
        heads: number of all heads.
        ends: heads up to the end of each matrix but the last.
        parts: for each part the index of the stage that it is read from, and of its matrix.
        normed, rotated: whether any part is.
        norms: weights of the norms, `[heads, dim]`, 1 for heads without; None if no part has any.
    """

    matrix: JoinedMatrix
    heads: int
    ends: list[int]
    parts: tuple[tuple[int, int], ...]
    normed: bool
    rotated: bool
    norms: mx.array | None

    def read(self, last: int) -> set[int]:
        """Return the stages that parts are read from, where `last` is the last one."""
        return {min(stage, last) for stage, _ in self.parts}

    @staticmethod
    def of(parts: Sequence[HeadPart]) -> _JoinedHeads | None:
        """Return how to compute all parts at once; None if they are not joined, or if their heads
        differ in more than the weights of their norms.
        """
        own = [part for part in parts if part.matrix is not None]
        joined = joined_by([part.matrix for part in own if part.matrix is not None])
        if joined is None or not _alike(parts, joined):
            return None
        norms = _weights(own) if any(part.norm is not None for part in own) else None
        ends = list(accumulate(part.heads for part in own))
        normed = any(part.normed for part in parts)
        weighted = normed + (norms is not None)
        number, read = -1, []
        for part in parts:
            number += part.matrix is not None
            scaled = weighted if part.norm is not None else int(part.normed)
            read.append((weighted + 1 if part.rotated else scaled, number))
        return _JoinedHeads(
            matrix=joined,
            heads=ends[-1],
            ends=ends[:-1],
            parts=tuple(read),
            normed=normed,
            rotated=any(part.rotated for part in parts),
            norms=norms,
        )


def _alike(parts: Sequence[HeadPart], joined: JoinedMatrix) -> bool:
    """Return whether heads have one size, and rotated ones a norm each or none at all."""
    ends = accumulate(part.heads for part in parts if part.matrix is not None)
    sizes = {outputs / heads for outputs, heads in zip(joined.ends, ends, strict=True)}
    return (
        len(sizes) == 1
        and len({part.normed for part in parts if part.rotated}) < 2
        and all(part.norm is None or part.norm.ndim == 1 for part in parts)
        # A part of the product before has no weights of its own among the norms.
        and not any(
            part.matrix is None and (part.rotated or part.norm is not None) for part in parts
        )
    )


def _weights(parts: Sequence[HeadPart]) -> mx.array:
    """Return the weights of the norms of all heads, `[heads, dim]`."""
    some = next(part.norm for part in parts if part.norm is not None)
    rows = [mx.ones_like(some) if part.norm is None else part.norm for part in parts]
    counts = [part.heads for part in parts]
    table = mx.concatenate(
        [mx.broadcast_to(row, (count, len(row))) for row, count in zip(rows, counts, strict=True)]
    )
    mx.eval(table)
    return table
