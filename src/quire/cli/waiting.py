"""Messages while a server loads a model that a request waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from rich.console import Console

from quire.cli.loading import described
from quire.cli.served import Server, ServerError
from quire.core.messages import Progress

_EVERY_S = 0.5


def loaded(server: Server, name: str) -> dict[str, Any]:
    """Load a model, and show its progress in a terminal.

    Raises:
        ServerError: it is not served, or cannot be loaded.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return server.load(name)
    with console.status(f"loading {name}") as status, Watch(server, name, status.update):
        return server.load(name)


class Watch:
    """Polls a server for the progress of loading a model, in a thread of its own.

    Args:
        say: called with the progress while the model loads, and never after `end`.
    """

    def __init__(self, server: Server, name: str, say: Callable[[str], None]) -> None:
        self._server = replace(server, watching=True)
        self._name = name
        self._say = say
        self._turn = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Stop polling. No effect after the first call."""
        with self._turn:
            self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                words = loading_words(self._server.model(self._name))
            except ServerError:
                continue  # who waits hears of it
            with self._turn:
                if words and not self._over.is_set():
                    self._say(words)


def loading_words(model: dict[str, Any]) -> str:
    """Return the loading progress of a listed model; empty if it is not loading."""
    if model.get("state") != "loading":
        return ""
    progress = model.get("progress")
    share = f": {described(Progress(**progress))}" if progress else ""
    return f"loading {model['id']}{share}"
