"""Input of `quire chat`: messages, and commands that start with a slash."""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import sys
import textwrap
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from rich.console import Console

from quire.cli.conversation import Chat, ChatError, Message
from quire.cli.pictures import Draw, picture_format, terminal_attributes
from quire.cli.settings import said
from quire.core.errors import QuireError
from quire.core.limited_files import (
    MEDIA_BYTES,
    TEXT_BYTES,
    read_limited_bytes,
    read_limited_text,
)

_ACTS = {
    "/file FILE": "send a picture, sound or video along with the next message; may be given again; "
    "/image is the same",
    "/model [NAME]": "go on with another model of the server, or list them",
    "/system [TEXT]": "set the system message, or remove it; begins anew",
    "/reset": "forget the conversation",
    "/stats": "what the last answer took",
    "/save FILE": "write the conversation as JSON; in a terminal each turn is kept for "
    "`quire chat --resume`",
    "/exit or /quit": "leave (Ctrl-D and Ctrl-C too)",
    "/? or /help": "this",
}
_KEYS = (
    "Ctrl-C stops an answer, or clears the line; on an empty line it leaves. What is pasted is one "
    "message, however many lines it has. Begin a message with a space to send one that starts "
    "with a slash."
)


def help_text(width: int) -> str:
    """Return the commands and keys, in lines of at most `width` characters."""
    column = max(map(len, _ACTS)) + 2
    lines = []
    for command, act in _ACTS.items():
        first, *more = textwrap.wrap(act, max(20, width - column))
        lines += [f"{command:{column}}{first}", *(" " * column + line for line in more)]
    return "\n".join([*lines, *textwrap.wrap(_KEYS, width)])


HELP = help_text(80)

_COMMANDS = (
    "/file",
    "/image",
    "/model",
    "/system",
    "/reset",
    "/stats",
    "/save",
    "/exit",
    "/quit",
    "/?",
    "/help",
)


def history_file() -> Path:
    """Return the file with typed lines of earlier chats."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "quire" / "chat_history"


def typed_lines() -> Callable[[str], str]:
    """Read messages from a terminal, with editing, history and completion of commands."""
    # Here, because every command loads this module and the library takes a while.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    place = history_file()
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(place)),
        completer=WordCompleter(list(_COMMANDS), sentence=True),
        complete_while_typing=False,
    )

    def read(prompt: str) -> str:
        """Read a line. Ctrl-C clears it; on an empty line it raises KeyboardInterrupt."""
        while True:
            try:
                return session.prompt(prompt)
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise

    return read


def kept_file() -> Path:
    """Return the file with the last conversation, for `--resume`."""
    return history_file().with_name("last_chat.json")


_ENDINGS = {
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".aac", ".m4a"),
    "video": (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"),
}


def _kind(file: Path) -> str:
    """Return a file's media kind, as /v1/models names it. Unknown files count as pictures."""
    ending = file.suffix.lower()
    return next((kind for kind, endings in _ENDINGS.items() if ending in endings), "image")


def _is_text(line: str) -> bool:
    """Return whether a line is valid UTF-8. Python decodes other bytes to surrogates."""
    return not any("\ud800" <= each <= "\udfff" for each in line)


