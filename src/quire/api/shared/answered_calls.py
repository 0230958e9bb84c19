"""Pairs the results of tools in a conversation with the calls that they answer."""

from __future__ import annotations

from collections.abc import Sequence

from quire.serving import messages


class MadeCalls:
    """The calls that the assistant has made so far in a conversation."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._unanswered: list[messages.Call] = []

    def add(self, calls: Sequence[messages.Call]) -> None:
        """Add the calls of one message. Those of earlier messages are found by their id alone."""
        self._names |= {call["id"]: call["function"]["name"] for call in calls}
        self._unanswered = list(calls)

    def answered(self, call_id: str | None, name: str | None) -> tuple[str, str | None]:
        """Return the id and the tool's name of the call that a result answers.

        A result without an id answers the first unanswered call of its name, or the first one of
        all if it has no name either.
        """
        for call in self._unanswered:
            if call["id"] == call_id if call_id else name in (None, call["function"]["name"]):
                self._unanswered.remove(call)
                return call["id"], name or call["function"]["name"]
        return call_id or "", name or self._names.get(call_id or "")
