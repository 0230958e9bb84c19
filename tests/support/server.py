"""A real uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.connections import LimitedProtocol
from quire.api.listening import url_of
from quire.core.config import EngineConfig, ModelConfig, ServerConfig
from quire.core.messages import Progress
from quire.serving.assembly import assemble
from quire.serving.engine_client import MakeRoom
from quire.serving.interface import EngineClient
from quire.serving.model import Loaded
from quire.serving.models import Models, OnProgress
from tests.support.waiting import HANG_S, wait_until

JSON_TYPE = {"content-type": "application/json"}
"""The header of a body that a test has written itself."""
RAW_HEAD = "host: localhost\r\ncontent-type: application/json"
"""Head of a request on a bare socket, without its body's length."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@contextmanager
def leaving(url: str, path: str, body: object) -> Iterator[socket.socket]:
    """POSTs a body, as JSON. Within the block the server is at work on it; then its client leaves,
    answered or not."""
    address, content = httpx.URL(url), json.dumps(body)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as raw:
        head = f"POST {path} HTTP/1.1\r\n{RAW_HEAD}\r\ncontent-length: {len(content)}"
        raw.sendall(f"{head}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert raw.recv(len(_CONTINUE), socket.MSG_WAITALL) == _CONTINUE
        raw.sendall(content.encode())
        yield raw


def answered(raw: socket.socket) -> bool:
    """Return whether an answer to what was sent has started to come."""
    return bool(select.select([raw], [], [], 0)[0])


def one_model(client: EngineClient, name: str, config: ServerConfig) -> Models:
    """Return a server's only model, loaded; what is unloaded is assembled again around the same
    engine.
    """
    model_config = ModelConfig(EngineConfig(""), replace(config, served_name=name))

    async def opener(
        model_config: ModelConfig, on_progress: OnProgress, make_room: MakeRoom
    ) -> Loaded:
        return Loaded(assemble(client, name, config))

    models = Models((model_config,), opener)
    models.default.loaded = Loaded(assemble(client, name, config))
    return models


def slow_models(client: EngineClient, opening: threading.Event) -> Models:
    """Return unloaded models `a` and `b`; one that is loaded has 2 of 5 GB read until `opening` is
    set.
    """

    async def opener(
        model_config: ModelConfig, on_progress: OnProgress, make_room: MakeRoom
    ) -> Loaded:
        on_progress(Progress("weights", 2 * 10**9, 5 * 10**9))
        await asyncio.to_thread(opening.wait, HANG_S)
        return Loaded(assemble(client, model_config.name, model_config.serving))

    configs = [ModelConfig(EngineConfig(""), ServerConfig(served_name=name)) for name in "ab"]
    return Models(configs, opener)


class InFlight:
    """Counts an application's requests, each from its head to what follows its last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http"
        self.count += is_request
        try:
            await self._app(scope, receive, send)
        finally:
            self.count -= is_request


@contextmanager
def serving(app: ASGIApp, listener: socket.socket | None = None) -> Iterator[str]:
    """Serves `app` and gives its URL; raises if it does not start or stop in time."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, http=LimitedProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    if not thread.is_alive():
        raise RuntimeError("the server did not start")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        if thread.is_alive():
            raise RuntimeError("the server did not stop")
