"""Start a server as a child process for one chat, and follow how far it has loaded."""

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
from pathlib import Path
from typing import IO

import httpx
from rich.console import Console

from quire.cli.conversation import ChatError
from quire.cli.loading import described
from quire.cli.settings import PREFIX
from quire.core.messages import Progress
from quire.core.processes import wait_or_kill
from quire.demo import NAME


@contextlib.contextmanager
def own_server(
    model: str,
    adapter: str | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[str]:
    """Run `quire serve MODEL` as a child within the context; yield its URL.

    The server is for this chat alone: API keys set for other servers do not apply.

    Args:
        model: a folder or hub id; empty for the embedded model.
        adapter: a LoRA adapter, merged into its weights.
        on_progress: called from another thread while the model loads.

    Raises:
        ChatError: the server exited before it was ready; the message ends with its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        log = Path(folder) / "log"
        child = _started(model, adapter, port=port, log=log)
        try:
            assert child.stdout is not None
            threading.Thread(target=_listen, args=(child.stdout, on_progress), daemon=True).start()
            url = f"http://127.0.0.1:{port}"
            # Plain HTTP: reading the machine's certificates takes longer than many requests.
            with httpx.Client(base_url=url, timeout=5, verify=False) as client:
                while not _healthy(client):
                    if child.poll() is not None:
                        raise ChatError(f"the server did not start: {log.read_text().strip()}")
                    time.sleep(0.05)
            yield url
        finally:
            child.terminate()
            wait_or_kill(child, 10)


@contextlib.contextmanager
def loading_server(model: str, adapter: str | None, console: Console) -> Iterator[str]:
    """Run `own_server`, and show the progress of loading in a terminal.

    Raises:
        ChatError: as `own_server`.
    """
    with contextlib.ExitStack() as stack:
        if not console.is_terminal:
            yield stack.enter_context(own_server(model, adapter))
            return
        what = f"loading {model or NAME}"
        with console.status(what) as status:

            def say(progress: Progress) -> None:
                status.update(f"{what}: {described(progress)}")

            url = stack.enter_context(own_server(model, adapter, say))
        yield url


def _started(model: str, adapter: str | None, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the child. It writes progress to its standard output and everything else to `log`."""
    command = [sys.executable, "-m", "quire.cli.chat_server", *([model] if model else [])]
    command += ["--adapter", adapter] if adapter else []
    command += ["--port", str(port), "--log-level", "warning"]
    # Settings of other servers do not apply to this one.
    command += ["--config", os.devnull]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as out:
        # A session of its own: Ctrl-C stops the answer, not the server. It ends with its standard
        # input, which the system closes however this process ends.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,
        )


def _listen(lines: IO[bytes], on_progress: Callable[[Progress], None]) -> None:
    """Report the progress lines of the child until it ends."""
    with lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # not a progress line
                on_progress(Progress(**json.loads(line)))


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False
