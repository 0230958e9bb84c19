"""Ranks of a split model in one thread of one process: each runs until it needs the others' arrays.

MLX's arrays belong to the thread that made them, so ranks are greenlets, not threads. All but the
transport is what several processes run: the leading executor, followers, plans, collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from typing import Any

import mlx.core as mx
from greenlet import getcurrent, greenlet

from quire.core.config import EngineConfig
from quire.device.ranks import Part, use_collectives
from quire.engine.ranks import Call, LeadingExecutor, SplitExecutor
from quire.models.weights.loader import LoadedModel, open_model


class Lockstep:
    """The ranks of a model of a folder. Like `Followers` it makes the leading executor.

    Args:
        pipeline: see `open_model`.
        options: further arguments of `open_model`.
    """

    def __init__(
        self, folder: str, size: int, pipeline: tuple[int, ...] = (), **options: Any
    ) -> None:
        self._models = [
            open_model(folder, part=Part(rank, size), pipeline=pipeline, **options)
            for rank in range(size)
        ]
        self.loaded, self.part = self._models[0], Part(0, size)
        self._calls: list[deque[Call]] = []
        self._ranks: list[greenlet] = []
        self._given: list[list[mx.array]] = []

    # -- as `Followers` --------------------------------------------------------------------------

    work_seconds: tuple[float, ...] = ()

    def tell(self, method: str, *arguments: Any) -> None:
        for calls in self._calls[1:]:
            calls.append(Call(method, arguments))

    def release_blocks(self) -> None:
        """There is no disk tier."""

    def open_executor(
        self, loaded: LoadedModel, config: EngineConfig, **parts: Any
    ) -> LeadingExecutor:
        """Return a new leading executor, and have new followers wait for its calls."""
        size = len(self._models)
        self._calls = [deque() for _ in range(size)]
        self._given = [[] for _ in range(size)]
        self._ranks = [getcurrent(), *(greenlet(self._follow) for _ in range(1, size))]
        use_collectives(self)
        for rank in range(1, size):
            self._ranks[rank].switch(rank, config)
        return LeadingExecutor(self, loaded, config, **parts)  # type: ignore[arg-type]

    # -- as `Collectives` ------------------------------------------------------------------------

    def summed(self, x: mx.array) -> mx.array:
        return self._exchanged(x, lambda arrays: reduce(mx.add, arrays))

    def gathered(self, x: mx.array) -> mx.array:
        return self._exchanged(x, mx.concatenate)

    def meet(self) -> None:
        """Return when all ranks have called it as often as this one."""
        self._exchanged(mx.array(0), lambda arrays: arrays[0])

    def _exchanged(self, x: mx.array, combine: Callable[[list[mx.array]], mx.array]) -> mx.array:
        rank = self._ranks.index(getcurrent())
        number = len(self._given[rank])
        given = x + 0  # a copy: this rank may write to the memory of `x` before others read it
        mx.eval(given)
        self._given[rank].append(given)
        if rank:
            self._ranks[0].switch()  # the leading rank goes on when it has the others' arrays
        else:
            for other, calls in zip(self._ranks[1:], self._given[1:], strict=True):
                while len(calls) <= number:
                    other.switch()
        return combine([given[number] for given in self._given])

    def _follow(self, rank: int, config: EngineConfig) -> None:
        executor = SplitExecutor(self._models[rank], config, Part(rank, len(self._models)))
        self._ranks[0].switch()
        while True:
            assert self._calls[rank], "the leading rank waits for a call that it has not sent"
            self._calls[rank].popleft().of(executor)
