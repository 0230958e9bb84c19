"""From what a client asked for to a stream of events, whatever protocol it spoke.

`Service.start` turns a `Generation` into requests to the engine, or refuses it. The `Run` that it
gives back yields batches of events and owns the way out: each choice ends in exactly one terminal
event, and a consumer that goes away aborts what still runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from quire.cache.specs import KVFormat
from quire.engine.interface import EngineClient, ModelInfo, Ticket
from quire.errors import EngineFailure, RequestError
from quire.request import (
    Failure,
    GrammarSpec,
    Output,
    Request,
    SamplingParams,
    ThinkingBudget,
)
from quire.text.events import (
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    Usage,
)
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

log = logging.getLogger("quire.service")

ChoiceEvent = tuple[int, Event]

_IN_THREAD = 16_384  # characters from which rendering and encoding would hold up other streams


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; `name` when it must be that one."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer is thought about first.

    Attributes:
        enabled: None leaves it to the template.
        budget: thought tokens at most; None is no limit.
        effort: OpenAI's word, handed to the template.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate, free of any protocol. Either `messages` or `prompts` is given.

    Attributes:
        messages: in the shape that chat templates read.
        prompts: texts, encoded with special tokens added, or token ids as they are.
        tools: in the shape that chat templates read.
        sampling: `seed` is the first choice's; the others' are derived from it.
        n: choices a prompt.
        max_tokens: None is all that the context has room for.
        schema: JSON text of the schema that the answer must meet.
        template_kwargs: further variables of the chat template.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    schema: str | None = None
    kv_format: KVFormat | None = None
    thinking: Thinking = field(default_factory=Thinking)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""


class EventSource(Protocol):
    """Turns one request's outputs into events."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string matched, so that the engine need not go on."""
        ...

    def feed(self, output: Output) -> list[Event]: ...


class EventSources(Protocol):
    """Makes the event source of one request."""

    def __call__(
        self,
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        stops: Sequence[str],
    ) -> EventSource: ...


class Observer(Protocol):
    """Told what happens to a run, for metrics. Seconds are seconds."""

    def first_token(self, seconds: float) -> None: ...

    def tokens(self, seconds: float, count: int) -> None: ...

    def ended(self, event: Finished | Failed) -> None: ...


class _Unobserved:
    """The observer of a service that nobody watches."""

    def first_token(self, seconds: float) -> None: ...

    def tokens(self, seconds: float, count: int) -> None: ...

    def ended(self, event: Finished | Failed) -> None: ...


