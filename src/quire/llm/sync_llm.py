"""`LLM`: a model for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

from quire.core.errors import QuireError
from quire.core.info import ModelInfo
from quire.core.request import PoolingKind
from quire.llm.answers import Answer, Embedding, Score
from quire.llm.async_llm import AsyncLLM, AsyncStream, OnError
from quire.llm.options import ChatOptions, Messages, Options, Prompt
from quire.llm.settings import Settings
from quire.text.events import Event, Text

Result = TypeVar("Result")


class _Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result; cancel it if the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Stream:
    """An answer as it is generated: iterate its text, or its `events`.

    Call `close`, or leave `with`, to end the answer early.
    """

    def __init__(self, loop: _Loop, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream
        self._events = stream.events()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if isinstance(event, Text) and event.text:
                yield event.text

    def events(self) -> Iterator[Event]:
        """Yield the first choice's text, reasoning and calls as they are generated, then its end.

        Raises:
            RunFailed: the engine refused the request, or failed.
        """
        while (event := self._loop.run(anext_or_none(self._events))) is not None:
            yield event

    def close(self) -> None:
        """End the answer if it has not ended."""
        self._loop.run(self._stream.aclose())

    @property
    def answer(self) -> Answer:
        """The whole answer, available after all events were read."""
        return self._stream.answer


class LLM:
    """A model in its own engine process, as in `quire serve`, but without a server.

    ```python
    with LLM("path/to/model") as llm:
        answers = llm.generate(prompts, max_tokens=64)
    ```

    The model is loaded when the object is made. Several threads may use it: all requests in flight
    share the engine's steps.

    Args:
        model: a folder, a GGUF file, or a hub id; None means the embedded model.
        settings: see `Settings`.

    Raises:
        ModelError: the model cannot be loaded.
        TypeError: a setting is unknown.
        RequestError: the KV format does not exist.
    """

    def __init__(self, model: str | Path | None = None, **settings: Unpack[Settings]) -> None:
        self._llm = AsyncLLM(model, **settings)
        self._loop = _Loop()
        self._closed = weakref.finalize(self, _close, self._loop, self._llm)
        try:
            self._loop.run(self._llm.open())
        except QuireError as error:
            self.close()
            error.__traceback__ = None  # of the loop's thread
            raise error from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine's process. Answers in flight fail. May be called again."""
        self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        """Facts about the loaded model, such as its context length in tokens."""
        return self._llm.info

    # A str is a Sequence[str] to the type checker, so the overloads overlap; this one comes first.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, *, on_error: OnError = "raise", **options: Unpack[Options]
    ) -> Answer: ...

    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, on_error: OnError = "raise", **options: Unpack[Options]
    ) -> list[Answer]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        **options: Unpack[Options],
    ) -> Answer | list[Answer]:
        """Continue a text, or each of many; see `AsyncLLM.generate`."""
        return self._run(self._llm.generate(prompts, on_error=on_error, **options))

    def chat(
        self, messages: Messages, *, on_error: OnError = "raise", **options: Unpack[ChatOptions]
    ) -> Answer:
        """Answer a conversation; see `AsyncLLM.chat`."""
        return self._run(self._llm.chat(messages, on_error=on_error, **options))

    def chats(
        self,
        conversations: Sequence[Messages],
        *,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[Answer]:
        """Answer many conversations, in order; see `AsyncLLM.chats`."""
        return self._run(self._llm.chats(conversations, on_error=on_error, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Start an answer to a text or to token ids, and return it as a stream."""
        return Stream(self._loop, self._run(self._llm.stream(prompt, **options)))

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream:
        """Start an answer to a conversation, and return it as a stream."""
        return Stream(self._loop, self._run(self._llm.stream_chat(messages, **options)))

    def embed(
        self,
        inputs: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[Embedding]:
        """Return a vector for each input; see `AsyncLLM.embed`."""
        return self._run(
            self._llm.embed(
                inputs,
                dimensions=dimensions,
                pooling=pooling,
                normalize=normalize,
                prompt_name=prompt_name,
            )
        )

    def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[Score]:
        """Return how well each document answers a query; see `AsyncLLM.score`."""
        return self._run(self._llm.score(query, documents, instruction=instruction))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._closed.alive:
            work.close()
            raise RuntimeError("the LLM is closed")
        return self._loop.run(work)


async def anext_or_none(events: Any) -> Event | None:
    """Return the next event; None after the last."""
    event: Event | None = await anext(events, None)
    return event


def _close(loop: _Loop, llm: AsyncLLM) -> None:
    try:
        loop.run(llm.close())
    finally:
        loop.close()
