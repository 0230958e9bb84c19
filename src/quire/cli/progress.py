"""Progress of a command on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from quire.core.figures import duration

StartStage = Callable[[str, int], Callable[[], None]]
"""Starts a stage of so many parts; what it gives is called after each part."""


def silent(what: str, parts: int) -> Callable[[], None]:
    """Return a `StartStage` that shows nothing."""
    return lambda: None


class _Speed(ProgressColumn):
    """Parts per second, or per minute if slower than one per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{speed * 60:.1f}/min")


class TimeLeft(ProgressColumn):
    """Estimated time left; total time once it is over."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.time_remaining
        if seconds is None:
            return Text("")
        return Text(f"{duration(round(seconds))}{'' if task.finished else ' left'}")


@contextmanager
def shown(console: Console) -> Iterator[StartStage]:
    """Show progress: bars with speed and time left in a terminal, a line for each stage
    elsewhere.
    """
    if not console.is_terminal:

        def say(what: str, parts: int) -> Callable[[], None]:
            console.print(f"{what}: {parts}", highlight=False)
            return lambda: None

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Speed())
    # Seldom, since the bench shares its processor with what it measures.
    with Progress(*columns, TimeLeft(), console=console, refresh_per_second=2) as bars:

        def start_stage(what: str, parts: int) -> Callable[[], None]:
            task = bars.add_task(what, total=parts)
            return lambda: bars.advance(task)

        yield start_stage
