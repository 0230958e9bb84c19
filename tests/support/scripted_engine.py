"""An engine that says what a test tells it to say, behind the real `EngineClient` interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.info import EngineStats, ModelInfo
from quire.core.messages import ToEngine
from quire.core.request import Failure, FinishReason, Output, Request, Score, TokenLogprobs
from quire.serving.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Script:
    """The scripted answer to a request.

    Attributes:
        tokens: emitted `group` an output; cut at the request's max_tokens and at its stop tokens,
            as an engine does, and followed by a stop token.
        delay_s: before each output.
        held: before it is set, no more is emitted than `held_at` outputs.
        error: ends the request after the tokens.
        silent: never ends after the tokens, until it is aborted.
        vector: the result of an embedding or a score; None makes one.
        logprob: the logarithm of each token's probability.
        reads: prompt tokens that are read after each step before the first token.
    """

    tokens: tuple[int, ...] = ()
    delay_s: float = 0.0
    held: threading.Event | None = None
    held_at: int = 0
    group: int = 1
    error: Failure | None = None
    silent: bool = False
    cached_tokens: int = 0
    reuse: str | None = "new"
    vector: tuple[float, ...] | None = None
    logprob: float = -0.5
    reads: tuple[int, ...] = ()
    queued_s: float = 0.0


class ScriptedTicket(Ticket):
    """A ticket that remembers why it was aborted, if it was."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, self._note)
        self.aborted: FinishReason | None = None
        self.over = False
        """The last output is on its way, or there is none."""

    def _note(self, request_id: str, reason: FinishReason) -> None:
        if not self.over:
            self.aborted = self.aborted or reason


class ScriptedEngine:
    """An `EngineClient`; `script` says what each request gets."""

    def __init__(self, info: ModelInfo, script: Callable[[Request], Script]) -> None:
        self.info = info
        self.reset(script)
        self._tasks: set[asyncio.Task[None]] = set()

    def reset(self, script: Callable[[Request], Script]) -> None:
        """Forgets what was asked so far; from now on, requests get this script."""
        self.script = script
        self.failure: str | None = None
        self.requests: list[Request] = []
        self.questions: list[ToEngine] = []
        self.tickets: list[ScriptedTicket] = []

    def submit(self, requests: Sequence[Request]) -> list[ScriptedTicket]:
        return [self._submit(request) for request in requests]

    def _submit(self, request: Request) -> ScriptedTicket:
        ticket = ScriptedTicket(request.id)
        self.requests.append(request)
        self.tickets.append(ticket)
        task = asyncio.create_task(self._play(request, ticket, self.script(request)))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._played(task, ticket))
        return ticket

    def _played(self, task: asyncio.Task[None], ticket: ScriptedTicket) -> None:
        """Ends the request of a script that raised: else its client and the server's stop wait."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            ticket.over = True
            ticket.fail(Failure(f"the script raised {error!r}"))

    async def _play(self, request: Request, ticket: ScriptedTicket, script: Script) -> None:
        def output(tokens: Sequence[int] = (), **more: object) -> Output:
            return Output(
                request.id,
                tuple(tokens),
                logprobs=_logprobs(request, tokens, script.logprob),
                prompt_tokens=len(request.prompt),
                cached_tokens=script.cached_tokens,
                reuse=script.reuse,
                queued_s=script.queued_s,
                **more,  # type: ignore[arg-type]
            )

        async def hold(number: int) -> None:
            while script.held is not None and number == script.held_at and not script.held.is_set():
                await asyncio.sleep(0.002)

        if script.error is None:
            ticket.put(Output(request.id, prompt_tokens=len(request.prompt), read=0))
        if not request.task.samples:
            ticket.over = True
            vector = script.vector or _vector(request)
            ticket.put(output(finish=FinishReason.STOP, vector=vector))
            return
        await hold(0)
        for read in script.reads:
            await asyncio.sleep(script.delay_s)
            ticket.put(output(read=read))
        tokens, finish = script.tokens, None
        if not script.silent and script.error is None:
            tokens, finish = _cut(request, tokens)
        groups = [tokens[i : i + script.group] for i in range(0, len(tokens), script.group)]
        for number, group in enumerate(groups):
            await hold(number)
            await asyncio.sleep(script.delay_s)
            if ticket.aborted:
                break
            ticket.over = number == len(groups) - 1 and finish is not None
            ticket.put(output(group, finish=finish if ticket.over else None))
        while script.silent and not ticket.aborted:
            await asyncio.sleep(0.002)
        if ticket.aborted and not ticket.over:
            ticket.put(output(finish=ticket.aborted))
        elif script.error is not None:
            ticket.put(output(finish=FinishReason.ERROR, error=script.error))
        ticket.over = True

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        self.questions.append(question(0))
        return ""

    async def stats(self) -> EngineStats:
        return EngineStats(
            steps=7,
            kv_budget=1 << 20,
            kv_used=(("full/plain", 4096),),
            memory=(("free", 3_000_000_000),),
            reuse_misses=(("evicted", 2),),
            disk=(("bytes", 8192), ("hits", 3)),
            drafts=(("ngram", 40), ("mtp", 10)),
            accepted_drafts=(("ngram", 30),),
            running=sum(not ticket.over for ticket in self.tickets),
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _vector(request: Request) -> tuple[float, ...]:
    """Return a result of the length that the request's task has."""
    labels = request.task.labels if isinstance(request.task, Score) else range(8)
    return tuple(-1.0 - number for number, _ in enumerate(labels))


def _cut(request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason]:
    """Return the tokens up to the first that ends the answer; one is added if the script has
    none.
    """
    if len(tokens) < request.max_tokens and request.stop_token_ids:
        tokens = (*tokens, min(request.stop_token_ids))
    for index, token in enumerate(tokens[: request.max_tokens]):
        if token in request.stop_token_ids:
            return tokens[: index + 1], FinishReason.STOP
    return tokens[: request.max_tokens], FinishReason.LENGTH


def _logprobs(request: Request, tokens: Sequence[int], first: float) -> tuple[TokenLogprobs, ...]:
    count = request.sampling.logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprobs(token, first, tuple((token + k, first - k) for k in range(count)))
        for token in tokens
    )
