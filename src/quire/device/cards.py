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
    return len(_numbers())


def card_of(place: int) -> dict[str, str]:
    """Return the environment of a process that sees one card: NCCL starts in no other.

    Args:
        place: number of the process among those of this machine. Without so many cards it sees
            none.
    """
    numbers = _numbers()
    return {_VISIBLE: numbers[place] if place < len(numbers) else ""}


def see_one_card(place: int) -> None:
    """Let this process see one card only, if MLX has not looked for any yet."""
    os.environ.update(card_of(place))


def _numbers() -> list[str]:
    if _LISTED is not None:
        return [each.strip() for each in _LISTED.split(",") if each.strip()]
    return [each.name.removeprefix("nvidia") for each in sorted(Path("/dev").glob("nvidia[0-9]*"))]
