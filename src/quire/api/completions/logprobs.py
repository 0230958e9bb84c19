"""Log-probabilities of completions: how they are written, and how `best_of` ranks choices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from quire.api.shared.pieces import Array, compact
from quire.api.shared.render import Logprobs, TokenNames, clamp, token_text
from quire.core.request import ScoredToken, TokenLogprobs
from quire.text.detokenizer import Detokenizer

_PORTION = 64
"""Tokens of a prompt that are written in one turn of the event loop."""

Lists = dict[str, list[object]]
"""OpenAI's parallel lists by name: tokens, their log-probabilities, top lists, text offsets."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a prompt: its first token, and the log-probabilities of the others."""

    first: int
    scores: tuple[ScoredToken, ...]

    def by_token(self, names: TokenNames) -> Array:
        """Return vLLM's `prompt_logprobs`, by token id; the prompt's own token is included."""
        return Array(chain((None,), (_by_token(each, names) for each in self.scores)))


def _by_token(scored: ScoredToken, names: TokenNames) -> dict[str, object]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(scored.top, 1)]
    return {
        str(token): {
            "logprob": clamp(value),
            "rank": rank,
            "decoded_token": token_text(names, token),
        }
        for token, value, rank in [(scored.token_id, scored.logprob, scored.rank), *ranked]
    }


class LogprobsWriter:
    """Writes one choice's `logprobs`. Text offsets continue through a stream's chunks.

    Args:
        names: names tokens.
        text: decodes the choice's text, from the echoed prompt on. A token's offset is the length
            of the text that was complete before it.
    """

    def __init__(self, names: TokenNames, text: Detokenizer) -> None:
        self._names = names
        self._text = text
        self._offset = 0

    def prompt(self, prompt: PromptScores) -> Iterator[Lists]:
        """Yield the lists of an echoed prompt in portions, so that a long one is not written in one
        turn of the event loop. Its first token has no log-probability.
        """
        unknown: Lists = {"token_logprobs": [None], "top_logprobs": [None]}
        name, offset = token_text(self._names, prompt.first), self._next_offset(prompt.first)
        yield {"tokens": [name], **unknown, "text_offset": [offset]}
        for start in range(0, len(prompt.scores), _PORTION):
            yield self.write(prompt.scores[start : start + _PORTION])

    def write(self, entries: Sequence[TokenLogprobs]) -> Lists:
        """Return OpenAI's four parallel lists for the next tokens. Top lists include the sampled
        token.
        """
        return {
            "tokens": [token_text(self._names, entry.token_id) for entry in entries],
            "token_logprobs": [clamp(entry.logprob) for entry in entries],
            "top_logprobs": [
                {
                    token_text(self._names, token): clamp(value)
                    for token, value in (*entry.top, (entry.token_id, entry.logprob))
                }
                for entry in entries
            ],
            "text_offset": [self._next_offset(entry.token_id) for entry in entries],
        }

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._text.add(token_id))
        return offset


class CompletionLogprobs:
    """Collects the `logprobs` of a choice that is not streamed."""

    def __init__(self, writer: LogprobsWriter) -> None:
        self._writer = writer
        self._written: dict[str, list[bytes]] = {name: [] for name in self._writer.write(())}

    async def add_prompt(self, prompt: PromptScores) -> int:
        """Write the tokens of an echoed prompt. Return the bytes written."""
        size = 0
        for lists in self._writer.prompt(prompt):
            size += self._add(lists)
            await asyncio.sleep(0)
        return size

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        return self._add(self._writer.write(entries)) if entries else 0

    def _add(self, lists: Lists) -> int:
        for name, items in self._written.items():
            items.append(compact(lists[name])[1:-1])
        return sum(len(items[-1]) for items in self._written.values())

    def body(self) -> dict[str, object]:
        return {name: Array(items) for name, items in self._written.items()}


class MeanLogprob:
    """Adds up a choice's log-probabilities, by which `best_of` ranks it, and passes them on."""

    def __init__(self, written: Logprobs) -> None:
        self._written = written
        self._sum, self._count = 0.0, 0

    @property
    def mean(self) -> float:
        """The mean log-probability of a token; a choice without tokens has the highest, 0."""
        return self._sum / max(1, self._count)

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        self._sum += sum(each.logprob for each in entries)
        self._count += len(entries)
        return self._written.add(entries, reasoning=reasoning)

    def body(self) -> Any:
        return self._written.body()


def best_choices(means: Sequence[float], generated: int, kept: int) -> list[int]:
    """Return the indices of the choices to return, of each prompt the best ones first.

    Args:
        means: mean log-probability of each choice; those of a prompt are neighbours.
        generated, kept: choices of each prompt.
    """
    found: list[int] = []
    for start in range(0, len(means), generated):
        own = range(start, start + generated)
        # Choices of a request without `best_of` keep their order.
        ranked = own if kept == generated else sorted(own, key=lambda n: -means[n])
        found += ranked[:kept]
    return found
