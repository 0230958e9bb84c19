"""A conversation with a server: its messages, and how answers are requested and shown."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from quire.cli.load import unreachable
from quire.cli.served import Server
from quire.cli.sse_counter import error_message
from quire.cli.waiting import Watch
from quire.core.errors import QuireError
from quire.core.figures import duration

if TYPE_CHECKING:
    from quire.cli.growing import View

Message = dict[str, Any]

_FEWEST = 10
"""Fewest tokens after the first for which a speed is shown: fewer may arrive in one piece."""


class ChatError(QuireError):
    """Raised if an answer failed or a server did not start."""


@dataclass(slots=True)
class Reply:
    """An answer, folded from its deltas. `calls` are OpenAI tool calls, by index."""

    text: str = ""
    calls: dict[int, Message] = field(default_factory=dict)

    def message(self) -> Message:
        """Return the assistant's turn for the next request."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    def add_call(self, delta: Message) -> None:
        """Merge one streamed piece of a tool call."""
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(delta.get("index", len(self.calls)), empty)
        call["id"] = delta.get("id") or call["id"]
        for key in ("name", "arguments"):
            call["function"][key] += (delta.get("function") or {}).get(key) or ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one answer. Times are seconds from the request.

    Attributes:
        cached: prompt tokens from the server's prefix cache.
    """

    prompt: int
    cached: int
    generated: int
    first_s: float
    whole_s: float

    def __str__(self) -> str:
        writing, later = self.whole_s - self.first_s, self.generated - 1
        known = writing > 0 and later >= _FEWEST
        speed = f", {later / writing:,.1f} tokens/s" if known else ""
        return (
            f"prompt {self.prompt:,} tokens, {self.cached:,} of them cached; first token after "
            f"{duration(self.first_s)}; answer {self.generated:,} tokens in "
            f"{duration(self.whole_s)}{speed}"
        )


def _reading(progress: Message) -> str:
    done, total, left_ms = progress["processed"], progress["total"], progress.get("left_ms")
    left = "" if left_ms is None else f", {duration(math.ceil(left_ms / 1000))} left"
    share = 100 * done // max(1, total)
    return f"reading the prompt: {done:,} of {total:,} tokens ({share}%){left}"


class Chat:
    """One conversation: its messages, and how answers are requested and shown.

    Args:
        server: the server that answers.
        settings: fields of every request (model, temperature, tools, ...).
        console: where answers are printed; a terminal renders their Markdown.
        thoughts: whether to show reasoning, too.

    Attributes:
        usage: usage of the last answer so far; None before the first, or if the server reports
            none.
    """

    def __init__(
        self,
        client: httpx.Client,
        server: Server,
        settings: Message,
        console: Console,
        system: str = "",
        *,
        thoughts: bool = True,
    ) -> None:
        self._client = client
        self.server = server
        self.settings = settings
        self._console = console
        self.system = system
        self._thoughts = thoughts
        self.messages: list[Message] = []
        self.usage: Usage | None = None

    def answer(self) -> Reply:
        """Request the next turn, show it while it streams, and add it to the conversation.

        Ctrl-C ends the answer; the text that came is kept, as it is where the server fails.

        Raises:
            ChatError: the server refused or failed.
        """
        # Here, because every command loads this module, and Markdown takes a while to load.
        from quire.cli.growing import view

        answer = Reply()
        self.usage = None
        try:
            with ExitStack() as stack:
                shown = stack.enter_context(view(self._console))
                watch = Watch(self.server, self.settings["model"], shown.wait)
                if self._console.is_terminal:
                    stack.enter_context(watch)
                for delta in self._deltas():
                    watch.end()
                    self._show(delta, answer, shown)
        except KeyboardInterrupt:
            answer.calls.clear()  # a call that was cut off can't be sent back
            self._console.print("(stopped)", style="dim", highlight=False)
        except ChatError:
            answer.calls.clear()
            if answer.text:
                self.messages.append(answer.message())
            raise
        for call in answer.calls.values():
            text = "{name}({arguments})".format(**call["function"])
            self._console.print(text, style="cyan", markup=False, highlight=False, soft_wrap=True)
        if self._console.is_terminal:
            self._console.print()
        if answer.text or answer.calls:
            self.messages.append(answer.message())
        return answer

    def show_last(self) -> None:
        """Show the last question and its answer, as they were shown when they were new."""
        from quire.cli.growing import view

        for message in self.messages[-2:]:
            content = message["content"]
            text = content if isinstance(content, str) else content[-1]["text"]
            if message["role"] == "user":
                self._console.print(f"> {text}", markup=False, highlight=False)
            elif message["role"] == "assistant" and text:
                with view(self._console) as shown:
                    shown.say(text)
                self._console.print()

    def models(self) -> list[str]:
        """Return the names that the server lists.

        Raises:
            ServerError: the server does not answer, or refuses.
        """
        return [str(each["id"]) for each in self.server.models()]

    def _deltas(self) -> Iterator[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"stream_options": {"include_usage": True}, **self.settings}
        body |= {"messages": system + self.messages, "stream": True}
        url = f"{self.server.base}/v1/chat/completions"
        started = time.perf_counter()
        try:
            with self._client.stream("POST", url, json=body) as got:
                if got.status_code != 200:
                    raise ChatError(f"HTTP {got.status_code}: {error_message(got.read())}")
                yield from self._read_events(got.iter_lines(), started)
        except httpx.ConnectError as error:
            raise ChatError(unreachable(self.server.base, error)) from error
        except httpx.HTTPError as error:
            raise ChatError(f"the connection was lost: {error}") from error

    def _show(self, delta: Message, answer: Reply, shown: View) -> None:
        if progress := delta.get("prompt_progress"):
            shown.wait(_reading(progress))
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning and self._thoughts:
            shown.think(reasoning)
        if text := delta.get("content"):
            answer.text += text
            shown.say(text)
        for call in delta.get("tool_calls") or ():
            answer.add_call(call)

    def _read_events(self, lines: Iterator[str], started: float) -> Iterator[Message]:
        """Return the deltas of a stream of chunks, and before them the progress of reading the
        prompt.

        Stores the usage.

        Args:
            started: time of the request.

        Raises:
            ChatError: the stream carries an error, or ends early.
        """
        first_s = 0.0
        for line in lines:
            if not line.startswith("data:"):
                continue
            payload = line[5:].strip()
            if payload == "[DONE]":
                return
            chunk = json.loads(payload)
            if "error" in chunk:
                raise ChatError(error_message(payload.encode()))
            if progress := chunk.get("prompt_progress"):
                yield {"prompt_progress": progress}
                continue
            elapsed = time.perf_counter() - started
            for choice in chunk.get("choices", ()):
                first_s = first_s or elapsed
                yield choice.get("delta") or {}
            if usage := chunk.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                counts = usage["prompt_tokens"], cached, usage["completion_tokens"]
                self.usage = Usage(*counts, first_s, elapsed)
        raise ChatError("the stream ended early")
