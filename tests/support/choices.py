"""What steps chose by scores, experts and keys, for a reference that computes by the same choices.

Where two scores are nearly equal, rounding decides between them, and all that follows differs. A
reference that follows the choices differs by rounding alone, and asserts that each choice is one
that rounding can make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.choice import IndexerTopK
from quire.device.mixture import Router
from quire.executor.graphs.recorder import Kernel
from quire.executor.inputs import StepInputs
from tests.support import emulated_card
from tests.support.precise import PreciseOperations

_ROUNDING = 0.2
"""How far rounding may move a score, in deviations of the row's scores: twice the error that rows
may have, since other scores are off, too."""
_COUNT = re.compile(r"(?:#define TOP|int LIMIT =) (\d+)")
"""How many experts or keys a row has, in the source of a kernel that chooses them."""
_EXPERTS, _KEYS = "chosen[row * TOP + lane] = ", "int* to = chosen + (size_t)row * LIMIT;"
"""Texts in the sources of all kernels that choose experts, and of those that choose keys."""
_WRITTEN = {_EXPERTS: 4, _KEYS: 3}
"""Which argument has the address of the choice."""

Row = tuple[str, int]
"""A request's id and a position."""


@dataclass
class _Step:
    """What one step chose, `[T, k]` of each layer, by the kind of choice.

    Attributes:
        rows: the step's rows.
        wanted: those of them that the last layers compute, if these do not compute all.
        eager: of layers that MLX computed. The check of a graph computes them again behind these.
        graphed: of layers that kernels computed.
    """

    rows: list[Row]
    wanted: list[Row]
    eager: dict[str, list[mx.array]] = field(default_factory=lambda: {_EXPERTS: [], _KEYS: []})
    graphed: dict[str, list[mx.array]] = field(default_factory=lambda: {_EXPERTS: [], _KEYS: []})

    def of(self, count: int) -> Sequence[Row]:
        """Return the rows of a layer that computes so many."""
        return self.rows if count == len(self.rows) else self.wanted

    def by_row(self, kind: str) -> dict[Row, list[set[int]]]:
        """Return what each row's layers chose."""
        found: dict[Row, list[set[int]]] = {row: [] for row in self.rows}
        for chosen in self.eager[kind] or self.graphed[kind]:
            for row, own in zip(self.of(len(chosen)), chosen.tolist(), strict=True):
                seen = row[1] + 1 if kind == _KEYS else len(own)
                found[row].append({n for n in own[:seen] if n >= 0})
        return found


