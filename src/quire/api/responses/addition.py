"""Items that a request adds to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.responses.listing import missing
from quire.api.responses.schema import Item, MessageItem, ReferenceItem
from quire.api.responses.store import ResponseStore
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.stored import StoredConversations


@dataclass(frozen=True, slots=True)
class Addition:
    """A request's own items, which join its conversation together with the answer.

    Attributes:
        conversation_id: the conversation; None if the request names none.
    """

    conversation_id: str | None
    items: Sequence[StoredItem]

    def join(self, store: ResponseStore, output: Sequence[StoredItem]) -> None:
        """Append the items and the answer to the conversation, unless it was deleted meanwhile."""
        if self.conversation_id is not None:
            store.extend(self.conversation_id, (*self.items, *output))


def new_items(
    given: str | Sequence[Item] | None, stored: StoredConversations[StoredItem], taken: set[str]
) -> list[StoredItem]:
    """Return the request's own items, with references to stored ones resolved.

    Args:
        taken: ids of earlier items; new ids are added.
    """
    if isinstance(given, str):
        return [StoredItem.of(MessageItem(role="user", content=given))]
    items: list[StoredItem] = []
    for index, item in enumerate(given or ()):
        if isinstance(item, ReferenceItem):
            found = stored.item(item.id)
            if found is None:
                raise missing("item", item.id, f"input[{index}].id")
        else:
            found = StoredItem.of(item)
        items.append(found.beside(taken))
        taken.add(items[-1].id)
    return items
