"""Folds the events of an answer that tests made."""

from __future__ import annotations

from collections.abc import Iterable

from quire.text.output import Answer, Event, Fold


def fold(events: Iterable[Event]) -> Answer:
    """Return the answer that all its events make."""
    folding = Fold()
    for event in events:
        folding.add(event)
    return folding.answer()
