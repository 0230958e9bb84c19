"""A real uvicorn on loopback, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from quire.api.connections import PatientProtocol

JSON_TYPE = {"content-type": "application/json"}
"""The header of a body that a test has written itself."""
RAW_HEAD = "host: localhost\r\ncontent-type: application/json"
"""What a request on a bare socket has to say, beside its body's length."""


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serves `app` and gives its URL; raises if it does not start or stop in time."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, http=PatientProtocol)
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
