"""Masks of a packed batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from training.model import Batch, Mask


def visible(batch: Batch, window: int | None, b: Any, q: Any, k: Any) -> Tensor:
    """Whether row `b`'s token `q` sees its token `k`.

    Full layers are causal. Sliding layers also let the tokens of one picture see each other, all
    of it within the window, as in Gemma 4.
    """
    same = batch.documents[b, q] == batch.documents[b, k]
    seen: Tensor = q >= k
    if window is not None:
        picture = batch.pictures[b, q]
        seen = seen | ((picture >= 0) & (picture == batch.pictures[b, k]))
        seen = seen & (q - k < window)
    return same & seen


def block_masks(batch: Batch, window: int) -> dict[str, Mask]:
    """Masks for flex attention, on the batch's device."""
    rows, length = batch.tokens.shape

    def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(batch, None, b, q, k)

    def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(batch, window, b, q, k)

    return {
        kind: create_block_mask(mod, rows, None, length, length, device=str(batch.tokens.device))
        for kind, mod in (("full_attention", full), ("sliding_attention", sliding))
    }


def dense_masks(batch: Batch, window: int) -> dict[str, Mask]:
    """Return the masks as arrays `[B, 1, L, L]`, for the CPU."""
    rows, length = batch.tokens.shape
    b = torch.arange(rows)[:, None, None]
    q = torch.arange(length)[None, :, None]
    k = torch.arange(length)[None, None, :]
    return {
        "full_attention": visible(batch, None, b, q, k)[:, None],
        "sliding_attention": visible(batch, window, b, q, k)[:, None],
    }
