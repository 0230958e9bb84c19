"""The processes of a split model: one leads, and sends the others each step's plan.

The leading process has the engine, which makes each plan once. A follower has an executor with its
part of the model and of the KV cache. It repeats the calls of the leading executor in order, and
samples the same tokens from the same logits, so no token is sent. If a process dies, all end.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Thread
from typing import Any

from quire.constraints.masks import TokenMask
from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.frames import Frames, encode
from quire.core.media import MediaKey
from quire.core.speculation import HEAD
from quire.device.device import current_device
from quire.device.ranks import Part, join
from quire.executor.contents import Contents
from quire.executor.eager import EagerExecutor
from quire.executor.executor import Executor
from quire.executor.factory import open_pools
from quire.models.weights.loader import LoadedModel
from quire.scheduler.plan import StepPlan

log = logging.getLogger("quire.ranks")

HERE = "here"
"""Message of a follower that is about to join."""


@dataclass(frozen=True, slots=True)
class Follow:
    """First message to a follower: its part, and the address where all ranks meet."""

    config: EngineConfig
    part: Part
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the leading executor, which followers repeat.

    Attributes:
        method: its name, or that of a method of the executor's `contents`.
    """

    method: str
    arguments: tuple[Any, ...] = ()

    def of(self, executor: Executor) -> Any:
        """Call the method of an executor."""
        return attrgetter(self.method)(executor)(*self.arguments)


class Followers:
    """Owns the other processes of a split model."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the followers and join their group.

        Raises:
            ModelError: the model cannot be split here, or a process does not start.
        """
        check_split(config)
        addresses = _free_addresses(config.ranks)
        self._pipes: list[socket.socket] = []
        for rank in range(1, config.ranks):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "quire.engine.follower", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
            theirs.close()
            ours.sendall(encode(Follow(config, Part(rank, config.ranks), addresses)))
            self._pipes.append(ours)
            Thread(target=_end_with, args=(process, rank), daemon=True).start()
        for pipe in self._pipes:
            _await_here(pipe)
        self.part = Part(0, config.ranks)
        join(self.part, addresses)

    def tell(self, method: str, *arguments: Any) -> None:
        """Make the followers' executors repeat a call."""
        frame = encode(Call(method, arguments))
        for pipe in self._pipes:
            pipe.sendall(frame)

    def open_executor(
        self, loaded: LoadedModel, config: EngineConfig, **parts: Any
    ) -> LeadingExecutor:
        """Return the executor of the leading process; see `executor.factory.open_executor`."""
        return LeadingExecutor(self, loaded, config, **parts)


class SplitExecutor(EagerExecutor):
    """An executor of a part of a model. It launches steps whole, because the other ranks wait for
    its sums.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, **parts: Any) -> None:
        super().__init__(loaded.model, open_pools(loaded, config), **parts)

    def _holds_back(self) -> bool:
        return False


class _LeadingContents(Contents):
    """Contents that followers get, too."""

    def __init__(self, followers: Followers) -> None:
        super().__init__()
        self._followers = followers

    def hold_features(self, key: MediaKey, features: bytes) -> None:
        self._followers.tell("contents.hold_features", key, features)
        super().hold_features(key, features)

    def release_features(self, key: MediaKey) -> None:
        self._followers.tell("contents.release_features", key)
        super().release_features(key)


class LeadingExecutor(SplitExecutor):
    """An executor whose calls followers repeat."""

    def __init__(
        self, followers: Followers, loaded: LoadedModel, config: EngineConfig, **parts: Any
    ) -> None:
        super().__init__(loaded, config, contents=_LeadingContents(followers), **parts)
        self._followers = followers

    def launch(self, plan: StepPlan | None) -> float:
        self._followers.tell("launch", plan)
        return super().launch(plan)

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        self._followers.tell("draw", masks)
        super().draw(masks)

    def flush(self) -> None:
        self._followers.tell("flush")
        super().flush()

    def clear(self) -> None:
        self._followers.tell("clear")
        super().clear()


def check_split(config: EngineConfig) -> None:
    """Raise `ModelError` if a setting does not go with a split model."""
    if not current_device().begins_with_first_layer:
        raise ModelError("--tensor-parallel: models are split on CPUs only so far")
    if config.adapters:
        raise ModelError("--tensor-parallel: split models have no adapters for requests yet")
    if config.speculate == HEAD:
        raise ModelError("--tensor-parallel: split models have no head that drafts yet")
    if config.draft_model is not None:
        raise ModelError("--tensor-parallel: split models have no draft model yet")
    if config.disk is not None:
        raise ModelError("--tensor-parallel: split models have no disk tier yet")


def shared(config: EngineConfig) -> EngineConfig:
    """Return the settings of each of several processes that share this machine."""
    threads = config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
    return replace(config, threads=threads, sharers=max(config.sharers, config.ranks))


def _await_here(pipe: socket.socket) -> None:
    """Wait until a follower is about to join. Joining itself would wait for all ranks without a
    timeout.
    """
    try:
        Frames(pipe).next()
    except EOFError:
        raise ModelError("a process of the split model ended before it had begun") from None


def _end_with(process: subprocess.Popen[bytes], rank: int) -> None:
    """Wait for a follower. If it ends first, the model cannot continue."""
    code = process.wait()
    log.error("process %d of the split model ended (exit code %d); the engine ends", rank, code)
    os._exit(1)


def _free_addresses(count: int) -> tuple[str, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    for each in sockets:
        each.close()
    return addresses
