"""Plain HTTP requests to a server under test, one by one or many at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
T = TypeVar("T")


@dataclass
class Streamed:
    """A streamed completion: its text, and when each event came, from the request on.

    Attributes:
        error: the error that ended it, if one did.
    """

    text: str = ""
    finish: str = ""
    error: dict[str, Any] | None = None
    times: list[float] = field(default_factory=list)


class Client:
    """Connections to one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=64)
        self.http = httpx.Client(base_url=url, timeout=120, limits=limits, verify=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """Return the whole body of a completion; greedy unless `fields` say otherwise."""
        answer = self.post(COMPLETIONS, **({"prompt": prompt, "temperature": 0} | fields))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def text(self, prompt: str | list[int], **fields: Any) -> str:
        """Return the text of a completion."""
        text: str = self.complete(prompt, **fields)["choices"][0]["text"]
        return text

    def ask(self, content: str, **fields: Any) -> dict[str, Any]:
        """Return the first choice of a greedy chat completion."""
        messages = [{"role": "user", "content": content}]
        answer = self.post(CHAT, **({"messages": messages, "temperature": 0} | fields))
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def events(self, route: str, **body: Any) -> Generator[dict[str, Any]]:
        """Yield the events of a stream as they come; closing the generator hangs up."""
        with self.http.stream("POST", route, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def stream(
        self,
        prompt: str | list[int],
        each: Callable[[Streamed], bool | None] = lambda _: None,
        **fields: Any,
    ) -> Streamed:
        """Return a streamed completion; greedy unless `fields` say otherwise.

        Args:
            each: sees what there is after every event, and hangs up by returning True.
        """
        seen, started = Streamed(), time.perf_counter()
        events = self.events(COMPLETIONS, **({"prompt": prompt, "temperature": 0} | fields))
        for event in events:
            seen.error = event.get("error")
            if seen.error is not None:
                break
            seen.times.append(time.perf_counter() - started)
            for choice in event["choices"]:
                seen.text += choice["text"]
                seen.finish = choice["finish_reason"] or ""
            if each(seen):
                break
        events.close()
        return seen


def one_by_one(calls: Iterable[Callable[[], T]], results: list[T]) -> Callable[[Streamed], None]:
    """Return a callback for `Client.stream`: one call an event, and the rest with the last one, as
    events may come joined."""
    left = iter(calls)

    def each(seen: Streamed) -> None:
        for call in left:
            results.append(call())
            if not seen.finish:
                return

    return each


def at_once(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of calls that are all made at the same time, in order."""
    wanted = list(calls)
    with ThreadPoolExecutor(len(wanted)) as pool:
        return [future.result() for future in [pool.submit(call) for call in wanted]]
