"""A real uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from quire.api.connections import LimitedProtocol
from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.serving.assembly import assemble
from quire.serving.interface import EngineClient
from quire.serving.models import Loaded, Models, OnProgress

JSON_TYPE = {"content-type": "application/json"}
"""The header of a body that a test has written itself."""
RAW_HEAD = "host: localhost\r\ncontent-type: application/json"
"""What a request on a bare socket has to say, beside its body's length."""


def one_model(client: EngineClient, name: str, config: ServerConfig) -> Models:
    """A server's only model, loaded; what is unloaded is assembled again around the same engine."""
    model_config = ModelConfig(EngineConfig(""), replace(config, served_name=name))

    async def opener(model_config: ModelConfig, on_progress: OnProgress) -> Loaded:
        return Loaded(assemble(client, name, config))

    models = Models((model_config,), opener)
    models.default.loaded = Loaded(assemble(client, name, config))
    return models


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serves `app` and gives its URL; raises if it does not start or stop in time."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, http=LimitedProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        if time.monotonic() > deadline or not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        if thread.is_alive():
            raise RuntimeError("the server did not stop")
