"""NVIDIA cards of this machine, and which one a process sees. Imports no MLX: MLX looks for cards
once.
"""

from __future__ import annotations

import os
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LISTED = os.environ.get(_VISIBLE)
"""Cards that this process was started with."""


def count_cards() -> int:
    """Return the number of cards that this process was started with."""
    return len(_cards())


def card_of(place: int) -> dict[str, str]:
    """Return the environment of a process that sees one card: NCCL starts in no other.

    Args:
        place: number of the process among those of this machine. If the cards are known and are
            fewer, it sees none.
    """
    cards = _cards() or [str(number) for number in range(place + 1)]
    return {_VISIBLE: cards[place] if place < len(cards) else ""}


def see_one_card(place: int) -> None:
    """Let this process see one card only, if MLX has not looked for any yet."""
    os.environ.update(card_of(place))


def _cards() -> list[str]:
    """Return the cards by CUDA's names, which count from 0 whatever their devices are called."""
    if _LISTED is not None:
        return [each.strip() for each in _LISTED.split(",") if each.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
