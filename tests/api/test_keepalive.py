"""No stream is silent for longer than clients and proxies wait, on a clock of its own."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from quire.api.chat.endpoint import ChatChunks
from quire.api.shared.sse import KEEPALIVE_S, EventStream
from quire.api.shared.toolbox import Toolbox
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.demo import MODEL_DIR
from quire.serving.assembly import assemble
from quire.serving.generation import Generation
from quire.text.tokenizer import Tokenizer
from tests.support import virtual_time
from tests.support.scripted_engine import Script, ScriptedEngine


async def sent(delay_s: float) -> list[tuple[float, bytes]]:
    """Return the time of each piece that is sent of an answer whose three tokens take `delay_s`
    each.
    """
    info = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
    word = tuple(Tokenizer.open(MODEL_DIR).encode("a b c"))
    engine = ScriptedEngine(info, lambda _: Script(word, delay_s=delay_s))
    service = assemble(engine, "demo", ServerConfig())
    run = await service.start(await service.prepare(Generation(prompts=("x",), max_tokens=3)))
    writes: list[tuple[float, bytes]] = []
    loop = asyncio.get_running_loop()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(10_000)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append((loop.time(), message["body"]))

    stream = EventStream(run, ChatChunks({}, run, service.tokenizer, Toolbox(), usage=False))
    await stream({"type": "http", "path": "/v1/chat/completions"}, receive, send)  # type: ignore[arg-type]
    return writes


@pytest.mark.parametrize("delay_s", [2.0, 14.0, 16.0, 29.0, 100.0])
def test_no_silence_is_longer(delay_s: float) -> None:
    writes = virtual_time.run(sent(delay_s))
    times = [0.0, *(time for time, _ in writes)]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= KEEPALIVE_S + 1e-6
    comments = sum(body.startswith(b":") for _, body in writes)
    assert comments == 3 * int((delay_s - 1e-6) / KEEPALIVE_S)
    assert times[-1] == pytest.approx(3 * delay_s)
