"""Requests to all systems: pure Python, so that an interpreter without Quire can send them too."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

LONG = 20_000
STREAMS = (1, 8, 32)


def drawn(count: int, seed: int) -> tuple[int, ...]:
    """Return a prompt of random tokens."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(10, 100_000) for _ in range(count))


def bursts(
    rounds: int = 3, widths: Sequence[int] = STREAMS
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield names of rounds, and the prompts that are asked at once: 128 tokens each, none of them
    twice, so that no prefix cache knows them.
    """
    for number, again in enumerate(("first", "second", "third")[:rounds]):
        for streams in widths:
            seed = 10_000 * streams + 100 * number
            yield f"{streams} streams, {again}", [drawn(128, seed + n) for n in range(streams)]


def widths_asked(what: list[str]) -> tuple[int, ...]:
    """Return streams at once: those of `widths-1,32,256` if it is among the options."""
    named = [part.removeprefix("widths-") for part in what if part.startswith("widths-")]
    return tuple(map(int, named[0].split(","))) if named else STREAMS


def tokens_asked(what: list[str]) -> int:
    """Return the number of tokens of each answer: N where `tokens-N` is among the options."""
    return _number(what, "tokens-", 60)


def kv_gigabytes(what: list[str]) -> int:
    """Return the KV cache's size: N where `kv-N` is among the options."""
    return _number(what, "kv-", 40)


def _number(what: list[str], name: str, otherwise: int) -> int:
    named = [part.removeprefix(name) for part in what if part.startswith(name)]
    return int(named[0]) if named else otherwise
