"""The servers that are compared: how each is started, and when it is ready."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from quire.cli.load import LoadError, Target
from quire.core.processes import wait_or_kill

Serving = AbstractContextManager[tuple[Target, psutil.Process]]
"""A server that runs within the context, and its process."""


class StartError(Exception):
    """A server did not come up or did not stay; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """One contender over HTTP.

    Attributes:
        package: the distribution whose version is reported.
        peer: whether it runs from the peers' environment rather than this one.
        command: arguments after `python`; `{model}` and `{port}` are filled in.
        reuse_environment: variables that switch its prefix cache on, where that is not the default.
        note: what a reader of the results must know.
    """

    name: str
    package: str
    peer: bool
    command: tuple[str, ...]
    reuse_environment: tuple[tuple[str, str], ...] = ()
    note: str = ""


_AT = ("--host", "127.0.0.1", "--port", "{port}")

SERVERS = (
    Server(
        "quire", "quire", False, ("-m", "quire", "serve", "{model}", *_AT, "--log-level", "warning")
    ),
    Server(
        "mlx_lm.server",
        "mlx-lm",
        True,
        ("-m", "mlx_lm", "server", "--model", "{model}", *_AT, "--log-level", "WARNING"),
        note="batches greedy requests only where they carry no seed",
    ),
    Server(
        "mlx-vlm",
        "mlx-vlm",
        True,
        ("-m", "mlx_vlm.server", "--model", "{model}", *_AT, "--log-level", "WARNING"),
        reuse_environment=(("APC_ENABLED", "1"),),
    ),
    Server(
        "vllm-mlx",
        "vllm-mlx",
        True,
        ("-m", "vllm_mlx.cli", "serve", "{model}", *_AT, "--continuous-batching"),
    ),
)


def child_environment(extra: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
    """Return the environment of every contender: no hub, this checkout's sources."""
    source = str(Path(__file__).resolve().parent.parent / "src")
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": source, **dict(extra)}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def version(python: str, package: str) -> str:
    """Return the installed version, or "source" where the package runs from a checkout."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "source"


@contextmanager
def own_server(
    command: list[str], environment: dict[str, str], port: int
) -> Iterator[tuple[Target, psutil.Process]]:
    """Yield a server of quire's that listens on a port, and its process.

    Raises:
        StartError: it does not listen within 60 s.
    """
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        _await_listening(port)
        yield Target.parse(f"http://127.0.0.1:{port}"), psutil.Process(process.pid)
    finally:
        process.terminate()
        wait_or_kill(process, 10)


def _await_listening(port: int) -> None:
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise StartError("the server does not come up")


def _tail(log: Path, lines: int = 6) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"exited with {process.returncode} at start:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise StartError(f"not ready after {limit_s:g} s:\n{_tail(log)}")


@contextmanager
def running(
    server: Server, model: str, peers_python: str, *, reuse: bool = False, limit_s: float = 90
) -> Iterator[tuple[Target, float]]:
    """Starts a server, waits until it is healthy, stops it at the end.

    Yields:
        Where to send requests, and the seconds from the start of the process until it was ready.

    Raises:
        StartError: it was not healthy within `limit_s`, exited before it was stopped, or the body
            raised a `LoadError`; with the end of its log.
    """
    port = free_port()
    python = peers_python if server.peer else sys.executable
    command = [python, *(part.format(model=model, port=port) for part in server.command)]
    environment = child_environment(server.reuse_environment if reuse else ())
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            started = time.monotonic()
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        try:
            _await_ready(process, port, log, limit_s)
            yield Target.parse(f"http://127.0.0.1:{port}"), time.monotonic() - started
            if process.poll() is not None:
                raise StartError(f"exited with {process.returncode} under load:\n{_tail(log)}")
        except LoadError as error:
            raise StartError(f"{error}; its log ends:\n{_tail(log)}") from error
        finally:
            process.terminate()
            wait_or_kill(process, 10)
