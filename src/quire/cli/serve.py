"""`quire serve`: one model behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn

from quire.api.app import build_app
from quire.api.auth import check_exposure
from quire.cache.formats.choose import add_kv_arguments, format_of
from quire.config import DiskConfig, EngineConfig, ServerConfig
from quire.demo import MODEL_DIR
from quire.engine.assembly import assemble
from quire.engine.process import WORKER, ProcessEngine
from quire.errors import QuireError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    parser.add_argument(
        "model", nargs="?", help="a folder or a hub id; the embedded demonstration if left out"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--served-name", help="what clients call the model")
    parser.add_argument("--dialect", help="how answers spell thoughts and tool calls; 'none' too")
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_safety_arguments(parser.add_argument_group("limits and safety"))
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    defaults = EngineConfig("")
    group.add_argument(
        "--dtype",
        default="",
        choices=("", "float32", "float16", "bfloat16"),
        help="compute type; by default the checkpoint's on a GPU, float32 on a CPU",
    )
    group.add_argument(
        "--kv-memory", type=byte_count, help="for all KV pages, e.g. 8GB; default: a share of free"
    )
    add_kv_arguments(group)
    group.add_argument("--max-sequences", type=positive, default=defaults.max_sequences)
    group.add_argument("--max-context", type=positive, help="tokens of prompt and answer together")
    group.add_argument("--max-tokens", type=positive, help="for requests that name no limit")
    group.add_argument(
        "--step-ms",
        type=float,
        default=defaults.step_ms,
        help="time aimed at for a step that only reads prompts",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its beginning"
    )
    group.add_argument("--kv-disk", metavar="DIR", help="where evicted pages go and survive")
    group.add_argument("--kv-disk-size", type=byte_count, default=byte_count("20GB"))
    group.add_argument(
        "--stop-on-loop",
        type=positive,
        default=0,
        metavar="N",
        help="end an answer that repeats a cycle of tokens N times",
    )
    group.add_argument(
        "--keep-volatile",
        action="store_true",
        help="do not cut the parts of agents' prompts that change with every request",
    )


def _add_safety_arguments(group: argparse._ArgumentGroup) -> None:
    defaults = ServerConfig()
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="several are allowed"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="one key a line")
    group.add_argument(
        "--allow-anyone",
        action="store_true",
        help="serve beyond this machine without a key; meant, not forgotten",
    )
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN")
    group.add_argument("--max-concurrent", type=positive, default=defaults.max_concurrent)
    group.add_argument("--max-body", type=byte_count, default=defaults.max_body_bytes)
    group.add_argument(
        "--stored-responses",
        type=positive,
        default=defaults.stored_responses,
        metavar="N",
        help="answers of /v1/responses kept for previous_response_id",
    )
    group.add_argument(
        "--signing-key-file",
        metavar="FILE",
        help="signs the thoughts that clients carry, so that they hold beyond a restart",
    )
    group.add_argument("--request-timeout", type=float, metavar="SECONDS")
    group.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="for clients that send fields no schema knows and cannot be changed",
    )


def byte_count(text: str) -> int:
    """Parses `8GB`, `512MiB`, `1000`."""
    digits = text.rstrip("BbKkMmGgTtIi ")
    unit = text[len(digits) :].strip().upper()
    scale = _UNITS.get(unit) or _BINARY.get(unit)
    try:
        amount = float(digits)
    except ValueError:
        amount = -1.0
    if scale is None or amount < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, e.g. 8GB or 512MiB")
    return int(amount * scale)


def positive(text: str) -> int:
    """Parses a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted; 1 if the engine broke down."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    engine, server = engine_config(args), server_config(args)
    check_exposure(server, said_twice=args.allow_anyone)
    return serve(engine, server)


def serve(engine: EngineConfig, config: ServerConfig, worker: str = WORKER) -> int:
    """Serves until interrupted; 1 if the engine broke down.

    Args:
        worker: see `ProcessEngine.start`.
    """
    with (
        contextlib.closing(_bind(config)) as listener,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_serve(engine, config, listener, worker))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings, from the command line."""
    return EngineConfig(
        model=args.model or str(MODEL_DIR),
        dtype=args.dtype,
        kv_memory=args.kv_memory,
        kv_format=format_of(args),
        kv_skip_layers=args.kv_skip_layers,
        max_sequences=args.max_sequences,
        max_context=args.max_context,
        step_ms=args.step_ms,
        prefix_cache=not args.no_prefix_cache,
        disk=DiskConfig(args.kv_disk, args.kv_disk_size) if args.kv_disk else None,
        stop_on_loop=args.stop_on_loop,
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The HTTP side's settings, from the command line, the key file and `QUIRE_API_KEY`."""
    keys = list(args.api_key)
    if args.api_key_file:
        keys += _read(args.api_key_file, "--api-key-file").split()
    keys += os.environ.get("QUIRE_API_KEY", "").split(",")
    model = args.model or "quire-demo"
    name = args.served_name or (Path(model).name if Path(model).is_dir() else model)
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_name=name,
        api_keys=tuple(key for key in keys if key),
        strict_fields=not args.ignore_unknown_fields,
        max_concurrent=args.max_concurrent,
        max_body_bytes=args.max_body,
        request_deadline_s=args.request_timeout,
        cors_origins=tuple(args.cors_origin),
        dialect=args.dialect,
        default_max_tokens=args.max_tokens,
        drop_volatile_headers=not args.keep_volatile,
        signing_key=_signing_key(args),
        stored_responses=args.stored_responses,
        log_level=args.log_level,
    )


def _signing_key(args: argparse.Namespace) -> str | None:
    """The key in `--signing-key-file`; None draws one for this process.

    Raises:
        QuireError: the file holds none.
    """
    if not args.signing_key_file:
        return None
    key = _read(args.signing_key_file, "--signing-key-file").strip()
    if not key:
        raise QuireError("--signing-key-file: the file is empty")
    return key


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise QuireError(f"{option}: {error}") from error


def _bind(config: ServerConfig) -> socket.socket:
    """The listening socket, taken before the model is opened: a used port is known at once.

    Raises:
        QuireError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise QuireError(f"cannot bind {config.host}:{config.port}: {error.strerror}") from error
    return listener


async def _serve(
    engine: EngineConfig, config: ServerConfig, listener: socket.socket, worker: str
) -> int:
    client = await ProcessEngine.start(engine, config.log_level, worker)
    try:
        service = assemble(client, config.served_name or engine.model, config)
    except QuireError:
        await client.close()
        raise
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(service, config),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=5,
            lifespan="on",
        )
    )
    watch = asyncio.create_task(_stop_when_broken(client, server))
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"quire serves {service.name} at http://{shown}:{port}/v1", file=sys.stderr, flush=True)
    await server.serve(sockets=[listener])
    watch.cancel()
    return 1 if client.broken.is_set() else 0


async def _stop_when_broken(client: ProcessEngine, server: uvicorn.Server) -> None:
    """An engine that cannot go on ends the server, after /health had a moment to say so."""
    await client.broken.wait()
    await asyncio.sleep(2.0)
    server.should_exit = True


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not offered on every platform; asyncio's own loop serves as well
        return None
    factory: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return factory
