"""Questions on stdin to the contenders of `cpu.py`, and their answers.

Imports nothing of Quire, since its peer runs it too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """One round of one contender.

    Attributes:
        prompt: tokens of the prompt whose reading is timed; 0 is none.
        streams: how many generate at once, each in turn.
        tokens: that each stream generates, apart from the first.
        threads: that compute; 0 is the contender's own choice.
        blas, kernels, activation_bits: Quire's.
        segments: whether Quire computes steps by segments, or runs the model's code.
        repacks: whether llama.cpp may lay weights out anew (repacked, AMX), as it does by default.
        llama: llama.cpp's `llama-batched-bench`, in a folder that names what it was built for.
    """

    model: str
    prompt: int
    streams: Sequence[int]
    tokens: int
    threads: int = 0
    blas: str = "auto"
    kernels: str = "auto"
    segments: bool = True
    repacks: bool = True
    llama: str = ""
    activation_bits: int = 16


SHORT = 16
"""Tokens of the prompts of streams that generate."""


@dataclass
class Rates:
    """Tokens a second, by the clock and of processor time, by "prompt" or number of streams.

    Attributes:
        computes: the instruction set and the number of threads, as the contender names them.
        parts: seconds of a step by part, by number of streams, where the contender tells.
    """

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0
    computes: str = ""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str, tokens: int) -> Iterator[None]:
        """Times the process's work on so many tokens."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall[what] = tokens / (time.perf_counter() - wall)
        self.cpu[what] = tokens / (time.process_time() - cpu)


def main(measure: Callable[[Work], Rates]) -> None:
    """Reads the work, measures, prints the rates as its last line."""
    raw = json.loads(sys.stdin.read())
    rates = measure(Work(**raw))
    print(json.dumps(vars(rates)))
