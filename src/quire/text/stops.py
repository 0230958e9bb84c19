"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.errors import RequestError


@dataclass(slots=True)
class _State:
    """A node of the automaton: some beginning of a stop string, the longest that the text ends in.

    Attributes:
        depth: characters of that beginning, all of which are held back.
        stop: the longest stop string that ends here.
        next: where each character leads. Characters that are missing lead to the root.
    """

    depth: int
    stop: str | None = None
    next: dict[str, _State] = field(default_factory=dict)


def _automaton(stops: Sequence[str]) -> _State:
    """Aho and Corasick's automaton (CACM 18:6, 1975) with all transitions worked out."""
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    # Breadth first, so that the state to fall back to, which is less deep, is complete.
    queue = deque((state, root) for state in root.next.values())
    while queue:
        state, fallback = queue.popleft()
        if state.stop is None:
            state.stop = fallback.stop
        for character, child in state.next.items():
            queue.append((child, fallback.next.get(character, root)))
        state.next = fallback.next | state.next
    return root


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may be a part of one.

    The stop string whose last character comes first wins, as the answer ends the moment one is
    complete; of several that end there, the longest. What is let through does not depend on how
    the text was cut. Takes time linear in the text, whatever the stop strings.

    Args:
        stops: none means that all text passes at once.

    Raises:
        RequestError: a stop string is empty.
    """

    __slots__ = ("_held", "_matched", "_root", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise RequestError("stop: a stop string must not be empty", param="stop")
        self._root = _automaton(stops)
        self._state = self._root
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string if one is complete.

        After a match nothing is sent any more.
        """
        root = self._root
        if self._matched is not None:
            return "", self._matched
        state = self._state
        if state is root and root.next.keys().isdisjoint(text):
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            state = state.next.get(text[position], root)
            if state.stop is not None:
                self._held, self._matched = "", state.stop
                return text[: position + 1 - len(state.stop)], state.stop
        self._state = state
        safe = len(text) - state.depth
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held, self._state = self._held, "", self._root
        return held
