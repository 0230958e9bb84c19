"""A real server under attack, and the neighbour whose stream runs beside.

    with attacked(folder) as victim, victim.watched() as seen:
        ...  # what the attacker does to victim.url
    seen.check()

The principle that is tested: nothing that a client sends keeps the event loop for long, or takes
memory out of proportion to its size.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.client import Client
from tests.support.child import Child, running

MIB = 1 << 20
TURN_S = 0.25
"""Processor time of the event loop's thread that one turn may take: five times what any takes, a
fraction of the attacks that this is there to see."""
SILENCE_S = 30.0
"""How long a stream may pause, or /health not answer. A hang guard: the machine may be busy."""

_PROMPT = "Once upon a time there was a"
_FIELDS = {"max_tokens": 30, "ignore_eos": True}
_EVERY_S = 0.05


@dataclass
class Seen:
    """What was noticed beside an attack.

    Attributes:
        expected: the neighbour's answer before the attack; `answers` are those beside it.
        gap_s: the longest silence within the neighbour's streams.
        health_s: the longest time that /health took.
        turns_s: processor seconds of the event loop's long turns.
        peak, left: bytes that the server's processes have grown by, at most and at the end.
        errors: of those who watched.
    """

    expected: str
    answers: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    health_s: float = 0.0
    turns_s: list[float] = field(default_factory=list)
    peak: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)

    def check(self, *, peak: int = 600 * MIB, left: int = 150 * MIB) -> None:
        """Asserts that the neighbour noticed nothing, and that memory was bounded and came back."""
        assert not self.errors, self.errors
        assert self.answers, "no stream of the neighbour's ended"
        assert set(self.answers) == {self.expected}
        assert max(self.turns_s, default=0.0) <= TURN_S, f"turns of the loop: {self.turns_s} s"
        assert self.gap_s <= SILENCE_S, f"the neighbour waited {self.gap_s:.1f} s"
        assert self.health_s <= SILENCE_S, f"/health took {self.health_s:.1f} s"
        assert self.peak <= peak, f"memory grew by {self.peak / MIB:.0f} MiB"
        assert self.left <= left, f"{self.left / MIB:.0f} MiB did not come back"


@dataclass
class Victim:
    """A running server whose event loop is measured."""

    child: Child
    turns: Path

    @property
    def url(self) -> str:
        return self.child.url

    def memory(self) -> int:
        """Bytes that the server's processes hold for themselves."""
        server = psutil.Process(self.child.process.pid)
        total = 0
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().uss
        return total

    def processes(self) -> int:
        """How many processes the server consists of."""
        return 1 + len(psutil.Process(self.child.process.pid).children(recursive=True))

    @contextlib.contextmanager
    def watched(self) -> Iterator[Seen]:
        """Runs a neighbour's streams beside the block; what was seen is complete at its end."""
        with Client(self.url) as client:
            seen = Seen(client.text(_PROMPT, **_FIELDS))
            self.turns.write_text("")
            before = self.memory()
            done, begun = threading.Event(), threading.Event()
            watchers = [
                threading.Thread(target=_guarded, args=(seen, watch), daemon=True)
                for watch in (
                    lambda: _stream(client, seen, begun, done),
                    lambda: _ask_health(self.url, seen, done),
                    lambda: self._weigh(seen, before, done),
                )
            ]
            for watcher in watchers:
                watcher.start()
            assert begun.wait(60), "the neighbour's stream did not begin"
            try:
                yield seen
            finally:
                done.set()
                for watcher in watchers:
                    watcher.join(60)
            self.child.wait_idle(60)
            seen.turns_s = [float(line) for line in self.turns.read_text().split()]
            seen.left = self._settled(before)

    def _weigh(self, seen: Seen, before: int, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            seen.peak = max(seen.peak, self.memory() - before)

    def _settled(self, before: int) -> int:
        """The growth that is left, once it stops falling."""
        grown = self.memory() - before
        for _ in range(10):
            time.sleep(0.2)
            now = self.memory() - before
            if now >= grown:
                break
            grown = now
        return grown


def _guarded(seen: Seen, watch: Any) -> None:
    try:
        watch()
    except Exception as error:  # shown by `check`
        seen.errors.append(f"{type(error).__name__}: {error}")


def _stream(client: Client, seen: Seen, begun: threading.Event, done: threading.Event) -> None:
    """The neighbour: one stream after the other, the last of which begins within the attack."""
    while not (done.is_set() and seen.answers):
        answer = client.stream(_PROMPT, lambda _: begun.set(), **_FIELDS)
        assert answer.error is None, answer.error
        seen.gap_s = max(seen.gap_s, *answer.gaps)
        seen.answers.append(answer.text)


def _ask_health(url: str, seen: Seen, done: threading.Event) -> None:
    with httpx.Client(timeout=120) as http:
        while not done.wait(_EVERY_S):
            asked = time.perf_counter()
            assert http.get(f"{url}/health").status_code == 200
            seen.health_s = max(seen.health_s, time.perf_counter() - asked)


@contextlib.contextmanager
def attacked(folder: Path, *arguments: str) -> Iterator[Victim]:
    """`quire serve` with the embedded model (or the one among `arguments`) on a measured loop."""
    turns = folder / "turns"
    turns.touch()
    common = ("serve", "--port", "0", "--log-level", "warning")
    module = "tests.attack.serve_measured"
    with running(folder, module, str(turns), *common, *arguments) as child:
        yield Victim(child, turns)
        assert child.process.poll() is None, f"the server died: {child.log.read_text()}"
