"""The positions of a sequence's tokens, by which RoPE turns queries and keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.scheduler.plan import Positions


class TokenPositions:
    """Positions of the prompt, and of whatever follows it.

    Args:
        prompt: int32 `[axes, prompt tokens]` for multimodal RoPE, of most families time, height and
            width (Qwen2-VL, arXiv:2409.12191, section 2.1); None where a token's position is its
            index.

    Tokens after the prompt go on from the largest position within it, alike in all coordinates.
    """

    __slots__ = ("_length", "_prompt", "_shift")

    def __init__(self, prompt: npt.NDArray[np.int32] | None = None) -> None:
        self._prompt = prompt
        self._length = 0 if prompt is None else prompt.shape[1]
        self._shift = 0 if prompt is None else int(prompt.max()) + 1 - self._length

    def of(self, start: int, end: int) -> Positions:
        """Positions of tokens `[start, end)`."""
        if self._prompt is None or start >= self._length:
            return range(start + self._shift, end + self._shift)
        if end <= self._length:
            return self._prompt[:, start:end]
        behind = np.arange(self._length + self._shift, end + self._shift, dtype=np.int32)
        answer = np.broadcast_to(behind, (len(self._prompt), len(behind)))
        return np.concatenate([self._prompt[:, start:], answer], axis=1)
