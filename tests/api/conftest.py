"""A scripted engine behind the real application on a real socket; text by the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import quire
from quire.api.app import build_app
from quire.config import ServerConfig
from quire.engine.assembly import assemble
from quire.engine.interface import ModelInfo
from quire.request import Request
from quire.text.tokenizer import Tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import serving

MODEL = Path(quire.__file__).parent / "demo" / "model"
FORMATS = ("plain", "page-4", "page-8", "page-8/4", "uniform-4-g64")


@dataclass
class Served:
    """A running server: its address, its engine, its tokenizer."""

    url: str
    engine: ScriptedEngine
    tokenizer: Tokenizer

    def ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a text."""
        return tuple(self.tokenizer.encode(text))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Serve]:
    """Starts servers that end with the test: `serve(script, config=..., context_length=...)`."""
    with ExitStack() as stack:

        def start(
            script: str | Script | Callable[[Request], Script] = "Hello there.",
            config: ServerConfig | None = None,
            context_length: int = 4096,
        ) -> Served:
            if isinstance(script, str):
                script = Script(tuple(tokenizer.encode(script)))
            chosen = script
            info = ModelInfo(
                str(MODEL),
                "gemma4",
                tokenizer.vocab_size,
                context_length,
                "float32",
                "cpu",
                1 << 20,
                kv_formats=FORMATS,
            )
            engine = ScriptedEngine(info, chosen if callable(chosen) else lambda _: chosen)
            settings = config or ServerConfig()
            service = assemble(engine, "quire-demo", settings)
            url = stack.enter_context(serving(build_app(service, settings)))
            return Served(url, engine, tokenizer)

        yield start
