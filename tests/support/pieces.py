"""Prompts of text and media, by what comes after what."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.media import MediaItem, PlacedMedia
from tests.support.tiny_models import AUDIO, IMAGE, VIDEO

MARKS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
"""The token that stands in the place of each row of an item."""
Piece = MediaItem | int
"""An item, or how many tokens of text."""


def spelled(pieces: Sequence[Piece]) -> tuple[list[int], list[PlacedMedia]]:
    """Return tokens of a prompt, and the items among them."""
    tokens, placed = [2], []
    for piece in pieces:
        if isinstance(piece, MediaItem):
            placed.append(PlacedMedia(len(tokens), piece))
            tokens += [MARKS[piece.kind]] * piece.tokens
        else:
            tokens += [(7 * i * i + 3 * i + len(tokens)) % 240 for i in range(piece)]
    return tokens, placed
