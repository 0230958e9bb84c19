"""An engine's process without a model, for `http_side.py`: the real worker around scripted steps.

A step gives every request its next token, and takes as long as the config's `step_ms` says.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from typing import cast

from quire.core.frames import Frames, encode
from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import Ready
from quire.core.request import FinishReason, Output, Request
from quire.engine import worker
from quire.engine.engine import Engine
from quire.engine.outbox import Outbox

_TOKENS = (100, 101, 102, 103, 104)


class ScriptedEngine:
    """Answers without thinking; has what `worker` asks of an engine."""

    def __init__(self, step_s: float) -> None:
        self.expected_step_s = step_s
        self._running: dict[str, list[int]] = {}
        """Counts by request: its tokens so far, the tokens that it is to get, and its prompt's."""
        self._ended: list[Output] = []
        self._steps = 0
        self._due = 0.0

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._running[request.id] = [0, request.max_tokens, len(request.prompt)]

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request."""
        if self._running.pop(request_id, None) is not None:
            self._ended.append(Output(request_id, finish=reason))

    @property
    def has_work(self) -> bool:
        """Whether any request is left."""
        return bool(self._running or self._ended)

    def step(self) -> list[Output]:
        """Return the next token of each request, when the step's time is over."""
        now = time.perf_counter()
        self._due = max(now, self._due) + self.expected_step_s
        time.sleep(self._due - now)
        outputs, self._ended = self._ended, []
        self._steps += 1
        for name, state in list(self._running.items()):
            state[0] += 1
            ended = state[0] == state[1]
            if ended:
                del self._running[name]
            outputs.append(
                Output(
                    name,
                    (_TOKENS[state[0] % len(_TOKENS)],),
                    finish=FinishReason.LENGTH if ended else None,
                    prompt_tokens=state[2],
                    reuse="new",
                    queued_s=0.0,
                )
            )
        return outputs

    def stats(self) -> EngineStats:
        """Return how many steps there were."""
        return EngineStats(steps=self._steps)

    def flush(self) -> None:
        """There is nothing behind."""

    def close(self) -> None:
        """There is nothing to close."""


def main() -> int:
    """Serve the pipe as `worker.main` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = socket.socket(fileno=int(sys.argv[1]))
    frames = Frames(pipe)
    opening = frames.read()
    assert opening, "the server is gone"
    config = opening[0].config
    info = ModelInfo(str(Path(config.model)), "llama", 256, 32768, "float32", "none", 1 << 30)
    pipe.sendall(encode(Ready(info)))
    engine = ScriptedEngine(config.step_ms / 1e3)
    return worker._Worker(pipe, frames, cast(Engine, engine), Outbox()).run()


if __name__ == "__main__":
    sys.exit(main())
