"""What steps chose by scores, experts and keys, for a reference that computes by the same choices.

Where two scores are nearly equal, rounding decides between them, and all that follows differs. A
reference that takes over the scores of the step, where its own would choose otherwise, differs by
rounding alone. It asserts that these scores are its own but for rounding, and that the step's
choice follows from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from ctypes import c_int32, string_at
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from quire.attention.choice import IndexerTopK
from quire.core.arrays import Ints
from quire.device.mixture import Router
from quire.executor.graphs.recorder import Kernel
from quire.executor.graphs.source import C_TYPES
from quire.executor.inputs import StepInputs
from tests.support import emulated_card
from tests.support.precise import PreciseOperations

_ROUNDING = 0.2
"""The largest relative error of a row's scores by rounding, beside their deviation: twice that of
logits, which all layers make."""
_TIE = 1e-5
"""Scores that differ by less, in deviations, count as equal: either may be chosen."""
_COUNT = re.compile(r"(?:#define TOP|int LIMIT =) (\d+)")
"""How many experts or keys a row has, in the source of a kernel that chooses them."""
_SCORES = re.compile(r"(?:#define EXPERT_COUNT|int CAPACITY =) (\d+)")
"""How many scores a row has, in the same source."""
_HALVES = (mx.bfloat16, mx.float16)
_EXPERTS, _KEYS = "chosen[row * TOP + lane] = ", "int* to = chosen + (size_t)row * LIMIT;"
"""Texts in the sources of all kernels that choose experts, and of those that choose keys."""
_READ = 1
"""Which argument has the address of the scores."""
_WRITTEN = {_EXPERTS: 4, _KEYS: 3}
"""Which argument has the address of the choice."""

Scores = npt.NDArray[np.float32]
Row = tuple[str, int]
"""A request's id and a position."""


class _Choice(NamedTuple):
    """The experts or keys that one row of a layer chose, and the scores of all that it could."""

    chosen: set[int]
    scores: Scores


class _Layer(NamedTuple):
    """What the rows of one layer chose, `[T, k]`, and by which scores, `[n]` each. None for rows of
    sequences none of which has to choose."""

    chosen: mx.array
    scores: Sequence[Scores | None]


@dataclass
class _Step:
    """What one step chose in each layer, by the kind of choice.

    Attributes:
        rows: the step's rows.
        wanted: those of them that the last layers compute, if these do not compute all.
        eager: of layers that MLX computed. The check of a graph computes them again behind these.
        graphed: of layers that kernels computed.
    """

    rows: list[Row]
    wanted: list[Row]
    eager: dict[str, list[_Layer]] = field(default_factory=lambda: {_EXPERTS: [], _KEYS: []})
    graphed: dict[str, list[_Layer]] = field(default_factory=lambda: {_EXPERTS: [], _KEYS: []})

    def of(self, count: int) -> Sequence[Row]:
        """Return the rows of a layer that computes so many."""
        return self.rows if count == len(self.rows) else self.wanted

    def by_row(self, kind: str) -> dict[Row, list[_Choice | None]]:
        """Return what each row's layers chose."""
        found: dict[Row, list[_Choice | None]] = {row: [] for row in self.rows}
        for chosen, scores in self.eager[kind] or self.graphed[kind]:
            rows = self.of(len(chosen))
            for row, own, by in zip(rows, np.array(chosen), scores, strict=True):
                seen = row[1] + 1 if kind == _KEYS else None
                named = None if by is None else _Choice(_named(own[:seen]), by[:seen])
                found[row].append(named)
        return found