class Service:
    """One served model: its tokenizer, template and dialect here, its engine behind `client`."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        sources: EventSources,
        *,
        name: str,
        default_max_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self._sources = sources
        self._observer: Observer = _Unobserved()
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self.client.info

    def observe(self, observer: Observer) -> None:
        """Tells `observer` of everything that starts from now on."""
        self._observer = observer

    async def start(self, spec: Generation) -> Run:
        """Queues a generation.

        Raises:
            RequestError: it cannot be served; nothing has been queued.
            EngineFailure: the engine cannot go on.
        """
        if self.client.failure is not None:
            raise EngineFailure(f"The engine cannot go on: {self.client.failure}")
        prompts = await self.tokens(spec)
        for prompt in prompts:
            self._check_prompt(prompt, "messages" if spec.messages else "prompt")
        requests = [
            self._request(spec, prompt, row * spec.n + copy)
            for row, prompt in enumerate(prompts)
            for copy in range(spec.n)
        ]
        choices = [
            Choice(
                self.client.submit(request),
                self._sources(prompt_ids=request.prompt, tools=spec.tools, stops=spec.stops),
                self._observer,
            )
            for request in requests
        ]
        return Run(prompts, choices)

    async def tokens(self, spec: Generation) -> list[tuple[int, ...]]:
        """The token ids of each prompt, of any length.

        Long prompts are rendered and encoded in a thread, so that streams go on meanwhile.
        """
        size = sum(len(str(m.get("content", ""))) for m in spec.messages)
        size += sum(len(p) for p in spec.prompts if isinstance(p, str))
        if size > _IN_THREAD:
            return await asyncio.to_thread(self._encode, spec)
        return self._encode(spec)

    def _encode(self, spec: Generation) -> list[tuple[int, ...]]:
        if spec.messages:
            text = self.render(spec)
            return [tuple(self.tokenizer.encode(text, add_special_tokens=False))]
        return [
            tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
            if isinstance(prompt, str)
            else prompt
            for prompt in spec.prompts
        ]

    def render(self, spec: Generation) -> str:
        """The text that the template makes of the messages."""
        variables = dict(spec.template_kwargs)
        if spec.thinking.enabled is not None:
            variables.setdefault("enable_thinking", spec.thinking.enabled)
        if spec.thinking.effort is not None:
            variables.setdefault("reasoning_effort", spec.thinking.effort)
        tools = spec.tools if spec.tool_choice.mode != "none" else ()
        return self.template.render(
            spec.messages, tools=tools or None, add_generation_prompt=True, **variables
        )

    def _check_prompt(self, prompt: tuple[int, ...], param: str) -> None:
        limit = self.info.context_length
        if not prompt:
            raise RequestError(f"'{param}' holds no token.", param=param, code="invalid_value")
        if len(prompt) >= limit:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens, but this model's context holds {limit}, "
                "the answer included.",
                param=param,
                code="context_length_exceeded",
            )
        self.check_vocabulary(prompt, param)

    def check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        """Raises `RequestError` if a token id is none of this model's."""
        vocabulary, worst = self.info.vocab_size, max(ids, default=0)
        if worst >= vocabulary:
            raise RequestError(
                f"Token {worst} in '{param}' is not below the vocabulary's size, {vocabulary}.",
                param=param,
                code="invalid_value",
            )

    def _request(self, spec: Generation, prompt: tuple[int, ...], index: int) -> Request:
        room = self.info.context_length - len(prompt)
        asked = spec.max_tokens if spec.max_tokens is not None else self._default_max_tokens
        eos = self.tokenizer.eos_ids
        return Request(
            id=f"{uuid.uuid4().hex}-{index}",
            prompt=prompt,
            sampling=replace(spec.sampling, seed=derived_seed(spec.sampling.seed, index)),
            max_tokens=room if asked is None else min(asked, room),
            stop_token_ids=spec.stop_token_ids if spec.ignore_eos else spec.stop_token_ids | eos,
            kv_format=spec.kv_format,
            grammar=self._grammar(spec),
            thinking=self._budget(spec),
            cache_salt=spec.cache_salt,
            snapshots=tuple(i + 1 for i, token in enumerate(prompt) if token in eos),
            deadline_s=self._deadline_s,
        )

    def _grammar(self, spec: Generation) -> GrammarSpec | None:
        return None if spec.schema is None else GrammarSpec("json_schema", spec.schema)

    def _budget(self, spec: Generation) -> ThinkingBudget | None:
        return None


def derived_seed(seed: int, index: int) -> int:
    """The seed of a generation's choice `index`; the first one's is the seed itself."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


class Choice:
    """One answer in the making: a ticket, and what turns its outputs into events."""

    def __init__(self, ticket: Ticket, source: EventSource, observer: Observer) -> None:
        self._ticket = ticket
        self._source = source
        self._observer = observer
        self._started = self._last = time.perf_counter()
        self.first_token_s: float | None = None
        self.cached_tokens = 0
        self.reuse = ""
        self.end: Finished | Failed | None = None

    def abort(self) -> None:
        """Ends the request by the engine's next step."""
        self._ticket.abort()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """All events that are ready at each wake-up; the last batch ends with the terminal one.

        What waits while a slow reader holds up its stream comes as one batch, merged.
        """
        try:
            async for output in self._ticket:
                waiting = self._ticket.take()
                events = self._feed(output) if not waiting else self._feed_all([output, *waiting])
                if not events:
                    continue
                yield events
                if isinstance(events[-1], Finished | Failed):
                    return
            yield [self._fail("The engine ended the request without saying why.")]
        finally:
            self._ticket.abort()

    def _feed_all(self, outputs: list[Output]) -> list[Event]:
        events: list[Event] = []
        for output in outputs:
            events += self._feed(output)
            if events and isinstance(events[-1], Finished | Failed):
                break
        return merge(events)

    def _feed(self, output: Output) -> list[Event]:
        self._observe(output)
        try:
            events = self._source.feed(output)
        except Exception:  # a parser's fault ends this request with an error, not its neighbours
            log.exception("request %s: its output could not be read", output.request_id)
            return [self._fail("The model's output could not be read.")]
        if self._source.stopped:
            self._ticket.abort()
        if events and isinstance(end := events[-1], Finished | Failed):
            self._finish(end)
        return events

    def _observe(self, output: Output) -> None:
        self.cached_tokens, self.reuse = output.cached_tokens, output.reuse
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self.first_token_s is not None:
            self._observer.tokens(now - self._last, len(output.token_ids))
        else:
            self.first_token_s = now - self._started
            self._observer.first_token(self.first_token_s)
        self._last = now

    def _fail(self, message: str) -> Failed:
        event = Failed(Failure(message, code="internal_error"), Usage(0, 0))
        self._finish(event)
        return event

    def _finish(self, event: Finished | Failed) -> None:
        self.end = event
        self._observer.ended(event)


