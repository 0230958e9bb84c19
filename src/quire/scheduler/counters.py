"""Totals that the scheduler counts, for statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quire.scheduler.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    reuse_misses: Counter[str] = field(default_factory=Counter)

    def add_start(self, sequence: Sequence) -> None:
        """Count a sequence that runs for the first time."""
        self.prompt_tokens += sequence.progress.prompt_length
        self.cached_tokens += sequence.prefix.cached
        if (miss := sequence.prefix.miss) is not None:
            self.reuse_misses[miss.kind.value] += 1
