"""The client of the engine's process, for the HTTP side's event loop.

In one process, Python's interpreter lock would make building graphs and rendering streams take
turns. In two, they run at the same time; and if the engine dies, the server still answers and
reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import psutil

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, ModelError, NoRoom
from quire.core.frames import Frames, encode
from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import (
    Abort,
    AdapterChanged,
    AskCached,
    AskStats,
    Broken,
    Cached,
    FromEngine,
    NeedsRoom,
    NextTokens,
    Progress,
    Ready,
    Refused,
    Room,
    Stats,
    Submit,
    ToEngine,
)
from quire.core.processes import wait_or_kill
from quire.core.request import Failure, FinishReason, Output, Request
from quire.serving.engine_process import WORKER, EngineProcess, start_engine
from quire.serving.tasks import cancel_and_wait, to_the_end
from quire.serving.ticket import Ticket

log = logging.getLogger("quire.process")

_GRACE_S = 5.0
_MISSED_HEARTBEATS = 4
"""Unanswered heartbeats in a row after which the engine counts as stopped."""
_OPENING_QUIET = 4
"""Factor of the silence allowed while a model opens: disks and downloads may stall."""
_HEARTBEAT = 0  # the number of a question whose answer nobody waits for
_GATHER_S = 0.001
"""Seconds after a write in which messages of one turn of the event loop wait for each other. A turn
that reads a burst of requests takes longer, and the engine starts with the first of them.
"""
_EXIT_S = 1.0
_EXIT_POLL_S = 0.01

MakeRoom = Callable[[NoRoom], Awaitable[EngineConfig]]
"""A function that unloads another model, and returns the settings with the memory that is then
free. It raises `NoRoom` if none can be unloaded now.
"""


async def refuse(lacking: NoRoom) -> EngineConfig:
    """Raise `lacking`: a model that is served alone has no other to unload. A `MakeRoom`."""
    raise lacking


class ProcessEngine:
    """Owns the engine's process; implements `EngineClient`. Created by `start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], pipe: socket.socket, timeout_s: float
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._frames = Frames(pipe)
        self._loop = asyncio.get_running_loop()
        self._outgoing = bytearray()
        self._gathers = False
        """Messages wait for the end of this turn of the event loop, to go out together."""
        self._sent_at = -math.inf
        self._tickets: dict[str, Ticket] = {}
        self._questions = _Questions()
        self._opened: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._lacking: asyncio.Future[NoRoom] = self._loop.create_future()
        """Done while the engine waits for room."""
        self._failure: str | None = None
        self._silence: str | None = None
        self._heard = False
        self._watch = asyncio.create_task(self._watch_silence(timeout_s))
        self._ending: asyncio.Task[None] | None = None
        self._closing = False
        self._on_progress: Callable[[Progress | None], None] = lambda progress: None
        self.broken = asyncio.Event()
        """Set when the engine cannot go on."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        log_level: str = "info",
        worker: str = WORKER,
        timeout_s: float = 30.0,
        log_format: str = "text",
        on_progress: Callable[[Progress | None], None] = lambda progress: None,
        make_room: MakeRoom = refuse,
        started: EngineProcess | None = None,
    ) -> ProcessEngine:
        """Start the process and wait until the model is open.

        Args:
            worker: see `start_engine`.
            timeout_s: seconds without an answer or work after which requests in flight fail.
            on_progress: called with the progress of loading; with None once the model is open or
                has failed.
            make_room: called before weights are read if the model does not fit; the engine waits
                meanwhile.
            started: a process that was told to open `config` already; None starts one.

        Raises:
            ModelError: it cannot be opened, or the process hangs.
        """
        own = started or start_engine(config, log_level, log_format, worker=worker)
        own.pipe.setblocking(False)
        engine = cls(own.process, own.pipe, timeout_s)
        engine._on_progress = on_progress
        engine._loop.add_reader(own.pipe, engine._read)
        try:
            await engine._open(make_room)
        except BaseException:
            await to_the_end(engine.close())
            raise
        finally:
            on_progress(None)
        return engine

    @property
    def info(self) -> ModelInfo:
        return self._opened.result()

    @property
    def failure(self) -> str | None:
        """Why the engine cannot continue, or does not answer at present; None while it works."""
        return self._failure or self._silence

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue requests.

        Raises:
            EngineFailure: the engine's process has ended.
        """
        if self.failure is not None:
            raise EngineFailure(self.failure)
        tickets = [Ticket(request.id, self.abort) for request in requests]
        self._tickets.update(zip((request.id for request in requests), tickets, strict=True))
        self._send(Submit(tuple(requests)))
        return tickets

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request by the next step."""
        if request_id in self._tickets:
            self._send(Abort(request_id, reason))

    async def stats(self) -> EngineStats:
        """Return the engine's counters and gauges, read between two steps.

        Raises:
            EngineFailure: the engine's process has ended.
        """
        stats: EngineStats = await self.ask(AskStats)
        return stats

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Send the engine a numbered message, which it answers between two steps.

        Raises:
            EngineFailure: the engine's process has ended.
        """
        if self.failure is not None:
            raise EngineFailure(self.failure)
        return await self._questions.ask(lambda number: self._send(question(number)))

    async def cached(self) -> bytes:
        """Return the short keys of the blocks that a prompt may reuse; see `Engine.cached`.

        Raises:
            EngineFailure: the engine's process has ended.
        """
        keys: bytes = await self.ask(AskCached)
        return keys

    async def close(self) -> None:
        """End the process; requests in flight fail. May be called again.

        A process that is still opening its model is killed at once.
        """
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._pipe)
            self._loop.remove_writer(self._pipe)
            self._pipe.close()
            self.give_up("the server is shutting down")
            await cancel_and_wait(self._watch, *filter(None, [self._ending]))
        if self._opened.exception() is not None:
            self._process.kill()
        await asyncio.to_thread(wait_or_kill, self._process, _GRACE_S)

    async def _open(self, make_room: MakeRoom) -> None:
        """Wait until the model is open; make room as often as the engine asks for it."""
        while not self._opened.done():
            events = (self._opened, self._lacking)
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if self._lacking.done() and not self._opened.done():
                config = await make_room(self._lacking.result())
                self._lacking = self._loop.create_future()
                self._send(Room(config))
        self._opened.result()

    # -- the pipe ------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        waiting = bool(self._outgoing) and not self._gathers  # until the pipe has room
        self._outgoing += encode(message)
        if waiting:
            return
        if perf_counter() - self._sent_at >= _GATHER_S:
            self._write()
        elif not self._gathers:
            self._gathers = True
            self._loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        self._gathers = False
        if self._outgoing and not self._closing:
            self._write()

    def _write(self) -> None:
        self._sent_at = perf_counter()
        try:
            sent = self._pipe.send(self._outgoing)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._loop.remove_writer(self._pipe)
            return  # the reader sees the end of the pipe and says why
        del self._outgoing[:sent]
        if self._outgoing:
            self._loop.add_writer(self._pipe, self._write)
        else:
            self._loop.remove_writer(self._pipe)

    def _read(self) -> None:
        messages = self._frames.read()
        if messages is None:
            self._loop.remove_reader(self._pipe)
            self._ending = asyncio.create_task(self._end())
            return
        if messages:
            self._heard, self._silence = True, None
        for message in messages:
            self._take(message)

    def _take(self, message: ToEngine | FromEngine) -> None:
        match message:
            case outputs, tokens:
                _deliver(self._tickets, outputs, tokens)
            case Stats(number, value) | Cached(number, value) | AdapterChanged(number, value):
                self._questions.answer(number, value)
            case NeedsRoom(reason):
                self._lacking.set_result(NoRoom(reason))
            case Progress():
                self._on_progress(message)
            case Ready(info):
                self._opened.set_result(info)
            case Refused(reason, no_room, setting):
                error = (NoRoom if no_room else ModelError)(reason, setting=setting)
                self._failure = str(error)  # so that its end is no news
                self._opened.set_exception(error)
            case Broken(reason):
                self.give_up(reason)

    async def _end(self) -> None:
        """Report how the process ended. The exit status comes a moment after its pipe has
        closed.
        """
        how = "it is still running, but has closed its pipe"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                while (code := self._process.poll()) is None:
                    await asyncio.sleep(_EXIT_POLL_S)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.give_up(f"the engine's process ended ({how})")

    def give_up(self, reason: str) -> None:
        """Fail every request in flight and take no new ones."""
        if self._failure is not None:
            return
        self._failure = reason
        if not self._closing:
            log.error("%s", reason)
            self.broken.set()
        _fail_all(self._tickets, self._questions, reason)
        if not self._opened.done():
            self._opened.set_exception(ModelError(reason))

    async def _watch_silence(self, timeout_s: float) -> None:
        """Ask the engine for heartbeats, and fail the requests in flight if none comes.

        A step may take long, and the engine reads no messages meanwhile; but then it uses the
        processor. A process that neither answers nor uses the processor was stopped, or hangs.
        While it opens its model, that counts as broken.
        """
        process = _Worker(self._process.pid)
        pause_s, quiet = timeout_s / _MISSED_HEARTBEATS, 0
        while not self._opened.done():
            self._heard = False
            await asyncio.wait([self._opened], timeout=pause_s * _OPENING_QUIET)
            busy = process.worked(compiles=True) or self._heard or self._lacking.done()
            quiet = 0 if busy else quiet + 1
            if quiet >= _MISSED_HEARTBEATS:
                silent_s = timeout_s * _OPENING_QUIET
                self.give_up(
                    f"the engine made no progress while it opened the model for {silent_s:g} s"
                )
        quiet = 0
        while self._failure is None:
            self._heard = False
            self._send(AskStats(_HEARTBEAT))
            await asyncio.sleep(pause_s)
            quiet = 0 if process.worked(compiles=False) or self._heard else quiet + 1
            if quiet >= _MISSED_HEARTBEATS and self._silence is None:
                self._silence = f"the engine has not answered for {timeout_s:g} s"
                log.error("%s", self._silence)
                for name in self._tickets:
                    self._send(Abort(name, FinishReason.ERROR))
                _fail_all(self._tickets, self._questions, self._silence)


