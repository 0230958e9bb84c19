"""`quire run`: one answer or a chat, from a model that is downloaded and served if needed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, ClassVar

import httpx
from pydantic import Field
from rich.console import Console

from quire.cli.chat_terminal import HELP, Terminal
from quire.cli.conversation import Chat
from quire.cli.keys import ClientOptions
from quire.cli.own_server import loading_server
from quire.cli.served import Server, ServerError
from quire.cli.settings import Command, said
from quire.cli.short_names import resolve, suggestion
from quire.cli.values import Count, Flag, Model
from quire.core.errors import ModelError, QuireError
from quire.demo import name_of


class RunCommand(ClientOptions, Command):
    """Answers PROMPT and exits; chats if there is none. Piped text is added to the prompt: git
    diff | quire run gemma4:26b "Review this". A server at --url that has the model answers; else
    the model is downloaded if need be and served for as long as this command runs. quire search
    lists short names.
    """

    command: ClassVar[str] = "run"
    summary: ClassVar[str] = "chat with a model, or answer one prompt"
    epilog: ClassVar[str] = HELP

    model: Annotated[Model, Flag("MODEL", positional=True)] = Field(
        description="a short name, a folder, a hub id or quire-demo"
    )
    prompt: Annotated[tuple[str, ...], Flag("PROMPT", positional=True, several=True)] = Field(
        (), description="what to ask; words are joined by blanks"
    )
    system: Annotated[str, Flag("TEXT")] = Field("", description="system message")
    temperature: Annotated[float | None, Flag("N")] = Field(
        None, description="sampling temperature; default: the server's"
    )
    max_tokens: Count | None = Field(None, description="maximum tokens of an answer")
    reasoning_effort: Annotated[str | None, Flag("EFFORT")] = Field(
        None, description="reasoning effort of models that think: none, low, medium or high"
    )

    def run(self) -> int:
        """Return 1 if an answer failed, 2 if no server could answer."""
        console = Console()
        try:
            running = self._running()
            place = "" if running else resolve(self.model)
            question = self._question()
            with contextlib.ExitStack() as stack:
                server, model = running or _started(place, stack)
                headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
                client = stack.enter_context(httpx.Client(headers=headers, timeout=None))
                names = {"temperature", "max_tokens", "reasoning_effort"}
                fields = self.model_dump(include=names, exclude_none=True)
                thoughts = console.is_terminal or question is None
                settings = {"model": model, **fields}
                chat = Chat(
                    client,
                    server,
                    settings=settings,
                    console=console,
                    system=self.system,
                    thoughts=thoughts,
                )
                if question is None:
                    console.print(f"{model} at {server.url}; /? for commands", style="dim")
                    return Terminal(chat, console).talk()
                return _answer(chat, question)
        except (QuireError, ValueError, OSError) as error:
            print(f"quire run: {said(error)}", file=sys.stderr)
            return 2

    def _question(self) -> str | None:
        """Return the prompt with piped text after it; None to chat.

        Raises:
            QuireError: there is no prompt, and no terminal to chat in.
        """
        piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
        parts = [part for part in (" ".join(self.prompt), piped.strip("\n")) if part.strip()]
        if parts:
            return "\n\n".join(parts)
        if sys.stdin is None or not sys.stdin.isatty():
            raise QuireError("there is no prompt: give one as an argument, or pipe it in")
        return None

    def _running(self) -> tuple[Server, str] | None:
        """Return the server at --url and its name for the model; None if it has no such model.

        Raises:
            QuireError: --url was given, and its server cannot be reached or has no such model.
        """
        asked = Server(self.url, self.key)
        named = "url" in self.model_fields_set
        try:
            served = [str(each["id"]) for each in asked.models()]
        except ServerError:
            if named:
                raise
            return None
        if name := self._name_at(asked):
            return asked, name
        if named:
            raise QuireError(
                f"{asked.base} does not serve {self.model!r}; it serves {', '.join(served)}"
            )
        return None

    def _name_at(self, server: Server) -> str | None:
        """Return a server's name for the model, which may be a preset's; None if it has none."""
        with contextlib.suppress(ServerError):
            return str(server.model(self.model)["id"])
        with contextlib.suppress(ServerError, QuireError):
            return str(server.model(name_of(resolve(self.model)))["id"])
        return None


def _started(place: str, stack: contextlib.ExitStack) -> tuple[Server, str]:
    """Start a server of a model, which ends with the stack; return it and its model's name.

    Raises:
        QuireError: the model cannot be downloaded, or its server does not start.
    """
    shown = Console(stderr=True)
    server = Server(
        stack.enter_context(loading_server(_pulled(place), adapter=None, console=shown))
    )
    return server, str(server.model()["id"])


def _pulled(place: str) -> str:
    """Download a hub model that is not on this disk, showing progress; return its location.

    Raises:
        ModelError: it cannot be downloaded.
    """
    if Path(place).expanduser().exists():
        return place
    from quire.models.weights.hub import find_folder

    try:
        find_folder(place)
    except ModelError as error:
        raise ModelError(f"{error}{suggestion(place)}") from error
    return place


def _answer(chat: Chat, question: str) -> int:
    """Show the answer to one question; return 1 if it failed."""
    chat.messages.append({"role": "user", "content": question})
    try:
        chat.answer()
    except QuireError as error:
        print(f"quire run: {said(error)}", file=sys.stderr)
        return 1
    return 0
