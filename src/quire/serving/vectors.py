"""Tasks whose result is a vector, such as embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.ids import new_id
from quire.core.request import (
    Embed,
    Failure,
    FinishReason,
    PoolingKind,
    Request,
    ScoredToken,
    ScorePrompt,
    Task,
)
from quire.serving.generation import Prepared
from quire.serving.interface import EngineClient
from quire.serving.pooling import Pooling
from quire.serving.run_failed import RunFailed
from quire.serving.ticket import Ticket

_NOT_FINITE = Failure(
    "The model computed numbers that are infinite or not a number: its activations overflow. Serve "
    "it in a wider type (--dtype bfloat16 or float32).",
    500,
    "server_error",
    code="not_finite",
)


@dataclass(frozen=True, slots=True)
class Vector:
    """The result of one prompt.

    Attributes:
        values: the vector.
        prompt_tokens, cached_tokens: tokens of its prompt, and those of them from the prefix cache.
    """

    values: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


class Vectors:
    """Computes vectors of prepared prompts.

    Attributes:
        pooling: how the model embeds.
    """

    def __init__(
        self,
        client: EngineClient,
        pooling: Pooling,
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.pooling = pooling
        self._client = client
        self._deadline_s = deadline_s

    async def compute(self, prepared: Prepared, task: Task) -> list[Vector]:
        """Return the result of `task` for each prompt, in order.

        Raises:
            RunFailed: the engine refused one, or failed.
            EngineFailure: the engine cannot continue.
        """
        return await self._run(prepared, [task] * len(prepared.prompts))

    async def score_prompts(self, prepared: Prepared, top: int) -> list[tuple[ScoredToken, ...]]:
        """Return each prompt's log-probabilities of its tokens after the first.

        Args:
            top: number of likeliest tokens to report for each position.

        Raises:
            RunFailed, EngineFailure: as `compute`.
        """
        longer = tuple(each for each in prepared.prompts if len(each.tokens) > 1)
        tasks = [ScorePrompt(prompt.tokens[1:], top) for prompt in longer]
        found = iter(await self._run(replace(prepared, prompts=longer), tasks))
        scored = iter([task.read(next(found).values) for task in tasks])
        return [next(scored) if len(each.tokens) > 1 else () for each in prepared.prompts]

    async def _run(self, prepared: Prepared, tasks: Sequence[Task]) -> list[Vector]:
        requests = [
            Request(
                id=new_id(),
                prompt=prompt.tokens,
                token_types=prompt.token_types,
                media=prompt.media,
                max_tokens=1,
                kv_format=prepared.spec.kv_format,
                adapter=prepared.spec.adapter,
                caller=prepared.spec.caller,
                share=prepared.spec.share,
                priority=prepared.spec.priority or 0,
                cache_salt=prepared.spec.cache_salt,
                deadline_s=self._deadline_s,
                task=task,
            )
            for prompt, task in zip(prepared.prompts, tasks, strict=True)
        ]
        tickets = self._client.submit(requests)
        try:
            return [await _result(ticket) for ticket in tickets]
        finally:
            for ticket in tickets:
                ticket.abort()


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    lengths = math.sqrt(math.fsum(a * a for a in one)) * math.sqrt(math.fsum(b * b for b in other))
    return dot / lengths if lengths else 0.0


def shortened(values: Sequence[float], dimensions: int | None, *, normalized: bool) -> list[float]:
    """Return the first `dimensions` numbers of a vector, scaled to length one if `normalized`.

    Models trained for it (Matryoshka representations, arXiv:2205.13147) keep most of the meaning
    in the first numbers.
    """
    kept = list(values[:dimensions])
    if dimensions is None or not normalized:
        return kept
    length = math.sqrt(math.fsum(value * value for value in kept))
    return [value / length for value in kept] if length else kept


def embed_task(pooling: Pooling, kind: PoolingKind | None, *, normalized: bool | None) -> Embed:
    """Return the model's pooling task, changed by what the request says.

    Raises:
        NotOffered: the request names no pooling, and the model's own cannot be computed.
    """
    if kind is None:
        pooling.check()
    task = pooling.task
    if kind is not None:
        task = replace(task, pooling=kind)
    return task if normalized is None else replace(task, normalized=normalized)


async def _result(ticket: Ticket) -> Vector:
    async for output in ticket:
        if output.finish is None:
            continue
        if output.finish is FinishReason.ERROR or output.vector is None:
            ended = Failure(f"The engine ended the request: {output.finish.value}.")
            raise RunFailed(output.error or ended)
        if not all(map(math.isfinite, output.vector)):
            raise RunFailed(_NOT_FINITE)
        return Vector(output.vector, output.prompt_tokens, output.cached_tokens)
    raise RunFailed(Failure("The engine ended the request without a reason."))
