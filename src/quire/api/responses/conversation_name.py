"""The name of a conversation in a request for a response: its id, or an object with it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Tag

from quire.api.shared.schema import Wire


class ConversationParam(Wire):
    """A conversation, named as an object."""

    id: str


def _tag(value: object) -> str:
    return "@id" if isinstance(value, str) else "@object"


ConversationName = Annotated[
    Annotated[str, Tag("@id")] | Annotated[ConversationParam, Tag("@object")],
    Discriminator(_tag),
]
