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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from quire.cli.keys import add_client_key_arguments, client_key
from quire.cli.load import Target, served_model
from quire.cli.settings import PREFIX
from quire.cli.sse_counter import error_message
from quire.cli.values import positive
from quire.core.errors import QuireError

HELP = """/reset           forget the conversation
/system [TEXT]   set the system message, or remove it; begins anew
/exit            leave (Ctrl-D too)
Ctrl-C stops an answer. Begin a message with a space to send one that starts with a slash."""

Message = dict[str, Any]


class ChatError(QuireError):
    """An answer that failed, or a server that did not start."""


@dataclass(slots=True)
class Reply:
    """An answer as its deltas add up. `calls` are OpenAI tool calls, by their index."""

    text: str = ""
    calls: dict[int, Message] = field(default_factory=dict)

    def message(self) -> Message:
        """The assistant's turn for the next request."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    def add_call(self, delta: Message) -> None:
        """Merges one streamed piece of a tool call."""
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(delta.get("index", len(self.calls)), empty)
        call["id"] = delta.get("id") or call["id"]
        for key in ("name", "arguments"):
            call["function"][key] += (delta.get("function") or {}).get(key) or ""


class Chat:
    """One conversation: what was said, and how answers are asked for and shown.

    Args:
        url: of the server, with `/v1`.
        settings: fields that every request carries (model, temperature, tools, ...).
        console: where answers go.
    """

    def __init__(
        self, client: httpx.Client, url: str, settings: Message, console: Console, system: str = ""
    ) -> None:
        self._client = client
        self._url = url
        self._settings = settings
        self._console = console
        self.system = system
        self.messages: list[Message] = []
        self._thinking = False  # whether the last piece shown was part of reasoning

    def answer(self) -> Reply:
        """Asks for the next turn, shows it while it streams, and remembers it.

        Ctrl-C ends the answer; what came until then is remembered.

        Raises:
            ChatError: the server refused or failed. Nothing is remembered.
        """
        answer = Reply()
        self._thinking = False
        try:
            for delta in self._deltas():
                self._show(delta, answer)
        except KeyboardInterrupt:
            answer.calls.clear()  # a call that was cut off can't be sent back
            self._console.print("\n(stopped)", style="dim", highlight=False, end="")
        self._console.print()
        for call in answer.calls.values():
            function = call["function"]
            self._write(f"{function['name']}({function['arguments']})\n", "cyan")
        if answer.text or answer.calls:
            self.messages.append(answer.message())
        return answer

    def _deltas(self) -> Iterator[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self._settings, "messages": system + self.messages, "stream": True}
        try:
            with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as got:
                if got.status_code != 200:
                    raise ChatError(f"HTTP {got.status_code}: {error_message(got.read())}")
                yield from _read_events(got.iter_lines())
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error

    def _show(self, delta: Message, answer: Reply) -> None:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content")
        if reasoning:
            self._write(reasoning, "dim")
            self._thinking = True
        if text:
            if self._thinking:
                self._write("\n\n", "")
                self._thinking = False
            answer.text += text
            self._write(text, "")
        for call in delta.get("tool_calls") or ():
            answer.add_call(call)

    def _write(self, text: str, style: str) -> None:
        self._console.print(
            text, style=style, end="", markup=False, highlight=False, soft_wrap=True
        )


def _read_events(lines: Iterator[str]) -> Iterator[Message]:
    """The deltas of a stream of chat completion chunks.

    Raises:
        ChatError: the stream carries an error, or ends early.
    """
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line[5:].strip()
        if payload == "[DONE]":
            return
        chunk = json.loads(payload)
        if "error" in chunk:
            raise ChatError(error_message(payload.encode()))
        for choice in chunk.get("choices", ()):
            yield choice.get("delta") or {}
    raise ChatError("the stream ended early")


class Terminal:
    """Reads lines from a terminal or a pipe and acts on them."""

    def __init__(self, chat: Chat, console: Console) -> None:
        self._chat = chat
        self._console = console
        self._interactive = sys.stdin.isatty()
        self._failed = False

    def talk(self) -> int:
        """Until /exit or the end of input. 1 if an answer failed."""
        if self._interactive:
            # Importing it gives `input` line editing and history, where the platform has it.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
        while (line := self._read("> ")) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line.strip():
                self._turn(line.strip())
        return 1 if self._failed else 0

    def _read(self, prompt: str) -> str | None:
        while True:
            try:
                return input(prompt if self._interactive else "")
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                self._note("\n/exit or Ctrl-D leaves")

    def _turn(self, text: str) -> None:
        known = len(self._chat.messages)
        self._chat.messages.append({"role": "user", "content": text})
        try:
            answer = self._chat.answer()
            while answer.calls:
                for call in answer.calls.values():
                    result = self._read(f"result of {call['function']['name']}> ")
                    self._chat.messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": result or ""}
                    )
                answer = self._chat.answer()
        except ChatError as error:
            # The turn is forgotten whole: half of it would not be a valid conversation.
            del self._chat.messages[known:]
            self._failed = True
            self._note(f"quire chat: {error}", "red")

    def _command(self, line: str) -> bool:
        """Acts on a command; False to leave."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self._chat.messages.clear()
        elif name == "/system":
            self._chat.system = rest.strip()
            self._chat.messages.clear()
        elif name == "/help":
            self._note(HELP)
        else:
            self._note(f"unknown command {name}; these are known:\n{HELP}", "red")
        return True

    def _note(self, text: str, style: str = "dim") -> None:
        print_to = Console(stderr=True)
        print_to.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


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
                console.print(f"{model} at {url}; /help for commands", style="dim")
            return Terminal(chat, console).talk()
    except (QuireError, ValueError, OSError) as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 2
