"""Sampling state of one sequence, updated from step to step. Pure Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from quire.constraints.masks import TokenMask
from quire.core.request import SamplingParams
from quire.core.sampling_params import is_greedy
from quire.sampling.rows import History, RowSampling


class RowState:
    """The sampling state of a sequence. Makes the `RowSampling` of its rows.

    Attributes:
        mask: the tokens that may come next; None allows all.
    """

    __slots__ = ("_fixed", "_params", "_prompt", "_seen", "mask")

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.mask: TokenMask | None = None
        self._params = params
        self._prompt = prompt
        # A greedy row's choice depends on nothing but its logits: one object serves all steps.
        fixed = is_greedy(params) and not params.needs_history
        self._fixed = (RowSampling(params, 0),) if fixed else None
        self._seen: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None

    def rows(
        self,
        tokens: array[int],
        position: int,
        drafts: tuple[int, ...] = (),
        draft_masks: tuple[TokenMask | None, ...] = (),
        *,
        masked: bool = True,
    ) -> tuple[RowSampling, ...]:
        """Return the sampler's input for the token at `position` and the tokens after each of
        `drafts`.

        Args:
            tokens: tokens that the host knows. The one before `position` may still be on the
                device.
            draft_masks: mask of the token after each draft; empty allows all.
            masked: whether `mask` applies; False while it waits for that token.
        """
        mask = self.mask if masked else None
        if self._fixed is not None and mask is None:
            if not drafts:
                return self._fixed
            if not any(m is not None for m in draft_masks):
                return self._fixed * (len(drafts) + 1)
        masks = (mask, *(draft_masks or (None,) * len(drafts)))
        if not self._params.needs_history:
            return tuple(
                RowSampling(self._params, position + n, mask=mask) for n, mask in enumerate(masks)
            )
        if self._seen is None:  # the prompt never changes, and may be long
            prompt = np.array(self._prompt, dtype=np.int32)
            self._seen = prompt if self._params.penalises_repeats else np.unique(prompt)
        # One array from another: the answer is copied in every step, and may be long.
        answer = np.array(tokens[len(self._prompt) :] + array("i", drafts), dtype=np.int32)
        known = len(answer) - len(drafts)
        return tuple(
            RowSampling(
                self._params,
                position + n,
                History(self._seen, answer[: known + n]),
                mask=mask,
            )
            for n, mask in enumerate(masks)
        )
