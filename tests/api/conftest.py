"""A scripted engine behind the real application on a real socket; text by the embedded model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from quire.api.app import build_app
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.core.request import Request
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer
from tests.support.browser import browser, page  # noqa: F401
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import InFlight, one_model, serving
from tests.support.waiting import HANG_S, wait_until

NAME = "quire-demo"

HTTP = httpx.Client(timeout=HANG_S)
"""One client for all tests: making one reads every certificate of the machine."""


@cache
def openai_client(url: str) -> OpenAI:
    """Return the official client, asking once."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=HTTP)


FORMATS = ("plain", "page-4", "page-8", "page-8/4", "uniform-4-g64")


def blocks(url: str, body: object, read: Callable[[str], None] = lambda text: None) -> list[str]:
    """Return the blocks of a stream of events, as they stand on the wire.

    Args:
        read: sees what has come, again and again.
    """
    text = ""
    with HTTP.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for piece in answer.iter_text():
            text += piece
            read(text)
    assert text.endswith("\n\n")
    return text.split("\n\n")[:-1]


def sets(event: threading.Event, mark: str, count: int) -> Callable[[str], None]:
    """Return a callback for `blocks` that sets `event` once `mark` has come so often."""
    return lambda text: event.set() if text.count(mark) >= count else None


@dataclass
class Served:
    """A running server: its address, its engine, its tokenizer."""

    url: str
    engine: ScriptedEngine
    tokenizer: Tokenizer
    in_flight: InFlight

    def settle(self) -> None:
        """Waits for what follows the last bytes of answers: log lines, metrics, slots."""
        wait_until(lambda: not self.in_flight.count)

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text."""
        return tuple(self.tokenizer.encode(text))


def access_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the access log's records. Libraries in this process may log, too."""
    return [each for each in caplog.records if each.name == "quire.access"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL_DIR)


def start(
    stack: ExitStack,
    tokenizer: Tokenizer,
    config: ServerConfig,
    folder: Path = MODEL_DIR,
    modalities: tuple[str, ...] = ("text",),
) -> Served:
    """Return a server that runs until the stack is closed."""
    info = ModelInfo(
        path=str(folder),
        model_type="gemma4",
        vocab_size=tokenizer.vocab_size,
        context_length=4096,
        dtype="float32",
        device="cpu",
        kv_memory=1 << 20,
        modalities=modalities,
        kv_formats=FORMATS,
    )
    engine = ScriptedEngine(info, lambda _: Script())
    models = one_model(engine, NAME, config)
    in_flight = InFlight(build_app(models, config))
    url = stack.enter_context(serving(in_flight))
    return Served(url, engine, tokenizer, in_flight)


@pytest.fixture(scope="session")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    """Yield the server of all tests that need no settings of their own."""
    with ExitStack() as stack:
        yield start(stack, tokenizer, ServerConfig())


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Tokenizer, shared: Served) -> Iterator[Serve]:
    """Yield `serve(script, config=..., context_length=...)`, which starts a server with a scripted
    engine.
    """
    with ExitStack() as stack:

        def serve(
            script: str | Callable[[Request], Script] = "Hello there.",
            config: ServerConfig | None = None,
            context_length: int = 4096,
        ) -> Served:
            served = shared if config is None else start(stack, tokenizer, config)
            served.settle()  # of the test before, nothing is to be seen
            if isinstance(script, str):
                tokens = served.ids(script)
                served.engine.reset(lambda _: Script(tokens))
            else:
                served.engine.reset(script)
            served.engine.info = replace(served.engine.info, context_length=context_length)
            return served

        yield serve
