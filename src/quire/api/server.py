"""Runs the HTTP side: binds the address, starts the engine, serves until one of them ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import uvicorn

from quire.api.app import build_app
from quire.api.connections import LimitedProtocol
from quire.api.listening import bound, listen, url_of
from quire.api.opening import open_service
from quire.api.stopping import Door, StoppingServer, StopSignal, until_stop_signal
from quire.core.config import ModelConfig, ServerConfig
from quire.core.logs import announce
from quire.core.messages import Progress
from quire.core.processes import allow_many_descriptors, freeze_heap
from quire.serving.engine_client import MakeRoom, ProcessEngine
from quire.serving.engine_process import WORKER, EngineProcess
from quire.serving.job_starts import JobProcess, fork_job_process
from quire.serving.model import Loaded
from quire.serving.models import Models, OnProgress, Opener
from quire.serving.tasks import cancel_and_wait

log = logging.getLogger("quire.server")

_LAST_WORD_S = 2.0  # for /health to say that the engine is gone


def serve(
    model_configs: Sequence[ModelConfig],
    config: ServerConfig,
    worker: str = WORKER,
    *,
    listener: socket.socket | None = None,
    memory: int | None = None,
    on_progress: Callable[[str, Progress | None], None] = lambda name, progress: None,
    opener: Opener | None = None,
    started: EngineProcess | None = None,
) -> int:
    """Serve until interrupted. Return 1 if no engine can be started any more.

    A signal before serving gives 128 plus the signal's number.

    Args:
        worker: see `ProcessEngine.start`.
        listener: a socket that is bound already; None binds the configured address.
        memory: bytes for all loaded models together; None means the machine's memory.
        on_progress: called with a model's name and its loading progress; with None at the end.
        opener: opens a model; by default as an engine on this machine.
        started: process of the only model's engine, which is opening it already.

    Raises:
        QuireError: the address cannot be bound, or a model cannot be opened.
    """
    allow_many_descriptors()
    address = bound(config.host, config.port) if listener is None else nullcontext(listener)
    with ExitStack() as ending:
        if opener is None:
            forked = fork_job_process()  # here, before there is a thread or an event loop
            ending.callback(forked.end)
            opener = partial(
                _open,
                worker,
                on_progress,
                several=len(model_configs) > 1,
                started=iter([] if started is None else [started]),
                forked=iter([forked]),
            )
        own = ending.enter_context(address)
        runner = ending.enter_context(asyncio.Runner(loop_factory=_loop_factory()))
        runner.get_loop()  # takes a moment, in which Ctrl-C must find no coroutine that waits
        try:
            return runner.run(_serve(model_configs, config, own, opener=opener, memory=memory))
        except StopSignal as stop:
            return 128 + stop.number


async def _serve(
    model_configs: Sequence[ModelConfig],
    config: ServerConfig,
    listener: socket.socket,
    opener: Opener,
    memory: int | None,
) -> int:
    # One for all processes.
    config = replace(config, signing_key=config.signing_key or secrets.token_hex(32))
    models = Models(
        [
            replace(each, serving=replace(each.serving, signing_key=config.signing_key))
            for each in model_configs
        ],
        opener,
        memory=memory,
        restarts=config.restarts,
    )
    app = build_app(models, config)  # before a model is loaded: a folder may be of no use
    try:
        await until_stop_signal(models.open())
        listen(listener)  # whoever reads that it serves may connect at once
    except BaseException:
        await models.close()
        raise
    freeze_heap()
    door = Door(app)
    server = StoppingServer(
        uvicorn.Config(
            door,
            http=LimitedProtocol,
            log_level="warning",
            access_log=False,
            lifespan="on",
        ),
        door,
        models,
        grace_s=config.stop_grace_s,
    )
    watch = asyncio.create_task(_stop_when_broken(models, server))
    names = ", ".join(model.name for model in models)
    announce(f"quire serves {names} at {_described(url_of(listener), page=config.page)}")
    if config.mcp_servers:
        offered = ", ".join(each.name for each in config.mcp_servers)
        announce(f"MCP servers whose tools clients may call: {offered}")
    await server.serve(sockets=[listener])
    await cancel_and_wait(watch)
    return 1 if models.broken.is_set() else 0


def _described(url: str, *, page: bool) -> str:
    """Return where clients find the server, and browsers its page."""
    if not url.startswith("http"):
        return url  # a path, which those append that connect to it
    return f"{url}/v1, with a page for browsers at {url}" if page else f"{url}/v1"


async def _open(
    worker: str,
    show: Callable[[str, Progress | None], None],
    model_config: ModelConfig,
    on_progress: OnProgress,
    make_room: MakeRoom,
    *,
    several: bool = False,
    started: Iterator[EngineProcess],
    forked: Iterator[JobProcess],
) -> Loaded:
    """Start a model's engine on this machine, and the service in front of it.

    Args:
        several: whether the server has other models, whose streams must not wait meanwhile.
        started: engines' processes that are opening the model already; each is used once.
        forked: processes that wait for the opening of jobs; each is used once.

    Raises:
        ModelError: it cannot be opened.
    """
    config = model_config.serving

    def tell(progress: Progress | None) -> None:
        show(model_config.name, progress)
        on_progress(progress)

    client = await ProcessEngine.start(
        model_config.engine,
        config.log_level,
        worker,
        timeout_s=config.engine_timeout_s,
        log_format=config.log_format,
        on_progress=tell,
        make_room=make_room,
        started=next(started, None),
    )
    give_up = client.give_up if several else None
    return await open_service(
        client,
        model_config,
        client.broken,
        tokenizer_apart=give_up,
        job_process=next(forked, None),
    )


async def _stop_when_broken(models: Models, server: StoppingServer) -> None:
    """End the server once no engine may be started, after /health had a moment to report it."""
    await models.broken.wait()
    log.error("the server ends, because no engine can be started any more (see --restarts)")
    await asyncio.sleep(_LAST_WORD_S)
    server.stop_now()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not offered on every platform; asyncio's own loop serves as well
        return None
    factory: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return factory
