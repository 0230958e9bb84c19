"""A server in a process of its own, on a port of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.support.waiting import HANG_S, wait_until

_HTTP = httpx.Client(timeout=HANG_S, headers={"connection": "close"})
"""One client for all servers, because making one reads every certificate of the machine."""
GAUGES = re.compile(
    r"^(quire_http_in_flight|quire_running_sequences|quire_waiting_sequences"
    r'|quire_kv_bytes\{.*state="live".*\}) (\S+)$',
    re.MULTILINE,
)


@dataclass
class Child:
    """A running `quire serve`.

    Attributes:
        ready_s: seconds from its start to the first good answer of /health.
        log: the file that has what it prints.
    """

    url: str
    process: subprocess.Popen[bytes]
    ready_s: float
    log: Path

    @property
    def engine(self) -> psutil.Process:
        """The process that owns MLX."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [each for each in children if "worker" in " ".join(each.cmdline())]
        return engine

    def metrics(self) -> str:
        """Return the text of /metrics."""
        return _HTTP.get(f"{self.url}/metrics").text

    def samples(self) -> dict[str, float]:
        """Return the values of /metrics by their names, which have their labels."""
        lines = [line for line in self.metrics().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def live(self) -> dict[str, float]:
        """Return what is in flight: requests, sequences, and bytes of blocks that they hold."""
        return {name: float(value) for name, value in GAUGES.findall(self.metrics())}

    def held(self) -> dict[str, int]:
        """Return what the server's processes hold now, summed; memory in bytes that no other
        shares.
        """
        server = psutil.Process(self.process.pid)
        family = [server, *server.children(recursive=True)]
        return {
            "processes": len(family),
            "threads": sum(each.num_threads() for each in family),
            "descriptors": sum(each.num_fds() for each in family),
            "memory": sum(each.memory_full_info().uss for each in family),
        }

    def wait_idle(self) -> None:
        """Returns when nothing is in flight and no page is held any more."""
        now: dict[str, float] = {}

        def idle() -> bool:
            now.update(self.live())
            return not any(now.values())

        wait_until(idle, lambda: f"still in flight: {now}")
        assert len(now) >= 4, f"gauges are missing: {now}"


@contextmanager
def running(
    folder: Path,
    module: str,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Runs `python -m module arguments` until the block ends; its log goes to `folder`."""
    log = folder / "log"
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
        )
    try:
        url = _wait_ready(process, log)
        yield Child(url, process, time.monotonic() - started, log)
    finally:
        for _ in range(2):  # the second ends what is still in flight
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.wait(HANG_S)


@contextmanager
def quire_serve(folder: Path, *arguments: str, module: str = "quire") -> Iterator[Child]:
    """Yield the real command; without a model among the arguments it serves the embedded one.

    Args:
        module: what runs the command.
    """
    common = ("serve", "--port", "0", "--log-level", "warning")
    with running(folder, module, *common, *arguments) as child:
        yield child


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the server's URL once it answers. A slow machine has time as long as the log grows or
    processes start: those of Ray alone are a dozen.
    """
    urls: list[str] = []

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        urls[:] = re.findall(r"at (http://\S+)/v1", log.read_text())
        return bool(urls) and _answers(urls[0])

    server = psutil.Process(process.pid)

    def steps() -> object:
        return log.stat().st_size, {each.pid for each in server.children(recursive=True)}

    wait_until(ready, log.read_text, progress=steps)
    return urls[0]


def _answers(url: str) -> bool:
    try:
        return _HTTP.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
