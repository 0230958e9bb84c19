"""An order to unload whose client leaves is carried out whole, or not at all."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Scope

from quire.api.app import build_app
from quire.core.config import ServerConfig
from quire.core.info import ModelInfo
from quire.demo import MODEL_DIR
from quire.serving.models import Models
from tests.support.cutting import CutOff
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.server import one_model

CONFIG = ServerConfig()
INFO = ModelInfo(str(MODEL_DIR), "gemma4", 4096, 4096, "float32", "cpu", 1 << 20)
UNLOAD = ("POST", "/models/unload", {"model": "demo"})


def loaded() -> tuple[Models, ScriptedEngine]:
    engine = ScriptedEngine(INFO, lambda _: Script())
    return one_model(engine, "demo", CONFIG), engine


def left_at(models: Models, at: int) -> CutOff:
    return CutOff(build_app(models, CONFIG), "left", at, *UNLOAD)


@pytest.mark.parametrize(
    "at", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 2))], ids=str
)
async def test_once_it_was_read_an_idle_model_goes_whenever_the_client_leaves(at: int) -> None:
    models, _ = loaded()
    await left_at(models, at).run()
    assert models.default.state == "unloaded"
    await models.close()


async def test_an_order_that_was_not_read_is_not_carried_out() -> None:
    """The web server gives nothing of a body whose client has left before it is asked for."""
    models, _ = loaded()
    app = build_app(models, CONFIG)
    order = left_at(models, 0)

    async def gone_at_once(scope: Scope, receive: object, send: object) -> None:
        async def receive_nothing() -> Message:
            return {"type": "http.disconnect"}

        await app(scope, receive_nothing, send)  # type: ignore[arg-type]

    order.app = gone_at_once
    await order.run()
    assert models.default.state == "loaded"
    await models.close()


async def test_an_order_that_waits_for_streams_lapses_and_leaves_the_model_open() -> None:
    models, _ = loaded()
    lease = await models.use(models.default)
    await left_at(models, 0).run()
    assert models.default.state == "loaded"
    async with asyncio.timeout(5):
        (await models.use(models.default)).release()
    lease.release()
    assert models.default.state == "loaded"
    await models.close()
