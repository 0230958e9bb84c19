"""A server for one chat alone: a child of the terminal's process, which hears how far it is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

import httpx

from quire.cli.conversation import ChatError
from quire.cli.settings import PREFIX
from quire.core.errors import QuireError
from quire.core.messages import Progress
from quire.core.processes import wait_or_kill


@contextlib.contextmanager
def own_server(
    model: str,
    adapter: str | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[str]:
    """Runs `quire serve MODEL` as a child for as long as the chat lasts; yields its URL.

    It is for this chat alone, so a key that is set for other servers does not guard it.

    Args:
        model: empty for the embedded one.
        adapter: a LoRA adapter, merged into its weights.
        on_progress: how far the loading has come, from a thread of its own.

    Raises:
        ChatError: it exited before it was ready; the message ends with what it said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        log = Path(folder) / "log"
        child = _started(model, adapter, port, log)
        try:
            assert child.stdout is not None
            threading.Thread(target=_listen, args=(child.stdout, on_progress), daemon=True).start()
            url = f"http://127.0.0.1:{port}"
            while not _healthy(url):
                if child.poll() is not None:
                    raise ChatError(f"the server did not start: {log.read_text().strip()}")
                time.sleep(0.05)
            yield url
        finally:
            child.terminate()
            wait_or_kill(child, 10)


def _started(model: str, adapter: str | None, port: int, log: Path) -> subprocess.Popen[bytes]:
    """The child; its progress comes through its output, all else that it says goes to `log`."""
    command = [sys.executable, "-m", __name__, *([model] if model else [])]
    command += ["--adapter", adapter] if adapter else []
    command += ["--port", str(port), "--log-level", "warning"]
    # What holds for servers that others ask is not meant for this one.
    command += ["--config", os.devnull]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as out:
        # A session of its own: Ctrl-C is meant for the answer, not for the server.
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,
        )


def _listen(lines: IO[bytes], on_progress: Callable[[Progress], None]) -> None:
    """Reads what the child tells until it has ended."""
    with lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # what others write is not for us
                on_progress(Progress(**json.loads(line)))


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _tell(name: str, progress: Progress | None) -> None:
    if progress is not None:
        print(json.dumps(asdict(progress)), flush=True)


def _serve() -> int:
    """The child: `quire serve` that tells its parent what it would show in a terminal."""
    # Here, because `commands` loads the module of the chat, and that loads this one.
    from quire.cli.commands import parse
    from quire.cli.serve import ServeCommand

    try:
        command = parse(["serve", *sys.argv[1:]])
        assert isinstance(command, ServeCommand)
        return command.serve(_tell)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_serve())
