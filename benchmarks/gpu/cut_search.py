"""Searches the cuts of all products of a step of a few rows: `cut_search.py SHAPE OUT [--rows N]`.

A cut that is fastest alone may not be so in the step, where thread blocks of neighbouring kernels
share multiprocessors. So each product's cuts are tried in turn, by the time of the whole graph in
turns with the best one so far, until no other cut is faster or the time is over. Kernels are
compiled meanwhile. OUT is written after each product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from lone_step import LoneStep, Part, by_kind, microseconds
from shapes import SHAPES

from quire.device.cuda import skinny_gemm
from quire.device.cuda.driver import Graph
from quire.device.cuda.skinny_gemm import Cut, SkinnyGemm
from quire.device.cuda.timing import graph_microseconds
from quire.executor.graphs import device_memory
from quire.executor.graphs.recorder import Buffer, Kernel, Recorder

SLOT, SLOTS = 2 << 20, 1000
"""Bytes of each buffer of a recording for each row, two rows at least, and the most buffers."""
MOST_CUTS = 72
ROUNDS, LAUNCHES, LEAST_ROUNDS = 9, 5, 3
GIVEN_UP, FASTER = 1.002, 0.9988
"""Ratios of times: a cut is given up after a few rounds, or is better than the best one."""
State = Mapping[str, Cut]


class SearchedStep(LoneStep):
    """A step whose recordings all have the same buffers, so that their kernels make one step."""

    _memory: mx.array | None = None

    def recorded(self) -> list[Part]:
        slot = SLOT * max(2, self.rows)
        if self._memory is None:
            self._memory = device_memory.unwritten((SLOTS * slot // 16, 4), mx.uint32)
        base, used = self.cache._extension.pointer(self._memory), iter(range(SLOTS))

        def buffer(_: Recorder, bytes: int, reads: Iterable[Buffer] = ()) -> Buffer:
            assert bytes <= slot, bytes
            return Buffer(base + next(used) * slot, slot)

        with patch.object(Recorder, "buffer", buffer):
            return super().recorded()


def candidates(gemm: SkinnyGemm) -> Iterator[Cut]:
    """Yield cuts whose warps all have as many chunks, and some usual ones."""
    groups, usual = gemm.inputs // 64, (1, 2, 4) if gemm.experts and gemm.rows > 1 else (1, 2)
    for chunk in (4, 2, 1):
        chunks = -(-groups // chunk)
        for rounds in (1, 2, 3, 4):
            warps = -(-chunks // rounds)
            if 2 <= warps <= 16:
                for stages in {min(rounds, 3), min(rounds, 2)}:
                    yield from (Cut(parts, warps, chunk, stages) for parts in usual)
    for warps, chunk in ((8, 4), (8, 2), (4, 4), (16, 4), (16, 2), (14, 4)):
        for stages in (2, 3):
            yield from (Cut(parts, warps, chunk, stages) for parts in usual)


class Search:
    """Finds the fastest cuts of a step.

    Attributes:
        best: cuts other than the step's own, by kind of product.
    """

    def __init__(self, step: SearchedStep, seconds: float) -> None:
        self._step = step
        self._end = time.monotonic() + seconds
        self._kernels = [part.kernel for part in step.parts]
        kinds = by_kind(step.parts)
        self._numbers = {kind: own for kind, own in kinds.items() if ": skinny" in kind}
        self._cuts = self._recorded_cuts()
        self.best: dict[str, Cut] = {}
        self._graph = self._own = step.graph(self._kernels)
        self.tried: list[tuple[str, Cut | None, float]] = []
        sources = [each.source for kind in self.kinds() for each in self._cuts[kind].values()]
        step.cache._compiler.start(list(dict.fromkeys(sources)))

    def _recorded_cuts(self) -> dict[str, dict[Cut, Kernel]]:
        """Record the step with each candidate of each product; return kernels by kind and cut."""
        usual, found = skinny_gemm._chosen, dict[str, dict[Cut, Kernel]]()
        cuts: dict[SkinnyGemm, list[Cut]] = {}
        for number in range(MOST_CUTS):

            def chosen(gemm: SkinnyGemm, number: int = number) -> tuple[int, Cut]:
                tiles, own = usual(gemm)
                if gemm not in cuts:
                    fitting = dict.fromkeys(candidates(gemm))
                    room = gemm.card.shared
                    cuts[gemm] = [c for c in fitting if gemm.shared_of(tiles, c) <= room]
                return tiles, cuts[gemm][number] if number < len(cuts[gemm]) else own

            with patch.object(skinny_gemm, "_chosen", chosen):
                parts = self._step.recorded()
            recorded = {self._weights_of(part.kernel): part.kernel for part in parts}
            for kind, numbers in self._numbers.items():
                own = self._kernels[numbers[0]]
                kernel = recorded.get(self._weights_of(own))
                if kernel is None or kernel.source == own.source:
                    continue
                if len(kernel.arguments) == len(own.arguments):  # else it computes less, or more
                    found.setdefault(kind, {})[_cut_of(kernel)] = kernel
        return found

    def _weights_of(self, kernel: Kernel) -> tuple[int, ...]:
        """Return the addresses of a kernel's weights, by which it is found in other recordings:
        with some cuts a product and what follows it are two kernels.
        """
        return tuple(each for each in kernel.arguments if each in self._step.weights)

    def _made(self, state: State) -> Graph:
        kernels = list(self._kernels)
        for kind, cut in state.items():
            other = self._cuts[kind][cut]
            launch = {"grid": other.grid, "block": other.block, "shared": other.shared}
            for n in self._numbers[kind]:
                kernels[n] = replace(kernels[n], source=other.source, **launch)
        return self._step.graph(kernels)

    def _ratio(self, best: Graph, other: Graph, rounds: int = ROUNDS) -> float:
        """Return the other's time over that of the best, each launched in turns."""
        ratios = list[float]()
        for number in range(rounds):
            pair = (best, other) if number % 2 else (other, best)
            took = {id(each): graph_microseconds(each, LAUNCHES) for each in pair}
            ratios.append(took[id(other)] / took[id(best)])
            if number >= LEAST_ROUNDS - 1 and statistics.median(ratios) > GIVEN_UP:
                break
        return statistics.median(ratios)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def improve(self, kind: str) -> bool:
        """Try all cuts of a product; return whether one of them is better than the best."""
        better = False
        for cut in (None, *self._cuts.get(kind, {})):
            if self.is_over or cut == self.best.get(kind):
                continue
            state = {each: own for each, own in self.best.items() if each != kind}
            if cut is not None:
                state[kind] = cut
            graph = self._made(state)
            ratio = self._ratio(self._graph, graph)
            self.tried.append((kind, cut, round(ratio, 4)))
            if ratio < FASTER and self._ratio(self._graph, graph) < FASTER:
                self.best, self._graph, better = state, graph, True
        return better

    def kinds(self) -> list[str]:
        """Return the products' kinds, those of most bytes first."""
        parts = self._step.parts
        return sorted(
            self._cuts, key=lambda kind: -sum(parts[n].bytes for n in self._numbers[kind])
        )

    def result(self) -> dict[str, Any]:
        ratio = self._ratio(self._own, self._graph, rounds=3 * ROUNDS)
        return {
            "us": [microseconds(each) for each in (self._own, self._graph)],
            "best over its own": round(ratio, 4),
            "own": {kind: _cut_of(self._kernels[own[0]]) for kind, own in self._numbers.items()},
            "best": self.best,
            "tried": self.tried,
        }


def _cut_of(kernel: Kernel) -> Cut:
    """Return the cut that a product's source has."""
    lines = (line.split() for line in str(kernel.source).splitlines())
    words = {line[1]: line[2] for line in lines if len(line) == 3 and line[0] == "#define"}
    return Cut(*(int(words[name]) for name in ("PARTS", "WARPS", "CHUNK", "STAGES")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="a power of two")
    parser.add_argument("--folder", type=Path, help="of the model, which is written if absent")
    parser.add_argument("--seconds", type=float, default=90, help="of the search")
    asked = parser.parse_args()
    step = SearchedStep.of_shape(asked.shape, asked.folder, asked.rows)
    search = Search(step, asked.seconds)
    better = True
    while better and not search.is_over:
        better = False
        for kind in search.kinds():
            better |= search.improve(kind)
            found = {"shape": asked.shape, "rows": asked.rows, **search.result()}
            asked.out.write_text(json.dumps(found, indent=1))
            print(kind, search.best.get(kind, "its own"), found["us"], flush=True)


if __name__ == "__main__":
    main()
