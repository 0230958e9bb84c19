"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.errors import RequestError

MAX_CHARACTERS = 4096
"""Characters of all stop strings of a request together."""


@dataclass(slots=True, eq=False)
class _State:
    """A node of the automaton: some start of a stop string, the longest that the text ends in.

    Attributes:
        depth: characters of that start, all of which are held back.
        fallback: the longest start that this one ends in; the root's is none.
        stop: the longest stop string that ends here.
        next: where each character leads that goes on with a stop string.
    """

    depth: int
    fallback: _State | None = None
    stop: str | None = None
    next: dict[str, _State] = field(default_factory=dict)

    def after(self, character: str) -> _State:
        """Return the state after `character`. Amortised constant time."""
        state = self
        while character not in state.next:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.next[character]


class StopStrings:
    """The stop strings of a request, compiled once for all choices.

    Args:
        stops: none means that all text passes at once.

    Raises:
        RequestError: a stop string is empty, or all together are too long.
    """

    __slots__ = ("root",)

    def __init__(self, stops: Sequence[str], param: str = "stop") -> None:
        if any(not stop for stop in stops):
            raise RequestError(f"'{param}': a stop string must not be empty.", param=param)
        size = sum(map(len, stops))
        if size > MAX_CHARACTERS:
            raise RequestError(
                f"'{param}' holds {size} characters; at most {MAX_CHARACTERS} are taken.",
                param=param,
                code="string_above_max_length",
            )
        self.root = _automaton(stops)


def _automaton(stops: Sequence[str]) -> _State:
    """Aho and Corasick's automaton (CACM 18:6, 1975): memory linear in the stop strings."""
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1, root))
        state.stop = stop
    # Breadth first, so that the state to fall back to, which is less deep, is complete.
    queue = deque(root.next.values())
    while queue:
        state = queue.popleft()
        fallback = state.fallback or root
        if state.stop is None:
            state.stop = fallback.stop
        for character, child in state.next.items():
            child.fallback = fallback.after(character)
            queue.append(child)
    return root


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may be a part of one.

    The stop string whose last character comes first wins, as the answer ends the moment one is
    complete; of several that end there, the longest. What is let through does not depend on how
    the text was cut. Takes time linear in the text, whatever the stop strings.

    Args:
        include: let the stop string through as well.
    """

    __slots__ = ("_held", "_include", "_matched", "_root", "_state")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._include = include
        self._root = stops.root
        self._state = self._root
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string if one is complete.

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
            state = state.after(text[position])
            if state.stop is not None:
                self._held, self._matched = "", state.stop
                cut = 0 if self._include else len(state.stop)
                return text[: position + 1 - cut], state.stop
        self._state = state
        safe = len(text) - state.depth
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return the text that was held back, when no text follows."""
        held, self._held, self._state = self._held, "", self._root
        return held
