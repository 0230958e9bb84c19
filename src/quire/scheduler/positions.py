"""Positions of a sequence's tokens for RoPE."""

from __future__ import annotations

from array import array
from itertools import chain

import numpy as np
import numpy.typing as npt

from quire.scheduler.plan import Positions


def alike(positions: Positions) -> npt.NDArray[np.float32] | None:
    """Return each row's position, `[count]`; None if axes of a row differ."""
    if isinstance(positions, range):
        return np.array(positions, np.float32)
    return positions[0] if (positions == positions[0]).all() else None


def joined_positions(positions: list[Positions]) -> npt.NDArray[np.int32] | npt.NDArray[np.float32]:
    """Concatenate the positions of all sequences: int32 `[T]`, or float32 `[axes, T]`."""
    if not [each for each in positions if not isinstance(each, range)]:
        return np.frombuffer(array("i", chain.from_iterable(positions)), np.int32)
    axes = max(len(each) for each in positions if not isinstance(each, range))
    parts = [
        np.broadcast_to(np.array(each, np.float32), (axes, _length(each))) for each in positions
    ]
    return np.concatenate(parts, axis=1)


def _length(positions: Positions) -> int:
    return len(positions) if isinstance(positions, range) else positions.shape[-1]


class TokenPositions:
    """Positions of the prompt and of all tokens after it.

    Args:
        prompt: `[axes, prompt tokens]` for multimodal RoPE, in most families time, height and width
            (Qwen2-VL, arXiv:2409.12191, section 2.1); None if a token's position is its index.

    Tokens after the prompt go on from the largest position within it, alike in all coordinates.
    """

    __slots__ = ("_length", "_prompt", "_shift")

    def __init__(self, prompt: npt.NDArray[np.float32] | None = None) -> None:
        self._prompt = prompt
        self._length = 0 if prompt is None else prompt.shape[1]
        self._shift = 0.0 if prompt is None else float(prompt.max()) + 1 - self._length

    def of(self, start: int, end: int) -> Positions:
        """Return the positions of tokens `[start, end)`."""
        if self._prompt is None:
            return range(start, end)
        if start >= self._length:
            if self._shift.is_integer():
                return range(start + int(self._shift), end + int(self._shift))
            return self._behind(start, end)
        if end <= self._length:
            return self._prompt[:, start:end]
        answer = self._behind(self._length, end)
        return np.concatenate([self._prompt[:, start:], answer], axis=1)

    def _behind(self, start: int, end: int) -> npt.NDArray[np.float32]:
        """Return the positions of tokens after the prompt, `[axes, end - start]`."""
        assert self._prompt is not None
        behind = (np.arange(start, end) + self._shift).astype(np.float32)
        return np.broadcast_to(behind, (len(self._prompt), len(behind)))
