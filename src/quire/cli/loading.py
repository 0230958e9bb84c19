"""Progress of loading models: bars in a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from quire.cli.progress import TimeLeft
from quire.core import messages
from quire.core.figures import size

log = logging.getLogger("quire.loading")

_EVERY_S = 10.0
"""Seconds between two log lines. A quicker load is not logged."""

OnProgress = Callable[[str, "messages.Progress | None"], None]


def loading(log_format: str) -> OnProgress:
    """Return how progress is shown: a bar if the log is a terminal's, lines otherwise."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal and log_format == "text" else Lines()


def described(progress: messages.Progress) -> str:
    """Return the percentage done, and the name of the stage."""
    share = 100 * progress.done // max(1, progress.total)
    if progress.stage == "weights":
        return f"{share}% of {size(progress.total)} of weights"
    return f"warm-up, {progress.done} of {progress.total}"


class Lines:
    """Shows progress as a log line every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def __call__(self, name: str, progress: messages.Progress | None) -> None:
        """Take an engine's progress; None when loading has ended."""
        if progress is None:
            self._said.pop(name, None)
        elif (now := self._clock()) - self._said.setdefault(name, now) >= _EVERY_S:
            self._said[name] = now
            log.info("loading %s: %s", name, described(progress))


class Bars:
    """Shows a bar for each model that loads, one stage after another.

    A bar disappears at the end of a stage, so that log lines of the engine stay whole.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("loading {task.description}"), BarColumn(), TimeLeft())
        self._bars = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, name: str, progress: messages.Progress | None) -> None:
        if progress is None or progress.done >= progress.total:
            if (task := self._tasks.pop(name, None)) is not None:
                self._bars.remove_task(task)
            if not self._tasks:
                self._bars.stop()
            return
        if name not in self._tasks:
            self._bars.start()
            self._tasks[name] = self._bars.add_task(name)
        self._bars.update(
            self._tasks[name],
            description=f"{name}: {described(progress)}",
            completed=progress.done,
            total=progress.total,
            refresh=True,
        )
