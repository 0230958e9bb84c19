"""Stored conversations and items that a request may refer to by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item", covariant=True)


class StoredConversations(Protocol[Item]):
    """Stored conversations of one caller. Each method returns None for an unknown id."""

    def history(self, response_id: str) -> Sequence[Item] | None:
        """Return the whole conversation that a response ends."""

    def conversation(self, conversation_id: str) -> Sequence[Item] | None:
        """Return the items of a conversation that a client created."""

    def item(self, item_id: str) -> Item | None:
        """Return an item of any conversation."""
