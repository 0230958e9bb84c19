"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.errors import RequestError

MAX_CHARACTERS = 4096
"""The most characters of all stop strings of a request together."""


@dataclass(slots=True, eq=False)
class _State:
    """A state of the automaton: the longest prefix of a stop string that the text ends in.

    Attributes:
        depth: length of the prefix, whose characters are held back.
        fallback: state of the longest other prefix that this prefix ends in; None for the root.
        stop: the longest stop string that ends in this state.
        next: following states, by the next character of a stop string.
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
        stops: the stop strings; without any, all text passes at once.

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
    """Build the automaton of Aho and Corasick (CACM 18:6, 1975). Its size is linear in the stop
    strings.
    """
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1, root))
        state.stop = stop
    # Breadth first, so that fallback states, which are less deep, are complete.
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
    """Passes text up to the first stop string, and holds back text that may start one.

    The stop string that is complete first wins; of several that end at the same character, the
    longest. The result does not depend on how the text was cut, and the time is linear in the text.

    Args:
        include: whether to pass the stop string too.
    """

    __slots__ = ("_held", "_include", "_matched", "_root", "_state")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._include = include
        self._root = stops.root
        self._state = self._root
        self._held = ""
        self._matched: str | None = None

    def passes(self, text: str) -> bool:
        """Return whether `feed` would pass `text` on and remember nothing of it."""
        idle = self._state is self._root and self._matched is None
        return idle and self._root.next.keys().isdisjoint(text)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string if one is complete.

        After a match no more text is returned.
        """
        if self.passes(text):
            return text, None
        if self._matched is not None:
            return "", self._matched
        state = self._state
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
        """Return the text that was held back, as no text follows."""
        held, self._held, self._state = self._held, "", self._root
        return held
