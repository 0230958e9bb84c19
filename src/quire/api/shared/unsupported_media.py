"""Media in the history of a model that does not take its kind: left out, so that conversations go
on.

A conversation may have begun with another model, and agents' tools answer with screenshots. Only
what is in the newest message of the user's is refused, since it is what the question is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope

from quire.api.shared.access import note_ignored
from quire.api.shared.template_messages import TemplateMessage
from quire.media.kinds import inputs
from quire.media.source import DOCUMENT
from quire.serving.service import Service


def newest(name: str, said: Sequence[object], first: int = 0) -> str:
    """The path of the newest message of the user's, e.g. `messages[3]`.

    Args:
        name: of the field that holds what was said.
        first: the number of its first entry.
    """
    asked = (at for at, each in enumerate(said, first) if getattr(each, "role", "") == "user")
    return f"{name}[{max(asked, default=first)}]"


def without_unsupported_media(
    service: Service, scope: Scope, messages: Sequence[TemplateMessage], newest: str
) -> tuple[TemplateMessage, ...]:
    """The messages with words in the place of media whose kind the served model does not take.

    The client is told of each by its path. What stays is the service's to refuse.

    Args:
        newest: see the function of that name.
    """
    known = inputs()
    unseen = {kind: known[kind].left_out for kind in known.keys() - set(service.modalities)}
    return tuple(_readable(scope, message, newest, unseen) for message in messages)


def _readable(
    scope: Scope, message: TemplateMessage, newest: str, unseen: Mapping[str, str]
) -> TemplateMessage:
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        lost = part["type"] in unseen and not (part["type"] == DOCUMENT and part["source"].url)
        path = part["source"].param if lost else ""
        if path and not (message["role"] == "user" and path.startswith(f"{newest}.")):
            note_ignored(scope, [path])
            part = {"type": "text", "text": unseen[part["type"]]}
        parts.append(part)
    return {**message, "content": parts}