def _deliver(
    tickets: dict[str, Ticket], outputs: Iterable[Output], following: Iterable[NextTokens]
) -> None:
    """Hand a step's outputs to their requests. Remove tickets that got their last output."""
    for name, tokens, accepted, rejected in following:
        if (ticket := tickets.get(name)) is not None:
            ticket.put_tokens(tokens, accepted, rejected)
    for output in outputs:
        ticket = tickets.get(output.request_id)
        if ticket is None:
            continue
        if output.finish is not None:
            del tickets[output.request_id]
        ticket.put(output)


class _Questions:
    """Questions to the engine that wait for an answer, by number."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0

    async def ask(self, send: Callable[[int], None]) -> Any:
        """Send a question under a new number, and return the answer."""
        self._asked += 1
        number = self._asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        send(number)
        try:
            return await answer
        finally:
            self._answers.pop(number, None)  # whoever asked may have left

    def answer(self, number: int, value: object) -> None:
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():  # its task may be cancelled in this turn
            waiting.set_result(value)

    def fail(self, error: EngineFailure) -> None:
        """Raise an error in all callers that wait for an answer."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._answers.clear()


def _fail_all(tickets: dict[str, Ticket], questions: _Questions, reason: str) -> None:
    """End all requests and questions that wait for the engine with an error."""
    failure = Failure(reason, 503, "server_error", code="engine_failure")
    for ticket in tickets.values():
        ticket.fail(failure)
    tickets.clear()
    questions.fail(EngineFailure(reason))


class _Worker:
    """Measures the processor time of the engine's process and of the compilers that it runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = 0.0

    def worked(self, *, compiles: bool) -> bool:
        """Return whether processor time was used since the last call.

        Args:
            compiles: whether to include processes that it started. This scans all processes of the
                machine.
        """
        used = 0.0
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._pid)
            for each in (process, *(process.children(recursive=True) if compiles else ())):
                times = each.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
        before, self._used = self._used, used
        return used > before
