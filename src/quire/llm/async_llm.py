"""`AsyncLLM`: a model for programs with an event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from pydantic import BaseModel, ValidationError

from quire.api.shared.context import Context
from quire.api.shared.signing import Signer
from quire.core.errors import QuireError, RequestError
from quire.core.info import ModelInfo
from quire.core.model_place import check_places
from quire.core.request import Embed, PoolingKind
from quire.llm.answers import Answer, Embedding, Score, made_of
from quire.llm.options import ChatOptions, Messages, Options, Prompt, chat, completion, parsed_as
from quire.llm.settings import Settings, configured
from quire.serving.assembly import assemble
from quire.serving.engine_client import ProcessEngine
from quire.serving.generation import Generation
from quire.serving.ranking import prepare_ranking, ranked
from quire.serving.run_failed import RunFailed
from quire.serving.streams import GenerationStream
from quire.serving.tasks import cancel_and_wait, to_the_end
from quire.serving.vectors import embed_task, shortened
from quire.text.events import Event, Failed, Finished, Text
from quire.text.output import Fold

OnError = Literal["raise", "keep"]
Item = TypeVar("Item")
Result = TypeVar("Result")

_HELD = 256
"""Tokens of an answer that wait for each other where nothing is streamed."""
_AHEAD = 4
"""Requests that are prepared and queued for each running one."""
_VECTORS_TOGETHER = 256
"""The most inputs of one call that are queued at once."""


class AsyncStream:
    """An answer as it is generated: iterate its text, or its `events`.

    Call `aclose`, or leave `async with`, to end the answer early.
    """

    def __init__(self, run: GenerationStream, schema: type[BaseModel] | None) -> None:
        self._run = run
        self._schema = schema
        self._folds = [Fold() for _ in run.choices]
        self._ended = False
        self._batches = run.batches()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if isinstance(event, Text) and event.text:
                yield event.text

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the first choice's text, reasoning and calls as they are generated, then its end.

        Raises:
            RunFailed: the engine refused the request, or failed.
        """
        async for batch in self._batches:
            for index, event in batch:
                if isinstance(event, Failed):
                    raise RunFailed(event.error)
                self._folds[index].add(event)
                if index == 0:
                    yield event
        self._ended = True

    async def aclose(self) -> None:
        """End the answer if it has not ended."""
        await self._batches.aclose()
        self._run.abort()

    @property
    def answer(self) -> Answer:
        """The whole answer, available after all events were read."""
        if not self._ended:
            raise RuntimeError("the answer is not whole yet: read the stream to its end")
        choices = [
            made_of(folded, stream.take_ids(), parsed(self._schema, folded.text, folded.finish))
            for folded, stream in zip(
                [each.answer() for each in self._folds], self._run.choices, strict=True
            )
        ]
        return replace(choices[0], others=tuple(choices[1:]))


