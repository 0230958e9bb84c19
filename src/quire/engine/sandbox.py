"""The process that makes grammars, as the HTTP side sees it.

The compiler is native code that a client's schema may send into endless recursion, or keep busy
for as long as it likes. So it runs where its death costs one request: a process with limits on
time, memory and stack, that is started when first needed and again after it has died. What it
accepted is compiled once more in the engine's process, within wider limits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from quire.engine.bounds import Bound, Wanted, decoded, encoded
from quire.errors import RequestError

log = logging.getLogger("quire.sandbox")

WORKER = "quire.engine.sandbox_worker"
"""The module that runs as the process."""

CPU_S = 3.0
"""Processor time for one request's grammar."""
_HUNG_S = 60.0
"""For one request on any machine, however busy: the process is not at work any more."""
_MAX_LINE = 64 << 20
_KEPT = 64
_MAX_KEPT_BYTES = 1 << 18
"""A grammar whose request and source are larger is not kept for the next that asks alike."""


class GrammarSandbox:
    """Owns the process. One request at a time, in the order in which they come.

    Args:
        folder: the model's.
        dialect: its name in the registry.
        vocab_size: of the model's logits.
    """

    def __init__(self, folder: Path, dialect: str, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", WORKER, str(folder), dialect, str(vocab_size)]
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[bytes, Bound] = OrderedDict()
        self.started = 0
        """How often the process was started."""

    async def bind(self, wanted: Wanted) -> Bound:
        """The grammar of an answer.

        Raises:
            RequestError: it cannot be compiled, or not within the limits.
        """
        line = encoded(wanted)
        key = blake2b(line, digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        async with self._turn:
            bound = decoded(await self._ask(line, wanted))
        if len(line) + len(bound.grammar.source if bound.grammar else "") <= _MAX_KEPT_BYTES:
            self._kept[key] = bound
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return bound

    async def close(self) -> None:
        """Ends the process. May be called again."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, line: bytes, wanted: Wanted) -> bytes:
        """The process's answer; whoever goes away before it takes the process along."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(_HUNG_S):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (ConnectionError, TimeoutError):
            pass  # it has died, or is about to
        finally:
            if not answer:
                await self._end(process)
        if not answer:
            raise _died(process.returncode, wanted)
        return answer

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        assert process.stdout is not None
        if process.returncode is None and not process.stdout.at_eof():
            process.kill()
        await asyncio.shield(process.wait())

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, ready to take a request."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        self.started += 1
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            start_new_session=True,  # Ctrl-C is for the server, which then closes this
        )
        assert process.stdout is not None
        self._process = process
        if await process.stdout.readline() != b"ready\n":
            await self._end(process)
            raise RuntimeError("the process that compiles grammars does not start; see the log")
        return process


def _died(code: int | None, wanted: Wanted) -> RequestError:
    """What a client is told whose schema ended the process."""
    field = "tools" if wanted.schema is None else wanted.schema_field
    if code == -signal.SIGPROF:
        why = f"it takes more than {CPU_S:g} s of processor time"
    else:
        why = "it outgrows the compiler's memory or stack"
    log.warning("a grammar for '%s' ended its compiler (exit code %s)", field, code)
    return RequestError(f"'{field}' cannot be compiled: {why}.", param=field, code="invalid_schema")
