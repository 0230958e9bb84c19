"""The parts of a service of the embedded model, without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.demo import MODEL_DIR
from quire.serving.assembly import assemble
from quire.serving.service import Service
from quire.text.tokenizer import Tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine

CONTEXT = 256


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL_DIR)


def scripted(tokenizer: Tokenizer) -> ScriptedEngine:
    """Return an engine that says hello."""
    info = ModelInfo(
        str(MODEL_DIR), "gemma4", tokenizer.vocab_size, CONTEXT, "float32", "cpu", 1 << 20
    )
    return ScriptedEngine(info, lambda _: Script(tuple(tokenizer.encode("Hello."))))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return scripted(tokenizer)


def assembled(engine: ScriptedEngine) -> Service:
    config = ServerConfig(default_max_tokens=50, request_deadline_s=9.0)
    return assemble(engine, "demo", config)


@pytest.fixture
async def service(engine: ScriptedEngine) -> AsyncIterator[Service]:
    made = assembled(engine)
    yield made
    await made.close()
