"""Merging of events that wait for a slow reader."""

from __future__ import annotations

from quire.text.events import Event, Reasoning, Text, ToolCallArguments


def merge(events: list[Event]) -> list[Event]:
    """Merge adjacent events of the same kind. The text is unchanged."""
    merged: list[Event] = []
    same_kind: list[Event] = []
    for event in events:
        if same_kind and not _continues(same_kind[0], event):
            merged.append(_join(same_kind))
            same_kind = []
        same_kind.append(event)
    if same_kind:
        merged.append(_join(same_kind))
    return merged


def _continues(first: Event, event: Event) -> bool:
    """Return whether `event` is a further piece of what `first` starts."""
    match first, event:
        case (Text(), Text()) | (Reasoning(), Reasoning()):
            return True
        case ToolCallArguments(), ToolCallArguments():
            return first.index == event.index
        case _:
            return False


def _join(events: list[Event]) -> Event:
    """Return events of the same kind as one, in linear time."""
    if len(events) == 1:
        return events[0]
    calls = [event for event in events if isinstance(event, ToolCallArguments)]
    if calls:
        return ToolCallArguments(calls[0].index, "".join(event.json for event in calls))
    texts = [event for event in events if isinstance(event, Text | Reasoning)]
    logprobs = tuple(entry for event in texts for entry in event.logprobs)
    return type(texts[0])("".join(event.text for event in texts), logprobs)
