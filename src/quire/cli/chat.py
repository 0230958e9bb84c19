"""`quire chat`: a conversation in the terminal, with a server that runs or with one of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console

from quire.cli.chat_terminal import HELP, Terminal
from quire.cli.conversation import Chat, ChatError, Message
from quire.cli.keys import add_client_key_arguments, client_key
from quire.cli.load import Target, served_model
from quire.cli.settings import PREFIX
from quire.cli.values import positive
from quire.core.errors import QuireError


@contextlib.contextmanager
def own_server(model: str, adapter: str | None = None) -> Iterator[str]:
    """Runs `quire serve MODEL` as a child for as long as the chat lasts; yields its URL.

    It is for this chat alone, so a key that is set for other servers does not guard it.

    Args:
        model: empty for the embedded one.
        adapter: a LoRA adapter, merged into its weights.

    Raises:
        ChatError: it exited before it was ready; the message ends with what it said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", *([model] if model else [])]
    command += ["--adapter", adapter] if adapter else []
    command += ["--port", str(port), "--log-level", "warning"]
    # What holds for servers that others ask is not meant for this one.
    command += ["--config", os.devnull]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            # A session of its own: Ctrl-C is meant for the answer, not for the server.
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _healthy(url):
                if child.poll() is not None:
                    raise ChatError(f"the server did not start: {log.read_text().strip()}")
                time.sleep(0.05)
            yield url
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `chat` to the command line."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talks to the server at --url, or to a model that it serves itself (--model). "
        "Reads from a pipe too: one message a line.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    where.add_argument(
        "--model",
        nargs="?",
        const="",
        help="serve this folder or hub id for this chat; the embedded model if none is named",
    )
    add("--adapter", metavar="FOLDER", help="a LoRA adapter for the model of --model")
    add("--served-model", help="model name at --url (default: the first that it lists)")
    add_client_key_arguments(parser)
    add("--system", default="", help="system message")
    add("--tools", metavar="FILE", help="JSON list of OpenAI tools; you type their results")
    add("--temperature", type=float, help="default: the server's")
    add("--max-tokens", type=positive, help="tokens an answer at most")
    add("--reasoning-effort", help="none, low, medium or high, for models that think")


def _settings(args: argparse.Namespace, model: str) -> Message:
    settings: Message = {"model": model}
    for name in ("temperature", "max_tokens", "reasoning_effort"):
        value = getattr(args, name)
        if value is not None:
            settings[name] = value
    if args.tools:
        settings["tools"] = json.loads(Path(args.tools).read_text())
    return settings


def run(args: argparse.Namespace) -> int:
    """Chats until the user leaves. 1 if an answer failed, 2 if no server could be reached."""
    console = Console()
    try:
        with contextlib.ExitStack() as stack:
            if args.model is not None:
                loading = (
                    console.status("loading the model")
                    if console.is_terminal
                    else contextlib.nullcontext()
                )
                with loading:
                    url = stack.enter_context(own_server(args.model, args.adapter))
            elif args.adapter is not None:
                raise ChatError("--adapter goes with --model: the server at --url has its own")
            else:
                url = args.url
            key = client_key(args) if args.model is None else None
            target = Target.parse(url, key)
            model = args.served_model or served_model(target, timeout_s=30)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            client = stack.enter_context(httpx.Client(headers=headers, timeout=None))
            scheme = "https" if target.tls else "http"
            base = f"{scheme}://{target.host}:{target.port}{target.path}"
            chat = Chat(client, base, _settings(args, model), console, args.system)
            if sys.stdin.isatty():
                console.print(f"{model} at {url}; /? for commands", style="dim")
            return Terminal(chat, console).talk()
    except (QuireError, ValueError, OSError) as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 2