class Choices:
    """What engines choose from now on.

    Attributes:
        turned: number of choices that followers made otherwise than their own scores say.
        impossible: rows and layers whose choices no rounding makes, with the relative error of
            their scores.
        unknown: number of choices of experts that followers made by themselves. Kernels on a card
            are not heard.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turned = self.unknown = 0
        self.impossible: list[tuple[Row, int, float]] = []
        self._followed: str | None = None
        self._further = 1.0
        self._steps: list[_Step] = []
        self._known: dict[str, dict[Row, list[_Choice | None]]] = {_EXPERTS: {}, _KEYS: {}}
        self._note_steps(monkeypatch)
        self._note_experts(monkeypatch)
        self._note_keys(monkeypatch)
        self._note_kernels(monkeypatch)

    def follow(self, request: str, further: float = 1) -> None:
        """Let all rows have the choices of this request's row of their position from now on.

        Args:
            further: how many times as far as usual scores may be off.
        """
        for step in self._steps if self._followed is None else ():
            for kind, known in self._known.items():
                known |= step.by_row(kind)
        self._followed, self._further = request, further

    def _followed_scores(
        self, kind: str, scores: mx.array, choose: Callable[[mx.array], mx.array], rows: list[Row]
    ) -> mx.array:
        """Return scores `[T, n]`. Rows that choose otherwise than the rows that they follow have
        the scores of these.
        """
        layer = len(self._steps[-1].eager[kind])
        known = [self._known[kind][str(self._followed), position] for _, position in rows]
        # The last layers may compute only the rows that are wanted.
        given = [each[layer] if layer < len(each) else None for each in known]
        self.unknown += sum(not each for each in known) if kind == _EXPERTS else 0
        own, found = np.array(scores.astype(mx.float32)), np.array(choose(scores))
        turned = [
            number
            for number, (theirs, chosen) in enumerate(zip(given, found, strict=True))
            if theirs is not None and _named(chosen) != theirs.chosen
        ]
        for number in turned:
            theirs = given[number]
            assert theirs is not None
            count = len(theirs.scores)
            error = _deviation(own[number, :count], theirs.scores)
            own[number, :count] = theirs.scores
            own[number] = _tipped(own[number], theirs.chosen)
            again = np.array(choose(mx.array(own[number : number + 1])))[0]
            follows = _named(again) == theirs.chosen
            if not (follows and error <= self._further * _ROUNDING):  # NaN is no rounding
                self.impossible.append((rows[number], layer, error))
        self.turned += len(turned)
        return mx.array(own).astype(scores.dtype) if turned else scores

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
                logits = self._followed_scores(
                    _EXPERTS, logits, lambda scores: router.route(scores, correction)[0], rows
                )
            chosen, weights = route(operations, logits, correction, per_expert, router)
            if self._steps:
                scores = list(np.array(logits.astype(mx.float32)))
                self._steps[-1].eager[_EXPERTS].append(_Layer(chosen, scores))
            return chosen, weights

        monkeypatch.setattr(PreciseOperations, "route", routed)

    def _note_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choose, score, highest = IndexerTopK.choose, IndexerTopK._in_tiles, IndexerTopK._highest
        first = 0
        scored = dict[int, Scores]()

        def in_tiles(indexer: IndexerTopK, *given: Any, start: int, **options: Any) -> Any:
            nonlocal first
            first = start
            return score(indexer, *given, start=start, **options)

        def best(indexer: IndexerTopK, scores: mx.array) -> mx.array:
            nonlocal first
            if self._followed is not None:
                rows = self._steps[-1].of(indexer._rows)[first : first + len(scores)]
                scores = self._followed_scores(_KEYS, scores, partial(highest, indexer), rows)
            scored.update(enumerate(np.array(scores), first))
            first += len(scores)
            return highest(indexer, scores)

        def chosen(*given: Any) -> mx.array:
            scored.clear()
            found = choose(*given)
            layer = _Layer(found, [scored.get(row) for row in range(len(found))])
            self._steps[-1].eager[_KEYS].append(layer)
            return found

        monkeypatch.setattr(IndexerTopK, "_in_tiles", in_tiles)
        monkeypatch.setattr(IndexerTopK, "_highest", best)
        monkeypatch.setattr(IndexerTopK, "choose", chosen)

    def _note_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = emulated_card.launch

        def launched(kernel: Kernel, aligned: int = 16) -> None:
            launch(kernel, aligned)
            for kind in (_EXPERTS, _KEYS) if self._steps else ():
                if kind in str(kernel.source):
                    self._steps[-1].graphed[kind].append(_of_kernel(kernel, kind))

        monkeypatch.setattr(emulated_card, "launch", launched)


def _of_kernel(kernel: Kernel, kind: str) -> _Layer:
    """Return a choice as it stands in the memory of the kernel that made it."""
    source = str(kernel.source)
    rows = c_int32.from_address(kernel.arguments[0]).value
    (chosen, *_), (candidates, *_) = _COUNT.findall(source), _SCORES.findall(source)
    written = _read(kernel.arguments[_WRITTEN[kind]], "int32", (rows, int(chosen)))
    half = next((each for each in _HALVES if f"const {C_TYPES[each]}* logits" in source), None)
    scores = _read(
        kernel.arguments[_READ], "uint16" if half else "float32", (rows, int(candidates))
    )
    wide = mx.array(scores).view(half).astype(mx.float32) if half else scores
    return _Layer(mx.array(written), list(np.array(wide)))


def _read(address: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a copy of the numbers at an address."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    return np.frombuffer(string_at(address, size), dtype).reshape(shape)


def _named(chosen: Ints) -> set[int]:
    return {int(n) for n in chosen if n >= 0}


def _deviation(scores: Scores, others: Scores) -> float:
    """Return the relative error of scores beside others, but for what all have in common."""
    own, theirs = (each - each.mean() for each in (scores, others))
    return float(np.linalg.norm(theirs - own) / np.linalg.norm(own))


def _tipped(scores: Scores, chosen: set[int]) -> Scores:
    """Return scores, of which equal ones rank in favour of a choice."""
    by = _TIE * scores[np.isfinite(scores)].std()
    return scores + np.array([by if n in chosen else -by for n in range(len(scores))], np.float32)
