"""The forms in which a chat template reads system messages.

Some templates know none (Gemma 2): the text is then the start of the first user message. Agents
send several: Codex at the start, Claude Code after any user's turn. Templates that refuse or drop
these get them as Claude Code marks its own reminders in user messages, and where they stand, so
that the prompt before them stays the same from turn to turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from quire.core.errors import RequestError
from quire.text.template_calls import Message, Render

SYSTEM_ROLES = ("system", "developer")
_PROBE = "probed text"
_BEGIN, _END, _BETWEEN = "<system-reminder>\n", "\n</system-reminder>", "\n\n"


@dataclass(frozen=True, slots=True)
class SystemForm:
    """How a template reads system messages.

    Attributes:
        first: whether it reads a system message at all.
        leading: whether it reads several before the first user message; else they are one message.
        later: the role of those that follow other messages; "joined" makes them part of an adjacent
            user message.
    """

    first: bool = True
    leading: bool = True
    later: Literal["system", "user", "joined"] = "system"

    def written(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages in this form."""
        found: list[Message] = []
        if not self.first:
            messages = _without_first(messages)
        reminded = False  # the last message found is one of reminders, without the user's text
        for message in map(dict, messages):
            is_system = message.get("role") in SYSTEM_ROLES
            if is_system and all(each.get("role") in SYSTEM_ROLES for each in found):
                if found and not self.leading:
                    message = _joined(found.pop(), message)
            elif is_system and self.later != "system":
                message = _reminder(message)
                if self.later == "joined" and found[-1].get("role") == "user":
                    message = _joined(found.pop(), message)
                else:
                    reminded = True
            elif reminded:
                if self.later == "joined" and message.get("role") == "user":
                    message = _joined(found.pop(), message)
                reminded = False
            found.append(message)
        return found


def system_form(
    render: Render, readable: Callable[[Message], Message], *, tools: bool
) -> SystemForm:
    """Return the first form in which a template shows system messages at all places.

    Args:
        readable: returns a message with its content as the template reads it.
        tools: whether the request has tools.
    """

    def shows(*messages: Message) -> bool:
        with suppress(RequestError):
            return _PROBE in render([readable(each) for each in messages], [] if tools else None)
        return False

    def refuses(*messages: Message) -> bool:
        try:
            render([readable(each) for each in messages], [] if tools else None)
        except RequestError:
            return True
        return False

    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    later = {"role": "system", "content": _PROBE}
    if refuses(later, user) and not refuses(user):
        later_forms = [SystemForm(first=False, leading=False, later="user")]
    else:
        leading = shows({"role": "system", "content": "?"}, later, user)
        later_forms = [SystemForm(leading=leading), SystemForm(leading=leading, later="user")]
    for form in later_forms:
        places = ([user, later], [user, later, answer, user], [user, answer, later, user])
        if all(shows(*form.written(place)) for place in places):
            return form
    return replace(later_forms[-1], later="joined")


def _without_first(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with the system messages at the start in the first user message."""
    conversation = [dict(each) for each in messages]
    start = list(takewhile(lambda each: each.get("role") in SYSTEM_ROLES, conversation))
    if not start:
        return conversation
    first, rest = {**start[0], "role": "user"}, conversation[len(start) :]
    for each in start[1:]:
        first = _joined(first, each)
    if rest and rest[0].get("role") == "user":
        return [_joined(first, rest[0]), *rest[1:]]
    return [first, *rest]


def _reminder(message: Message) -> Message:
    content = message.get("content") or ""
    if isinstance(content, str):
        return {"role": "user", "content": f"{_BEGIN}{content}{_END}"}
    return {"role": "user", "content": [_text(_BEGIN), *content, _text(_END)]}


def _joined(before: Message, after: Message) -> Message:
    """Return `before` with the content of `after` at its end."""
    first, second = before.get("content") or "", after.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        return {**before, "content": f"{first}{_BETWEEN}{second}"}
    return {**before, "content": [*_parts(first), _text(_BETWEEN), *_parts(second)]}


def _parts(content: str | list[Any]) -> list[Any]:
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
