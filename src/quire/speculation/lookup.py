"""Drafters without a model: tokens that followed the same text before are likely to follow
again.
"""

from __future__ import annotations

from itertools import takewhile

from quire.cache.index import Node
from quire.core.speculation import PREDICTION
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.speculation.ngrams import FixedText, GrowingText, Place, continuation

_MOST_INDEXED = 1 << 17
"""Most tokens of a prompt that are indexed, the last ones: 20 ms of a step."""
_LEAST_INDEXED = 8
"""Fewest tokens of a prompt for which an index is made."""


def _grade(agreed: int) -> int:
    """Return the class of reliability by the number of agreeing tokens: 3, 4 to 7, 8 to 15, ..."""
    return (agreed // 4).bit_length()


class NGramDrafter(LookupDrafter):
    """Drafts the tokens that followed the last few tokens earlier in prompt or answer."""

    name = "ngram"
    looks_ahead = True

    def __init__(self) -> None:
        self._texts: dict[int, tuple[FixedText | None, GrowingText]] = {}

    def forget(self, number: int) -> None:
        self._texts.pop(number, None)

    def draft(self, query: DraftQuery) -> Draft | None:
        text = query.tokens
        if query.number not in self._texts:
            self._texts[query.number] = _index(query)
        prompt, answer = self._texts[query.number]
        own = answer.find(text)
        place = None if prompt is None else prompt.find(text)
        if own is not None and (place is None or own.agreed >= place.agreed):
            tokens = continuation(text, own.end, query.limit, repeats=True)
            return Draft(tokens, self.name, _grade(own.agreed))
        if prompt is None or place is None:
            return None
        return _draft_of(prompt, place, query=query, name=self.name)


def _index(query: DraftQuery) -> tuple[FixedText | None, GrowingText]:
    length = len(query.request.prompt)
    prompt = query.request.prompt[-_MOST_INDEXED:]
    indexed = len(prompt) >= _LEAST_INDEXED
    # N-grams that start in the prompt and end in the answer belong to the answer.
    start = max(0, length - 2) if indexed else 0
    return FixedText(prompt) if indexed else None, GrowingText(start)


def _draft_of(text: FixedText, place: Place, query: DraftQuery, name: str) -> Draft:
    tokens = continuation(text.tokens, place.end, query.limit, repeats=False)
    return Draft(tokens, name, _grade(place.agreed))


class PredictionDrafter(LookupDrafter):
    """Drafts from the answer that the client expects (OpenAI's `prediction`)."""

    name = PREDICTION
    looks_ahead = True

    def __init__(self) -> None:
        self._texts: dict[int, FixedText] = {}

    def forget(self, number: int) -> None:
        self._texts.pop(number, None)

    def draft(self, query: DraftQuery) -> Draft | None:
        if not query.request.prediction:
            return None
        if query.number not in self._texts:
            self._texts[query.number] = FixedText(query.request.prediction)
        text = self._texts[query.number]
        answer = query.tokens[len(query.request.prompt) :]
        if len(answer) < len(text.tokens) and answer == text.tokens[: len(answer)]:
            place: Place | None = Place(len(answer), len(answer))
        else:
            place = text.find(answer)
        return None if place is None else _draft_of(text, place, query=query, name=self.name)


class CachedDrafter(LookupDrafter):
    """Drafts the tokens that followed the same start in another request, from the prefix index.

    It finds repeated requests and repeated conversations.
    """

    name = "cached"
    looks_ahead = True

    def draft(self, query: DraftQuery) -> Draft | None:
        node = query.node
        if node is None or not node.children:
            return None
        rest = tuple(query.content[query.node_end :])
        child, at = _child(node, rest), len(rest)
        tokens: list[int] = []
        while child is not None and len(tokens) < query.limit:
            tokens += child.tokens[at:]
            child, at = _child(child, ()), 0
        return Draft(tuple(tokens[: query.limit]), self.name) if tokens else None


def _child(node: Node, tokens: tuple[int, ...]) -> Node | None:
    """Return a child node whose tokens start with `tokens` and continue."""
    if not tokens:
        return next(reversed(node.children.values()), None)
    found = takewhile(lambda each: each[1] == len(tokens), node.alike(tokens))
    return next((child for child, _ in found if len(child.tokens) > len(tokens)), None)