class Terminal:
    """Reads lines from a terminal or a pipe and acts on them."""

    def __init__(self, chat: Chat, console: Console) -> None:
        self._chat = chat
        self._console = console
        self._interactive = sys.stdin.isatty()
        self._input = typed_lines() if self._interactive else input
        self._failed = False
        self._files: list[Message] = []
        """Parts that go along with the next message."""
        self._names: dict[str, str] = {}
        """Names of attached files, by URL."""

    def talk(self) -> int:
        """Talk until /exit, Ctrl-C or the end of input. Return 1 if an answer failed."""
        while (line := self._read("> ")) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line.strip():
                self._turn(line.strip())
                self._keep()
        return 1 if self._failed else 0

    def resume(self) -> None:
        """Continue the last saved conversation.

        Raises:
            ChatError: there is none, or its file cannot be read.
        """
        try:
            kept = json.loads(read_limited_text(kept_file(), TEXT_BYTES))
            self._chat.system, self._chat.messages = kept["system"], list(kept["messages"])
        except FileNotFoundError as error:
            raise ChatError("--resume: no conversation has been kept yet") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ChatError(f"--resume: {kept_file()} cannot be read: {error}") from error
        turns = sum(message.get("role") == "user" for message in self._chat.messages)
        self._note(f"continuing after {turns} {'message' if turns == 1 else 'messages'} of yours")
        if self._interactive:
            self._chat.show_last()

    def _keep(self) -> None:
        """Save the conversation for `--resume`, unless it comes from a pipe."""
        if not self._interactive:
            return
        kept = {"system": self._chat.system, "messages": self._chat.messages}
        part = kept_file().with_suffix(".part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.touch(mode=0o600)
            part.write_text(json.dumps(kept, ensure_ascii=False))
            part.replace(kept_file())
        except OSError as error:
            self._note(f"quire chat: the conversation was not kept: {said(error)}", "red")

    def _read(self, prompt: str) -> str | None:
        try:
            while not _is_text(line := self._input(prompt if self._interactive else "")):
                self._failed = True
                self._note("quire chat: a line is not UTF-8 and was not sent", "red")
            return line
        except (EOFError, KeyboardInterrupt):
            return None

    def _turn(self, text: str) -> None:
        known = len(self._chat.messages)
        files, self._files = self._files, []
        content = [*files, {"type": "text", "text": text}] if files else text
        self._chat.messages.append({"role": "user", "content": content})
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
            said = self._with_names(str(error))
            cut_off = self._chat.messages[-1]["role"] == "assistant"
            if not cut_off:  # a question alone would not be a valid conversation
                del self._chat.messages[known:]
            self._failed = True
            kept = "; the answer so far is kept: ask to go on" if cut_off else ""
            self._note(f"quire chat: {said}{kept}", "red")

    def _with_names(self, error: str) -> str:
        """Return an API error with file names in place of their positions in the request."""
        before = 1 if self._chat.system else 0
        for at, message in enumerate(self._chat.messages, before):
            parts = message["content"] if isinstance(message["content"], list) else []
            for index, part in enumerate(parts):
                kind = part["type"]
                if kind != "text":
                    place = f"'messages[{at}].content[{index}].{kind}.url'"
                    error = error.replace(place, self._names[part[kind]["url"]])
        return error

    def _command(self, line: str) -> bool:
        """Carry out a command. Return False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._chat.messages.clear()
            self._note("a new conversation")
        elif name == "/system":
            self._chat.system = rest.strip()
            self._chat.messages.clear()
            how = "with this" if self._chat.system else "without a"
            self._note(f"new conversation, {how} system message")
        elif name in ("/help", "/?"):
            self._note(help_text(min(80, self._console.width - 1)))
        elif name == "/stats":
            self._note(str(self._chat.usage or "no statistics: there is no answer yet"))
        elif name in ("/file", "/image", "/save", "/model"):
            acts = {"/save": self._save, "/model": self._choose}
            try:
                acts.get(name, self._add_file)(rest.strip())
            except (OSError, QuireError) as error:
                self._note(f"{name}: {said(error)}", "red")
        else:
            self._note(f"no such command: {name}; /? lists them", "red")
        return True

    def _add_file(self, path: str) -> None:
        """Read a file for the next message.

        Raises:
            ChatError: the model does not take this kind of file.
        """
        file = Path(path).expanduser()
        kind, data = _kind(file), read_limited_bytes(file, MEDIA_BYTES)
        model = self._chat.settings["model"]
        taken = self._chat.server.model(model).get("modalities")
        if taken is not None and kind not in taken:
            raise ChatError(f"{model} takes no {kind}, only {', '.join(taken)}")
        mime = mimetypes.guess_type(file.name)[0] or f"{kind}/{file.suffix[1:] or 'png'}"
        part, url = f"{kind}_url", f"data:{mime};base64,{base64.b64encode(data).decode()}"
        self._names[url] = file.name
        self._files.append({"type": part, part: {"url": url}})
        self._note(f"{file.name} is sent with the next message")
        if kind == "image" and self._draw is not None:
            print(self._draw(data), file=self._console.file)

    @cached_property
    def _draw(self) -> Draw | None:
        """The function that draws pictures; None if the terminal shows none."""
        if not (self._interactive and self._console.is_terminal):
            return None
        return picture_format(os.environ, lambda: terminal_attributes(sys.stdin.fileno()))

    def _save(self, path: str) -> None:
        """Write the conversation to a file."""
        system = [{"role": "system", "content": self._chat.system}] if self._chat.system else []
        said = {"model": self._chat.settings["model"], "messages": system + self._chat.messages}
        Path(path).expanduser().write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n")
        self._note(f"saved to {path}")

    def _choose(self, name: str) -> None:
        """Switch to another model, or list the models."""
        names = self._chat.models()
        if name in names:
            self._chat.settings["model"] = name
            self._note(f"{name} answers from now on")
            return
        if name:
            raise ChatError(f"no model is called {name!r}; the models are: {', '.join(names)}")
        now = self._chat.settings["model"]
        self._note("\n".join(f"{'*' if each == now else ' '} {each}" for each in names))

    def _note(self, text: str, style: str = "dim") -> None:
        print_to = Console(stderr=True)
        wraps = print_to.is_terminal  # between words
        print_to.print(text, style=style, markup=False, highlight=False, soft_wrap=not wraps)
