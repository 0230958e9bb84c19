"""An executor in another process, which sees pickled calls alone."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from quire.cache.blocks import PoolKey
from quire.cache.host_block import HostBlock
from quire.constraints.masks import TokenMask
from quire.core.config import EngineConfig
from quire.core.frames import Frames, encode
from quire.core.kv_format import KVFormat
from quire.core.media import MediaKey
from quire.device.device import open_device
from quire.engine.ranks import Call
from quire.executor.adapters import Adapters
from quire.executor.contents import Contents
from quire.executor.executor import Executor
from quire.executor.factory import open_executor
from quire.executor.following import ANY_ROWS
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.plan import GraphRows, StepPlan, StepResult


class OtherProcess(Contents):
    """Implements `Executor` by calls to one in a process of its own. `contents` is itself."""

    work_seconds: tuple[float, ...] = ()
    planned_bytes = 0
    most_following = ANY_ROWS

    def __init__(self, loaded: LoadedModel, config: EngineConfig, **_: Any) -> None:
        super().__init__()
        self.adapters = Adapters(loaded.model)
        self.contents = self
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe, self._frames = ours, Frames(ours)
        self._pipe.sendall(encode((config, str(loaded.path), loaded.dtype)))

    def close(self) -> None:
        self._pipe.close()
        self._process.wait()

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._pipe.sendall(encode(Call(method, arguments)))
        return self._frames.next()

    def hold_features(self, key: MediaKey, features: bytes) -> None:
        self._ask("contents.hold_features", key, features)

    def release_features(self, key: MediaKey) -> None:
        self._ask("contents.release_features", key)

    def hold_block(self, name: bytes, block: HostBlock) -> None:
        self._ask("contents.hold_block", name, block)

    def block_bytes(self, pool: PoolKey) -> int:
        return int(self._ask("block_bytes", pool))

    def grows_in_place(self, pool: PoolKey, budget: int) -> bool:
        return bool(self._ask("grows_in_place", pool, budget))

    def fits(self, pool: PoolKey, block: HostBlock) -> bool:
        return bool(self._ask("fits", pool, block))

    def serves(self, format: KVFormat) -> bool:
        return bool(self._ask("serves", format))

    def graph_rows(self, format: KVFormat, media: bool) -> GraphRows:
        return GraphRows(*self._ask("graph_rows", format, media))

    def prepare(self) -> None:
        self._ask("prepare")

    def launch(self, plan: StepPlan | None) -> float:
        return float(self._ask("launch", plan))

    def draw(self, masks: Mapping[int, TokenMask | None]) -> None:
        self._ask("draw", masks)

    def flush(self) -> None:
        self._ask("flush")

    def collect(self) -> StepResult:
        found = self._ask("collect")
        assert isinstance(found, StepResult)
        return found

    def clear(self) -> None:
        self._ask("clear")


def main() -> None:
    """Carry out calls until the other end closes the pipe."""
    pipe = socket.socket(fileno=int(sys.argv[1]))
    frames = Frames(pipe)
    config, path, dtype = frames.next()
    open_device(config.blas, config.kernels, config.threads)
    executor: Executor = open_executor(open_model(path, dtype=dtype), config)
    while True:
        try:
            call = frames.next()
        except EOFError:
            return
        pipe.sendall(encode(call.of(executor)))


if __name__ == "__main__":
    main()
