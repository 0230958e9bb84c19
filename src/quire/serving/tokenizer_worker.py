"""The process that holds a tokenizer for a server of several models; see `tokenizer_process`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.core.errors import QuireError
from quire.core.frames import Frames, encode
from quire.core.stop_signals import leave_stopping_to_the_parent
from quire.serving.job_messages import Done, Failed
from quire.text.codec import PlainEncode
from quire.text.tokenizer import Tokenizer


def main() -> None:
    """Answer calls until the pipe closes. Arguments: the pipe's file descriptor, the folder."""
    leave_stopping_to_the_parent()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    with suppress(ConnectionError, EOFError):  # the server has ended, or unloads the model
        try:
            tokenizer = Tokenizer.open(Path(sys.argv[2]))
        except QuireError as error:
            pipe.sendall(encode(Failed(error)))
            return
        opened = tokenizer.codec.traits, dict(tokenizer.special_tokens), tokenizer.eos_ids
        pipe.sendall(encode(Done(opened)))
        frames, calls = Frames(pipe), _calls(tokenizer)
        while True:
            name, arguments = frames.next()
            pipe.sendall(encode(_outcome(calls[name], arguments)))


def _calls(tokenizer: Tokenizer) -> dict[str, Callable[..., Any]]:
    """Return the functions that the server calls by name."""
    codec = tokenizer.codec
    plain: list[PlainEncode] = []

    def token_texts(first: int, end: int) -> list[str | None]:
        return [codec.token_text(each) for each in range(first, end)]

    def without(texts: frozenset[str], anchor: str) -> tuple[int, dict[int, int]]:
        encode, renamed = codec.without(texts, anchor)
        plain.append(encode)
        return len(plain) - 1, dict(renamed)

    return {
        "encode": codec.encode,
        "encode_texts": codec.encode_texts,
        "decode": codec.decode,
        "token_id": codec.token_id,
        "token_texts": token_texts,
        "without": without,
        "encode_plain": lambda number, text: plain[number](text),
    }


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Done | Failed:
    try:
        return Done(call(*arguments))
    except Exception as error:  # the library raises bare Exception
        return Failed(RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
