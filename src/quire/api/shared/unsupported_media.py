"""Leaves out media of a conversation's history that the model cannot take, so that it can continue.

A conversation may have started with another model, and agents' tools answer with screenshots. Only
media in the user's newest message is refused, because the question is about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.types import Scope

from quire.api.shared.access import note_ignored
from quire.media.kinds import inputs
from quire.media.source import DOCUMENT, MediaSource
from quire.serving.messages import Part, TemplateMessage, text_part
from quire.serving.service import Service

_LEFT_OUT = 4
"""Share of items removed at a time: one in this many of those that a request may hold."""


def newest(name: str, said: Sequence[object], first: int = 0) -> str:
    """Return the path of the user's newest message, e.g. `messages[3]`.

    Args:
        name: name of the field with the messages.
        first: index of the first entry.
    """
    asked = (at for at, each in enumerate(said, first) if getattr(each, "role", "") == "user")
    return f"{name}[{max(asked, default=first)}]"


def without_unsupported_media(
    service: Service, scope: Scope, messages: Sequence[TemplateMessage], newest: str
) -> tuple[TemplateMessage, ...]:
    """Return the messages with texts in place of media that the served model does not support.

    The client is told of each by its path. Media left in may still be refused by the service.

    Args:
        newest: see the function of that name.
    """
    known = inputs()
    unseen = {kind: known[kind].left_out for kind in known.keys() - set(service.modalities)}
    readable = tuple(_readable(scope, message, newest, unseen=unseen) for message in messages)
    for kind in known.keys() & set(service.modalities):
        readable = _without_oldest(
            scope, readable, newest, kind=kind, most=service.prompts.media.most(kind)
        )
    return readable


def _without_oldest(
    scope: Scope, messages: Sequence[TemplateMessage], newest: str, kind: str, most: int
) -> tuple[TemplateMessage, ...]:
    """Return the messages without the oldest items of a kind, if they hold more than a request may.

    A quarter of what a request may hold goes at once, so that the prompt of an agent's next turns
    starts as this one and is found in the cache. The newest message of the user's keeps its own.
    """
    paths = [
        part["source"].param
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if "source" in part and part["type"] == kind
    ]
    too_many, at_once = len(paths) - most, max(1, most // _LEFT_OUT)
    if too_many <= 0:
        return tuple(messages)
    count = -(-too_many // at_once) * at_once
    old = [path for path in paths if not path.startswith(f"{newest}.")][:count]
    note_ignored(scope, old)
    words = f"[{inputs()[kind].noun.capitalize()} left out: this conversation holds too many.]"
    return tuple(_replaced(message, kind, set(old), words=words) for message in messages)


def _replaced(message: TemplateMessage, kind: str, old: set[str], words: str) -> TemplateMessage:
    """Return a message with text in place of its items of a kind at some paths."""
    if isinstance(message["content"], str):
        return message
    parts: list[Part] = [
        text_part(words)
        if "source" in part and part["type"] == kind and part["source"].param in old
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _readable(
    scope: Scope, message: TemplateMessage, newest: str, unseen: Mapping[str, str]
) -> TemplateMessage:
    if isinstance(message["content"], str):
        return message
    parts: list[Part] = []
    for part in message["content"]:
        if "source" not in part or part["type"] not in unseen or _renders(part["source"]):
            parts.append(part)
            continue
        path = part["source"].param
        if message["role"] == "user" and path.startswith(f"{newest}."):
            parts.append(part)  # the service refuses it
        else:
            note_ignored(scope, [path])
            parts.append(text_part(unseen[part["type"]]))
    return {**message, "content": parts}


def _renders(source: MediaSource) -> bool:
    """Return whether a source is a document whose pages become texts."""
    return source.kind == DOCUMENT and bool(source.url)
