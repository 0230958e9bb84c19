"""A tokenizer in a process of its own, so that opening it holds up no stream of another model.

Opening a tokenizer of 262,000 entries holds the interpreter's lock for seconds in any thread. A
server of several models opens each one's in another process, and calls it there: a call takes a
tenth of a millisecond longer than here.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from quire.core.errors import EngineFailure, ModelError
from quire.core.frames import Frames, encode
from quire.core.processes import wait_or_kill
from quire.serving.job_messages import Failed
from quire.serving.tasks import to_the_end
from quire.text.codec import EncodedTexts, PlainEncode, Traits
from quire.text.tokenizer import Tokenizer

_WORKER = "quire.serving.tokenizer_worker"
_OPENING_S = 120.0
_CALL_S = 30.0
"""Seconds after which a call counts as hung; calls take milliseconds."""
_GRACE_S = 1.0
_TEXTS = 4096
"""Number of tokens whose texts are fetched at a time."""


class TokenizerProcess:
    """Owns the tokenizer's process. Created by `start`; belongs to one event loop.

    Attributes:
        tokenizer: calls the process; any thread may use it.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
        self._process = process
        self._pipe = pipe
        self._one_call = threading.Lock()
        self.tokenizer: Tokenizer

    @classmethod
    async def start(cls, folder: Path, on_end: Callable[[str], None]) -> TokenizerProcess:
        """Start the process and wait until it has opened the tokenizer.

        Args:
            on_end: called on the event loop, with the reason, when a call finds that the process
                has ended or hangs.

        Raises:
            ModelError: the tokenizer cannot be opened.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", _WORKER, str(theirs.fileno()), str(folder)]
        with ExitStack() as unless_started, theirs:
            unless_started.callback(ours.close)
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # out of reach of a terminal's Ctrl-C
            )
            unless_started.pop_all()
        made = cls(process, ours)
        try:
            traits, special_tokens, eos_ids = await made._opened()
        except BaseException:
            await to_the_end(made.close())
            raise
        ours.settimeout(_CALL_S)
        loop = asyncio.get_running_loop()

        def tell(reason: str) -> None:
            loop.call_soon_threadsafe(on_end, reason)

        codec = _FarCodec(ours, traits, made._one_call, on_end=tell)
        made.tokenizer = await asyncio.to_thread(
            Tokenizer, folder, codec, special_tokens, eos_ids=eos_ids
        )
        return made

    async def close(self) -> None:
        """End the process; a running call fails. May be called again."""
        with suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._one_call:  # no thread waits for this pipe any more
            self._pipe.close()
        wait_or_kill(self._process, _GRACE_S)

    async def _opened(self) -> Any:
        self._pipe.setblocking(False)
        try:
            async with asyncio.timeout(_OPENING_S):
                outcome = await Frames(self._pipe).next_async()
        except (OSError, EOFError) as error:
            raise ModelError(
                "the process that opens the tokenizer ended or does not answer"
            ) from error
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome.result


class _FarCodec:
    """A `Codec` that runs in another process, one call at a time."""

    def __init__(
        self,
        pipe: socket.socket,
        traits: Traits,
        one_call: threading.Lock,
        on_end: Callable[[str], object],
    ) -> None:
        self.traits = traits
        self._pipe = pipe
        self._frames = Frames(pipe)
        self._one_call = one_call
        self._on_end = on_end
        self._texts: dict[int, list[str | None]] = {}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._call("encode", text, add_special_tokens)
        return ids

    def encode_texts(
        self, first: str, second: str | None, most: int | None, keep_end: bool
    ) -> EncodedTexts:
        encoded: EncodedTexts = self._call("encode_texts", first, second, most, keep_end)
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._call("decode", list(ids), skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._call("token_id", token)
        return token_id

    def token_text(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.traits.size:
            return None
        number, at = divmod(token_id, _TEXTS)
        if number not in self._texts:
            end = min((number + 1) * _TEXTS, self.traits.size)
            self._texts[number] = self._call("token_texts", number * _TEXTS, end)
        return self._texts[number][at]

    def without(self, texts: Collection[str], anchor: str) -> tuple[PlainEncode, Mapping[int, int]]:
        number, renamed = self._call("without", frozenset(texts), anchor)

        def encode(text: str) -> list[int]:
            ids: list[int] = self._call("encode_plain", number, text)
            return ids

        return encode, renamed

    def _call(self, name: str, *arguments: object) -> Any:
        """Call a function in the process and wait for its result.

        Raises:
            EngineFailure: the process has ended or hangs.
        """
        with self._one_call:
            try:
                self._pipe.sendall(encode((name, arguments)))
                outcome = self._frames.next()
            except (OSError, EOFError) as error:
                reason = "the process that holds the tokenizer ended or does not answer"
                self._on_end(reason)
                raise EngineFailure(f"{reason}; try again") from error
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome.result
