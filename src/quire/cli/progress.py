"""How far a command has come, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Begin = Callable[[str, int], Callable[[], None]]
"""Begins a stage of so many parts; what it gives is called after each part."""


def silent(what: str, parts: int) -> Callable[[], None]:
    """A `Begin` that shows nothing."""
    return lambda: None


@contextmanager
def shown(console: Console) -> Iterator[Begin]:
    """Bars in a terminal; elsewhere a line for each stage that begins."""
    if not console.is_terminal:

        def say(what: str, parts: int) -> Callable[[], None]:
            console.print(f"{what}: {parts} parts", highlight=False)
            return lambda: None

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:

        def begin(what: str, parts: int) -> Callable[[], None]:
            task = bars.add_task(what, total=parts)
            return lambda: bars.advance(task)

        yield begin
