"""Parts that the runs without HTTP share: questions on stdin, and answers.

Imports nothing of Quire, since the peers' environment runs it too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The load that `peers.py` gives to an engine alone: the same as over HTTP.

    Attributes:
        model: a folder.
        warm_up: prompts before the first level, all at once; no level has any of them.
        levels: (streams at once, token ids of each prompt).
        stop_ids: tokens that end an answer.
    """

    model: str
    warm_up: tuple[tuple[int, ...], ...]
    levels: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
    max_tokens: int
    stop_ids: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Work:
        """Read what `json.dumps(dataclasses.asdict(work))` wrote."""
        raw = json.loads(text)
        levels = tuple(
            (streams, tuple(tuple(prompt) for prompt in prompts))
            for streams, prompts in raw["levels"]
        )
        warm_up = tuple(tuple(prompt) for prompt in raw["warm_up"])
        return cls(raw["model"], warm_up, levels, raw["max_tokens"], tuple(raw["stop_ids"]))


def main(measure: Callable[[Work], dict[int, float]]) -> None:
    """Reads the work, measures, prints `{"streams": tokens per second, ...}` as its last line."""
    rates = measure(Work.read(sys.stdin.read()))
    print(json.dumps({str(streams): round(rate, 2) for streams, rate in rates.items()}))