class AsyncLLM:
    """A model in its own engine process, as in `quire serve`, but without a server.

    Use it as `async with AsyncLLM(model) as llm`. It belongs to one event loop. All requests in
    flight share the engine's steps, so concurrent calls and large batches are computed together.

    Args:
        model: a folder, a GGUF file, or a hub id; None means the embedded model.
        settings: see `Settings`.

    Raises:
        TypeError: a setting is unknown.
        RequestError: the KV format does not exist.
    """

    def __init__(self, model: str | Path | None = None, **settings: Unpack[Settings]) -> None:
        self._engine_config, self._config = configured(model, settings)
        self._context: Context | None = None

    async def open(self) -> Self:
        """Load the model.

        Raises:
            ModelError: the model cannot be loaded.
        """
        check_places(self._engine_config)
        level = self._config.log_level
        client = await ProcessEngine.start(self._engine_config, level)
        try:
            name = self._config.served_name or ""
            service = await asyncio.to_thread(assemble, client, name, self._config)
        except BaseException:
            await to_the_end(client.close())
            raise
        media = service.prompts.media.for_job()
        self._context = Context(
            service, self._config, signer=Signer(), stored=_no_stored, job_media=media
        )
        return self

    async def close(self) -> None:
        """End the engine's process. Answers in flight fail. May be called again."""
        if (context := self._context) is not None:
            await context.service.close()
            self._context = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def info(self) -> ModelInfo:
        """Facts about the loaded model, such as its context length in tokens."""
        return self._opened.service.info

    # A str is a Sequence[str] to the type checker, so the overloads overlap; this one comes first.
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: str, *, on_error: OnError = "raise", **options: Unpack[Options]
    ) -> Answer: ...

    @overload
    async def generate(
        self, prompts: Sequence[Prompt], *, on_error: OnError = "raise", **options: Unpack[Options]
    ) -> list[Answer]: ...

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        **options: Unpack[Options],
    ) -> Answer | list[Answer]:
        """Continue a text, or each of many, without a chat template.

        Args:
            prompts: one text, or a list of texts and lists of token ids.
            on_error: "raise" ends all requests at the first failure; "keep" returns an `Answer`
                with `error` for each failed one.

        Raises:
            RequestError: an option is unknown, or a prompt cannot be answered.
            EngineFailure: the engine failed.
        """
        context = self._opened
        one = isinstance(prompts, str)
        asked: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        if not asked:
            return []
        first = whole(completion(context, asked[0], options))

        def spec(prompt: Prompt) -> Generation:
            ready = prompt if isinstance(prompt, str) else tuple(int(each) for each in prompt)
            if "seed" in options:
                return replace(first, prompts=(ready,))
            sampling = replace(first.sampling, seed=secrets.randbits(63))
            return replace(first, prompts=(ready,), sampling=sampling)

        answers = await self._answers(asked, spec, options=options, on_error=on_error)
        return answers[0] if one else answers

    async def chat(
        self,
        messages: Messages,
        *,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> Answer:
        """Answer a conversation. For many at once, see `chats`.

        Raises:
            RequestError: an option is unknown, or the conversation cannot be answered.
            EngineFailure: the engine failed.
        """
        return (await self.chats([messages], on_error=on_error, **options))[0]

    async def chats(
        self,
        conversations: Sequence[Messages],
        *,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[Answer]:
        """Answer many conversations, in order. Arguments and errors are those of `generate`."""
        context = self._opened
        if isinstance(conversations, str):
            raise RequestError("chats() takes a list of conversations; chat() takes one text")
        return await self._answers(
            conversations,
            lambda each: whole(chat(context, each, options)),
            options=options,
            on_error=on_error,
        )

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Start an answer to a text or to token ids, and return it as a stream."""
        return await self._stream(completion(self._opened, prompt, options), options)

    async def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncStream:
        """Start an answer to a conversation, and return it as a stream."""
        return await self._stream(chat(self._opened, messages, options), options)

    async def embed(
        self,
        inputs: str | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[Embedding]:
        """Return a vector for each input.

        Args:
            dimensions: length of each vector; default: all.
            pooling, normalize: default: as the model's `modules.json` says, else the mean of the
                final hidden states, scaled to length one.
            prompt_name: name of the model's prompt to put before each input, such as "query".

        Raises:
            RequestError: an input cannot be embedded, or the prompt does not exist.
            NotOffered: the model's own pooling is not supported.
        """
        vectors = self._opened.service.vectors
        task = embed_task(vectors.pooling, pooling, normalized=normalize)
        before = vectors.pooling.prompt(prompt_name)
        asked = [inputs] if isinstance(inputs, str) else inputs
        found: list[Embedding] = []
        for start in range(0, len(asked), _VECTORS_TOGETHER):
            part = asked[start : start + _VECTORS_TOGETHER]
            found += await self._embed(part, task, before, dimensions=dimensions)
        return found

    async def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[Score]:
        """Return how well each document answers a query, in the documents' order.

        A model that embeds (it has `modules.json`) compares vectors. Any other model is asked in
        the manner of Qwen3-Reranker, and its probability of "yes" is the score.

        Args:
            instruction: description of a good document, for models that are asked.

        Raises:
            RequestError: a text is too long, or the model can neither embed nor answer.
        """
        service = self._opened.service
        scores: list[Score] = []
        for start in range(0, len(documents), _VECTORS_TOGETHER):
            part = documents[start : start + _VECTORS_TOGETHER]
            pairs = [(query, document) for document in part]
            ranking = await prepare_ranking(service, pairs, instruction=instruction)
            found = (await ranked(service, ranking)).scores
            scores += [Score(start + index, score) for index, score in enumerate(found)]
        return scores

    # -- shared parts --------------------------------------------------------------------------

    @property
    def _opened(self) -> Context:
        if self._context is None:
            raise RuntimeError("the model is not open: use it within 'with'")
        return self._context

    async def _stream(self, spec: Generation, options: Any) -> AsyncStream:
        service = self._opened.service
        run = await service.start(await service.prepare(spec))
        return AsyncStream(run, parsed_as(options))

    async def _answers(
        self,
        items: Sequence[Item],
        spec: Callable[[Item], Generation],
        options: Any,
        on_error: OnError,
    ) -> list[Answer]:
        async def answer(item: Item) -> Answer:
            try:
                async with await self._stream(spec(item), options) as stream:
                    async for _ in stream.events():
                        pass
                    return stream.answer
            except QuireError as error:
                if on_error == "raise":
                    raise
                return Answer(error=error)

        return await in_order(items, answer, _AHEAD * self._engine_config.max_sequences)

    async def _embed(
        self, inputs: Sequence[Prompt], task: Embed, before: str, dimensions: int | None
    ) -> list[Embedding]:
        service = self._opened.service
        pooling = service.vectors.pooling
        prompts = tuple(
            pooling.text(each, before) if isinstance(each, str) else tuple(map(int, each))
            for each in inputs
        )
        spec = Generation(prompts=prompts, vector=True, max_prompt=pooling.stages.max_tokens)
        prepared = await service.prepare(spec)
        return [
            Embedding(
                tuple(shortened(each.values, dimensions, normalized=task.normalized)),
                each.prompt_tokens,
            )
            for each in await service.vectors.compute(prepared, task)
        ]


def whole(spec: Generation) -> Generation:
    """Return a generation whose tokens may wait for each other, as nothing is streamed.

    Stop strings and tools may end an answer early, so their tokens are read as they come.
    """
    return spec if spec.stops or spec.tools else replace(spec, hold=_HELD)


def parsed(schema: type[BaseModel] | None, text: str, end: object) -> Any:
    """Return an answer as an instance of its schema; None if it was truncated."""
    if schema is None or not isinstance(end, Finished) or end.reason.is_cut_off:
        return None
    try:
        return schema.model_validate_json(text)
    except ValidationError:  # a validation rule that the grammar does not enforce
        return None


async def in_order(
    items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], at_once: int
) -> list[Result]:
    """Return the results of `work` on all items, in order, with at most `at_once` in flight.

    The first error cancels the rest, and is raised after they have ended.
    """
    waiting = enumerate(items)
    results: dict[int, Result] = {}

    async def worker() -> None:
        for number, item in waiting:
            results[number] = await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        await cancel_and_wait(*workers)
    return [results[number] for number in range(len(results))]


def _no_stored(_: object) -> Any:
    raise AssertionError("nothing is stored")
