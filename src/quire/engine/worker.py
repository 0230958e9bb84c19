"""The process that owns MLX: opens the model, then serves requests from the pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
from typing import TYPE_CHECKING

from quire.core.config import EngineConfig
from quire.core.errors import EngineFailure, ModelError, NoRoom, QuireError
from quire.core.frames import Frames, encode
from quire.core.logs import write_logs
from quire.core.messages import (
    Abort,
    AdapterChanged,
    AskCached,
    AskStats,
    Broken,
    Cached,
    ChangeAdapter,
    FromEngine,
    NeedsRoom,
    Open,
    Ready,
    Refused,
    Room,
    Stats,
    Submit,
    ToEngine,
)
from quire.core.processes import freeze_heap
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.device.cards import see_one_card
from quire.device.loading import load_mlx
from quire.device.private import use_private_cache
from quire.engine.outbox import FRAME_S, Outbox

if TYPE_CHECKING:
    from quire.engine.engine import Engine

log = logging.getLogger("quire.worker")


def main() -> int:
    """Serve until the other end closes the pipe. Argument 1 is the pipe's file descriptor."""
    leave_stopping_to_the_parent()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    frames = Frames(pipe)
    opening = frames.read()
    if not opening or not isinstance(opening[0], Open):
        return 1
    write_logs(opening[0].log_level, opening[0].log_format)
    # A model in float32 computes in float32. With TF32, MLX's default on CUDA, a row's logits move
    # by 5e-3 with its company (H100); without, by 1e-5. Other types are not touched.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    # A prompt's operations are launched one by one. Steps that generate have a graph of their own;
    # those that MLX makes of a prompt's are seldom used again, and making them costs a fifth more.
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    use_private_cache()
    if opening[0].config.ranks > 1:
        see_one_card(0)
    try:
        load_mlx()
        # Here, because loading MLX takes a while, in which Ctrl-C has to be ignored already.
        from quire.engine.factory import open_engine

        engine = open_engine(
            opening[0].config,
            lambda progress: _tell(pipe, progress),
            lambda lacking: _ask_for_room(pipe, frames, lacking),
        )
    except ModelError as error:
        _tell(pipe, Refused(error.message, isinstance(error, NoRoom), error.setting))
        return 1
    except QuireError as error:
        _tell(pipe, Refused(str(error)))
        return 1
    freeze_heap()
    _tell(pipe, Ready(engine.info))
    from quire.device.device import current_device

    outbox = Outbox(FRAME_S if current_device().shares_cores else 0.0)
    return _Worker(pipe, frames, engine, outbox=outbox).run()


def _ask_for_room(pipe: socket.socket, frames: Frames, lacking: NoRoom) -> EngineConfig:
    """Wait until the server has unloaded another model. Raise `lacking` if it closed the pipe."""
    _tell(pipe, NeedsRoom(str(lacking)))
    answer: list[ToEngine] | None = []
    while answer == []:
        answer = frames.read()
    if answer is None or not isinstance(answer[0], Room):
        raise lacking
    return answer[0].config


def _tell(pipe: socket.socket, message: FromEngine) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits for it any more
        pipe.sendall(encode(message))


class _Worker:
    """Takes requests from the pipe and sends outputs of steps to it."""

    def __init__(self, pipe: socket.socket, frames: Frames, engine: Engine, outbox: Outbox) -> None:
        self._pipe = pipe
        self._frames = frames
        self._engine = engine
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)
        self._outbox = outbox
        self._changes: list[ChangeAdapter] = []
        """Changes of adapters that have not been made yet."""

    def run(self) -> int:
        """Run steps while there is work, sleep while there is none; return the exit status."""
        while True:
            if not self._take_messages():
                self._engine.close()
                return 0
            if not self._engine.has_work:
                continue
            try:
                outputs = self._engine.step()
                message = self._outbox.pack(outputs, self._engine.expected_step_s)
                if any(message):
                    self._send(message)
                self._engine.flush()
            except EngineFailure as error:
                log.error("the engine stops: %s", error)
                self._send(Broken(str(error)))
                return 1

    def _take_messages(self) -> bool:
        """Read messages that arrived; wait for one when idle. Return False if the pipe closed."""
        self._change_adapters()  # of those that the last step's ends allow
        while self._poll.poll(0 if self._engine.has_work else None):
            messages = self._frames.read()
            if messages is None:
                return False
            for message in messages:
                match message:
                    case Submit(requests):
                        self._outbox.expect(requests)
                        for request in requests:
                            self._engine.add(request)
                    case Abort(request_id, reason):
                        self._engine.abort(request_id, reason)
                    case AskStats(number):
                        self._send(Stats(number, self._engine.stats()))
                    case AskCached(number):
                        self._send(Cached(number, self._engine.cached()))
                    case ChangeAdapter():
                        self._changes.append(message)
            self._change_adapters()
        return True

    def _change_adapters(self) -> None:
        """Load and unload adapters in the order in which the changes came, those of one name one
        after the other. An adapter is unloaded when no request uses it any more.
        """
        waiting: list[ChangeAdapter] = []
        for change in self._changes:
            used = change.place is None and self._engine.users_of(change.name)
            if used or any(each.name == change.name for each in waiting):
                waiting.append(change)
                continue
            problem = self._engine.adapters.change(change.name, change.place)
            self._send(AdapterChanged(change.number, problem))
        self._changes = waiting

    def _send(self, message: FromEngine) -> None:
        try:
            self._pipe.sendall(encode(message))
        except ConnectionError:
            log.info("the server process has ended; the engine stops")


if __name__ == "__main__":
    sys.exit(main())
