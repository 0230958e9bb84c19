"""`quire chat`: a conversation in the terminal, with a running server or its own."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import httpx
from pydantic import Field
from rich.console import Console

from quire.cli.chat_terminal import HELP, Terminal
from quire.cli.conversation import Chat, ChatError, Message
from quire.cli.files import read
from quire.cli.keys import ClientOptions
from quire.cli.own_server import loading_server
from quire.cli.served import Server
from quire.cli.settings import Command, said
from quire.cli.values import Count, File, Flag, Place
from quire.core.errors import QuireError


class ChatCommand(ClientOptions, Command):
    """Talks to the server at --url, or to a model that it serves itself (--model). Reads from a
    pipe too: one message a line.
    """

    command: ClassVar[str] = "chat"
    summary: ClassVar[str] = "talk to a model in the terminal"
    epilog: ClassVar[str] = HELP
    alternatives: ClassVar[tuple[str, ...]] = ("url", "model")

    model: Annotated[Place | None, Flag(bare="")] = Field(
        None,
        description="instead of --url: start a server with this folder or hub id for this chat; "
        "without a value the embedded model",
    )
    adapter: Annotated[Place | None, Flag("FOLDER")] = Field(
        None, description="a LoRA adapter for the model of --model"
    )
    served_model: Annotated[str | None, Flag("NAME")] = Field(
        None, description="the model's name at --url; default: the first that it lists"
    )
    system: Annotated[str, Flag("TEXT")] = Field("", description="system message")
    resume: bool = Field(False, description="continue the last conversation")
    tools: File | None = Field(
        None, description="file with a JSON list of OpenAI tools; you type their results"
    )
    temperature: Annotated[float | None, Flag("N")] = Field(
        None, description="sampling temperature; default: the server's"
    )
    max_tokens: Count | None = Field(None, description="maximum tokens of an answer")
    reasoning_effort: Annotated[str | None, Flag("EFFORT")] = Field(
        None, description="reasoning effort of models that think: none, low, medium or high"
    )

    def run(self) -> int:
        """Chat until the user leaves. Return 1 if an answer failed, 2 if no server could be
        reached.
        """
        console = Console()
        try:
            with contextlib.ExitStack() as stack:
                url, key = self._server(stack, console)
                server = Server(url, key)
                model = server.model(self.served_model)
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                client = stack.enter_context(httpx.Client(headers=headers, timeout=None))
                chat = Chat(
                    client, server, settings=self._asked(model), console=console, system=self.system
                )
                if sys.stdin.isatty():
                    console.print(f"{model['id']} at {url}; /? for commands", style="dim")
                terminal = Terminal(chat, console)
                if self.resume:
                    terminal.resume()
                return terminal.talk()
        except (QuireError, ValueError, OSError) as error:
            print(f"quire chat: {said(error)}", file=sys.stderr)
            return 2

    def _server(self, stack: contextlib.ExitStack, console: Console) -> tuple[str, str | None]:
        """Return URL and key of the server. A server started here ends with the stack."""
        if self.model is None:
            if self.adapter is not None:
                raise ChatError("--adapter needs --model: a server at --url loads its own adapters")
            return self.url, self.key
        return stack.enter_context(loading_server(self.model, self.adapter, console)), None

    def _asked(self, model: Message) -> Message:
        """Return a request's fields besides messages; `model` is an entry of `/v1/models`."""
        names = {"temperature", "max_tokens", "reasoning_effort"}
        asked = {"model": model["id"], **self.model_dump(include=names, exclude_none=True)}
        if model.get("owned_by") == "quire":  # others may refuse what they do not know
            usage = {"include_usage": True, "continuous_usage_stats": True}
            asked |= {"stream_options": usage, "return_progress": True}
        if self.tools:
            asked["tools"] = _tools(self.tools)
        return asked


def _tools(path: Path) -> list[Any]:
    """Return the tools in a file.

    Raises:
        QuireError: it cannot be read, or is not a JSON list.
    """
    try:
        tools = json.loads(read(path, "--tools"))
    except (ValueError, RecursionError) as error:
        raise QuireError(f"--tools: {path}: not valid JSON: {error}") from error
    if not isinstance(tools, list):
        raise QuireError(f"--tools: {path}: must hold a list of tools in OpenAI's form")
    return tools
