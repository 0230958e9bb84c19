"""How near a model that sees or hears comes to its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.media import PlacedMedia
from quire.models.base import LanguageModel
from tests.models.solo import solo_logits
from tests.support.parity import TOLERANCE


def differ(ours: mx.array, theirs: Any) -> float:
    """The largest difference, relative to the largest of their values.

    Args:
        theirs: an array of any library in the host's memory, of the same shape.
    """
    found, wanted = np.array(ours), np.asarray(theirs, np.float32)
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def assert_logits_match(
    model: LanguageModel,
    tokens: list[int],
    media: Sequence[PlacedMedia],
    logits: Any,
    rows: Sequence[Sequence[Any]],
) -> mx.array:
    """For decoders whose random layers make much of the encoder's rounding.

    `TOLERANCE` holds with the reference's rows in place of the encoder's, and for text alone; with
    the encoder's rows five times that.

    Args:
        logits: the reference's, `[tokens, vocab]`.
        rows: what its encoder made of each item, `[rows, hidden]` a level.

    Returns:
        The model's own logits.
    """
    ours = solo_logits(model, tokens, media)
    assert differ(ours, logits) < (5 * TOLERANCE if media else TOLERANCE)
    if media:
        made = [tuple(mx.array(np.asarray(level)) for level in levels) for levels in rows]
        assert differ(solo_logits(model, tokens, media, made), logits) < TOLERANCE
    return ours