class Run:
    """An accepted generation: one or several choices, numbered prompt by prompt.

    Attributes:
        prompt_tokens: of all prompts, each counted once.
    """

    def __init__(self, prompts: Sequence[tuple[int, ...]], choices: Sequence[Choice]) -> None:
        self.prompts = prompts
        self.prompt_tokens = sum(map(len, prompts))
        self.choices = choices

    def abort(self) -> None:
        """Ends all choices by the engine's next step."""
        for choice in self.choices:
            choice.abort()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were read from the prefix cache; known from the first batch on."""
        copies = len(self.choices) // len(self.prompts)
        return sum(choice.cached_tokens for choice in self.choices[::copies])

    @property
    def reuse(self) -> str:
        """Why no more of the first prompt was reused; known from the first batch on."""
        return self.choices[0].reuse

    @property
    def usage(self) -> Usage:
        """Counts of all choices that have ended."""
        ended = [choice.end.usage for choice in self.choices if choice.end is not None]
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in ended),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in ended),
            cached_tokens=self.cached_tokens,
            reuse=self.reuse,
        )

    def summary(self) -> dict[str, Any]:
        """What a log line says of a run that is over."""
        usage, first = self.usage, self.choices[0].first_token_s
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "reuse": usage.reuse,
            "completion_tokens": usage.completion_tokens,
            "finish": ",".join(_outcome(choice.end) for choice in self.choices),
            "ttft_ms": None if first is None else round(first * 1000, 1),
        }

    async def batches(self) -> AsyncGenerator[list[ChoiceEvent], None]:
        """Batches of events with the number of their choice, until every choice has ended."""
        if len(self.choices) == 1:
            async for events in self.choices[0].batches():
                yield [(0, event) for event in events]
            return
        ready: asyncio.Queue[list[ChoiceEvent] | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(_pump(index, choice, ready))
            for index, choice in enumerate(self.choices)
        ]
        try:
            running = len(pumps)
            while running:
                batch: list[ChoiceEvent] = []
                item = await ready.get()
                while True:
                    if item is None:
                        running -= 1
                    else:
                        batch += item
                    if ready.empty():
                        break
                    item = ready.get_nowait()
                if batch:
                    yield batch
        finally:
            self.abort()
            for pump in pumps:
                pump.cancel()


def _outcome(end: Finished | Failed | None) -> str:
    """How a choice ended, in one word; one that nobody waited for was aborted."""
    match end:
        case Finished():
            return end.reason.value
        case Failed():
            return end.error.code or "error"
        case None:
            return "abort"


async def _pump(index: int, choice: Choice, ready: asyncio.Queue[list[ChoiceEvent] | None]) -> None:
    """Moves one choice's batches to the queue that all choices share; None marks its end."""
    try:
        async for events in choice.batches():
            ready.put_nowait([(index, event) for event in events])
    finally:
        ready.put_nowait(None)


def merge(events: list[Event]) -> list[Event]:
    """Joins neighbouring pieces of the same kind; the text that they spell stays the same."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case Text(), Text():
                merged[-1] = Text(last.text + event.text, last.logprobs + event.logprobs)
            case Reasoning(), Reasoning():
                merged[-1] = Reasoning(last.text + event.text)
            case ToolCallArguments(), ToolCallArguments() if last.index == event.index:
                merged[-1] = ToolCallArguments(last.index, last.json + event.json)
            case _:
                merged.append(event)
    return merged