class Choices:
    """What engines choose from now on.

    Attributes:
        turned: number of choices that followers made otherwise than their own scores say.
        impossible: rows and layers whose choices no rounding makes.
        unknown: number of choices of experts that followers made by themselves. Kernels on a card
            are not heard.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turned = self.unknown = 0
        self.impossible: list[tuple[Row, int]] = []
        self._followed: str | None = None
        self._further = 1.0
        self._steps: list[_Step] = []
        self._known: dict[str, dict[Row, list[set[int]]]] = {_EXPERTS: {}, _KEYS: {}}
        self._note_steps(monkeypatch)
        self._note_experts(monkeypatch)
        self._note_keys(monkeypatch)
        self._note_kernels(monkeypatch)

    def follow(self, request: str, further: float = 1) -> None:
        """Let all rows have the choices of this request's row of their position from now on.

        Args:
            further: how many times as far as usual scores may be moved for that.
        """
        for step in self._steps if self._followed is None else ():
            for kind, known in self._known.items():
                known |= step.by_row(kind)
        self._followed, self._further = request, further

    def _rounded(
        self, kind: str, scores: mx.array, choose: Callable[[mx.array], mx.array], rows: list[Row]
    ) -> mx.array:
        """Return scores `[T, n]`, changed by as much as rounding may where rows choose otherwise
        than the rows that they follow.
        """
        layer = len(self._steps[-1].eager[kind])
        known = [self._known[kind][str(self._followed), position] for _, position in rows]
        given = [each[layer] if each else None for each in known]
        self.unknown += sum(each is None for each in given) if kind == _EXPERTS else 0

        def differing(scores: mx.array) -> list[bool]:
            found = [{n for n in each if n >= 0} for each in choose(scores).tolist()]
            pairs = zip(found, given, strict=True)
            return [theirs is not None and own != theirs for own, theirs in pairs]

        if not any(turned := differing(scores)):
            return scores
        size = scores.shape[-1]
        named = mx.array([[n in (each or ()) for n in range(size)] for each in given])
        finite = mx.isfinite(scores)
        mean = mx.where(finite, scores, 0).sum(-1, keepdims=True) / finite.sum(-1, keepdims=True)
        squares = mx.where(finite, (scores - mean).square(), 0).sum(-1, keepdims=True)
        most = self._further * _ROUNDING * mx.sqrt(squares / finite.sum(-1, keepdims=True))
        moved = mx.where(named, most, -most) * mx.array(turned)[:, None]
        self.turned += sum(turned)
        pairs = zip(rows, differing(scores + moved), strict=True)
        self.impossible += [(row, layer) for row, wrong in pairs if wrong]
        return scores + moved

    def _note_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin = StepInputs.__init__

        def begun(inputs: StepInputs, *arguments: Any, **options: Any) -> None:
            begin(inputs, *arguments, **options)
            rows = [
                (each.id, position)
                for each in inputs.sequences
                for position in range(each.start, each.end)
            ]
            self._steps.append(_Step(rows, [rows[n] for n in inputs.wanted_rows or ()]))

        monkeypatch.setattr(StepInputs, "__init__", begun)

    def _note_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        route = PreciseOperations.route

        def routed(
            operations: PreciseOperations,
            logits: mx.array,
            correction: mx.array | None,
            per_expert: mx.array | None,
            router: Router,
        ) -> tuple[mx.array, mx.array]:
            rows = self._steps[-1].of(len(logits)) if self._steps else []
            if self._followed is not None:
                logits = self._rounded(
                    _EXPERTS, logits, lambda scores: router.route(scores, correction)[0], rows
                )
            chosen, weights = route(operations, logits, correction, per_expert, router)
            if self._steps:
                self._steps[-1].eager[_EXPERTS].append(chosen)
            return chosen, weights

        monkeypatch.setattr(PreciseOperations, "route", routed)

    def _note_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choose, score, highest = IndexerTopK.choose, IndexerTopK._in_tiles, IndexerTopK._highest
        first = 0

        def scored(indexer: IndexerTopK, *given: Any, start: int, **options: Any) -> Any:
            nonlocal first
            first = start
            return score(indexer, *given, start=start, **options)

        def best(indexer: IndexerTopK, scores: mx.array) -> mx.array:
            if self._followed is not None:
                rows = self._steps[-1].of(indexer._rows)[first : first + len(scores)]
                scores = self._rounded(_KEYS, scores, partial(highest, indexer), rows)
            return highest(indexer, scores)

        def chosen(*given: Any) -> mx.array:
            found = choose(*given)
            self._steps[-1].eager[_KEYS].append(found)
            return found

        monkeypatch.setattr(IndexerTopK, "_in_tiles", scored)
        monkeypatch.setattr(IndexerTopK, "_highest", best)
        monkeypatch.setattr(IndexerTopK, "choose", chosen)

    def _note_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = emulated_card.launch

        def launched(kernel: Kernel, aligned: int = 16) -> None:
            launch(kernel, aligned)
            for kind in (_EXPERTS, _KEYS) if self._steps else ():
                if kind in str(kernel.source):
                    self._steps[-1].graphed[kind].append(_written(kernel, _WRITTEN[kind]))

        monkeypatch.setattr(emulated_card, "launch", launched)


def _written(kernel: Kernel, argument: int) -> mx.array:
    """Return the choice that a kernel wrote to the address in an argument: `[T, k]`."""
    k = int(_COUNT.findall(str(kernel.source))[0])
    count = c_int32.from_address(kernel.arguments[0]).value
    written = (c_int32 * (count * k)).from_address(kernel.arguments[argument])
    return mx.array(np.array(written).reshape(count, k))
