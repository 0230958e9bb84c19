"""Measures the load client by itself: `client_alone.py MODEL [--streams 1,8,32]`.

A server that does nothing else sends an answer of Quire's server again and again, in as many writes
as Quire does. So the client's tokens/s are the most that any server could reach beside it, and its
processor time is what it takes from a server on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from served_cost import serving
from servers import free_port, own_server

from quire.cli.bench import Load, calibrate, run_async, run_level
from quire.cli.load import Target

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 120.0
_WRITES, _PAUSE_S = 5, 0.0005
"""Writes of an answer of 64 tokens, and seconds between them."""
_END = b"0\r\n\r\n"


async def recorded(target: Target, load: Load, prompt_tokens: int) -> tuple[Load, bytes]:
    """Return the load with prompts of so many tokens, and the bytes of one answer."""
    words = await calibrate(target, load, prompt_tokens, _LIMIT_S)
    sized = Load(load.model, prompt_words=words, max_tokens=load.max_tokens)
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(target.request("POST", sized.route, sized.body(0)))
    answer = await asyncio.wait_for(reader.readuntil(_END), _LIMIT_S)
    writer.close()
    return sized, answer


class _Replay(asyncio.Protocol):
    """Answers each request with a recorded answer."""

    def __init__(self, answer: bytes) -> None:
        cuts = [len(answer) * part // _WRITES for part in range(_WRITES + 1)]
        self._parts = [answer[cuts[n] : cuts[n + 1]] for n in range(_WRITES)]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:  # the client writes a request at once
        self._send(0)

    def _send(self, part: int) -> None:
        self._transport.write(self._parts[part])
        if part + 1 < _WRITES:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._send, part + 1)


async def replay(answer: bytes, port: int) -> None:
    """Serve the answer for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Replay(answer), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--requests-a-stream", type=int, default=100)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(replay(args.model.read_bytes(), args.serve))
        return
    model = args.model.resolve()
    with serving(_HERE.parent, model, 64) as (target, _):
        load = Load(model.name, max_tokens=64)
        sized, answer = run_async(recorded(target, load, args.prompt_tokens))
    with tempfile.NamedTemporaryFile() as file:
        file.write(answer)
        file.flush()
        port = free_port()
        command = [sys.executable, __file__, file.name, "--serve", str(port)]
        with own_server(command, {**os.environ}, port) as (target, _):
            for streams in map(int, args.streams.split(",")):
                requests, used = streams * args.requests_a_stream, time.process_time()
                level = run_async(
                    run_level(target, sized, streams, requests, first=1, timeout_s=_LIMIT_S)
                )
                used_us = (time.process_time() - used) / level.completion_tokens * 1e6
                print(f"{streams}: {level.tokens_per_s:.0f} tokens/s, {used_us:.2f} us a token")


if __name__ == "__main__":
    main()
