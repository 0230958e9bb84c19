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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.client import Client, Streamed
from tests.support.child import Child, running
from tests.support.waiting import HANG_S, wait_until

MIB = 1 << 20
TURN = 400.0
"""Pieces of work (`serve_measured`) that one turn of the event loop may be worth: five times what
any is, a fraction of the attacks that this is there to see."""
SILENCE_S = 3.0
"""Processor time that the server's process may use while a stream pauses, or /health does not
answer: what the machine does beside does not count."""

_PROMPT = "Once upon a time there was a"
_FIELDS = {"max_tokens": 30, "ignore_eos": True}
_EVERY_S = 0.05
_MIDST_S = 0.1
"""Processor time after which a long job is well under way."""


@dataclass
class Seen:
    """Observations beside an attack.

    Attributes:
        expected: the neighbour's answer before the attack; `answers` are those beside it.
        gap_s: processor seconds of the server within the longest silence of the neighbour's.
        health_s: the same, until /health answered.
        healths: how often it answered.
        turns: pieces of work that the event loop's long turns were worth.
        peak: bytes that the server's processes have grown by, at most.
        grown: by how many they have now.
        errors: of those who watched.
    """

    expected: str
    answers: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    health_s: float = 0.0
    healths: int = 0
    turns: list[float] = field(default_factory=list)
    peak: int = 0
    grown: Callable[[], int] = lambda: 0
    errors: list[str] = field(default_factory=list)

    def check(self, *, peak: int = 600 * MIB, left: int = 150 * MIB) -> None:
        """Asserts that the neighbour noticed nothing, and that memory was bounded and came back."""
        assert not self.errors, self.errors
        assert self.answers, "no stream of the neighbour's ended"
        assert set(self.answers) == {self.expected}
        assert max(self.turns, default=0.0) <= TURN, f"turns of the loop: {self.turns}"
        assert self.gap_s <= SILENCE_S, f"the neighbour waited for {self.gap_s:.1f} s of work"
        assert self.health_s <= SILENCE_S, f"/health waited for {self.health_s:.1f} s of work"
        assert self.peak <= peak, f"memory grew by {self.peak / MIB:.0f} MiB"
        wait_until(
            lambda: self.grown() <= left,
            lambda: f"{self.grown() / MIB:.0f} MiB did not come back",
        )


@dataclass
class Victim:
    """A running server whose event loop is measured."""

    child: Child
    turns: Path
    ended: bool = False
    """Set by a test that ends the server."""

    @property
    def url(self) -> str:
        return self.child.url

    def memory(self) -> int:
        """Return the number of bytes that the server's processes share with no other."""
        server = psutil.Process(self.child.process.pid)
        total = 0
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().uss
        return total

    def worked_s(self) -> float:
        """Return processor seconds that the server's own process, which has the event loop, has
        used.
        """
        times = psutil.Process(self.child.process.pid).cpu_times()
        return float(times.user + times.system)

    def jobs(self) -> list[psutil.Process]:
        """Return the processes that read a request each, or make its grammar: children of
        children.
        """
        server = psutil.Process(self.child.process.pid)
        return list(set(server.children(recursive=True)) - set(server.children()))

    def reads(self) -> bool:
        """Return whether a job is in the midst of its work."""
        for job in self.jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                if job.cpu_times().user > _MIDST_S:
                    return True
        return False

    @contextlib.contextmanager
    def watched(self) -> Iterator[Seen]:
        """Runs a neighbour's streams beside the block; what was seen is complete at its end."""
        with Client(self.url) as client:
            seen = Seen(client.text(_PROMPT, **_FIELDS))
            self.turns.write_text("")
            before = self.memory()
            done, started = threading.Event(), threading.Event()
            watchers = [
                threading.Thread(target=_guarded, args=(seen, watch), daemon=True)
                for watch in (
                    lambda: self._stream(client, seen, started, done),
                    lambda: self._ask_health(seen, done),
                    lambda: self._weigh(seen, before, done),
                )
            ]
            for watcher in watchers:
                watcher.start()
            assert started.wait(HANG_S), "the neighbour's stream did not begin"
            try:
                yield seen
            finally:
                done.set()
                for watcher in watchers:
                    watcher.join(HANG_S)
            self.child.wait_idle()
            seen.turns = [float(line) for line in self.turns.read_text().split()]
            seen.grown = lambda: self.memory() - before

    def _stream(
        self, client: Client, seen: Seen, started: threading.Event, done: threading.Event
    ) -> None:
        """The neighbour: one stream after the other, the last of which starts within the attack."""
        while not (done.is_set() and seen.answers):
            worked: list[float] = []

            def came(_: Streamed, worked: list[float] = worked) -> None:
                worked.append(self.worked_s())
                started.set()

            answer = client.stream(_PROMPT, came, **_FIELDS)
            assert answer.error is None, answer.error
            seen.gap_s = max(seen.gap_s, *(after - before for before, after in pairwise(worked)))
            seen.answers.append(answer.text)

    def _ask_health(self, seen: Seen, done: threading.Event) -> None:
        with httpx.Client(timeout=120, verify=False) as http:
            while not done.wait(_EVERY_S):
                before = self.worked_s()
                assert http.get(f"{self.url}/health").status_code == 200
                seen.health_s = max(seen.health_s, self.worked_s() - before)
                seen.healths += 1

    def _weigh(self, seen: Seen, before: int, done: threading.Event) -> None:
        while not done.wait(_EVERY_S):
            seen.peak = max(seen.peak, self.memory() - before)


def _guarded(seen: Seen, watch: Any) -> None:
    try:
        watch()
    except Exception as error:  # shown by `check`
        seen.errors.append(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def attacked(folder: Path, *arguments: str) -> Iterator[Victim]:
    """Run `quire serve` with the embedded model (or the one among `arguments`) on a measured event
    loop.
    """
    turns = folder / "turns"
    turns.touch()
    common = ("serve", "--port", "0", "--log-level", "warning")
    module = "tests.attack.serve_measured"
    with running(folder, module, str(turns), *common, *arguments) as child:
        victim = Victim(child, turns)
        yield victim
        assert victim.ended or child.process.poll() is None, (
            f"the server died: {child.log.read_text()}"
        )
