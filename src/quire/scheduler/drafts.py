"""Drafts of a sequence, and the interface of what makes them. Pure Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.cache.index import Node
from quire.core.request import Request

Grade = tuple[str, int]
"""A drafter's name and the grade of its draft: acceptance is measured for each."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a drafter expects next.

    Attributes:
        tokens: in order; the first one follows the last known token of the sequence.
        drafter: its name.
        grade: how much the drafter relies on it, a small number with a meaning of its own.
    """

    tokens: tuple[int, ...]
    drafter: str
    grade: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DraftQuery:
    """A sequence for which drafts are wanted.

    Attributes:
        number: of the sequence.
        tokens: that the host knows; only to be read, and only during the call.
        content: the same as the prefix index knows them.
        node: of the last registered block in the prefix index; None if it was evicted.
        node_end: number of tokens up to the end of that block.
        limit: the most drafts, at least 1.
    """

    number: int
    request: Request
    tokens: array[int]
    content: array[int]
    node: Node | None
    node_end: int
    limit: int


class Drafter(Protocol):
    """Guesses the next tokens of many sequences at once."""

    @property
    def name(self) -> str: ...

    @property
    def looks_ahead(self) -> bool:
        """Whether it can guess past a token that the host has not read yet, and guesses cheaply."""
        ...

    def propose(self, queries: Seq[DraftQuery]) -> Seq[Draft | None]:
        """Return a draft for each query, or None; of tokens beyond the limit none is used."""
        ...

    def forget(self, number: int) -> None:
        """Drop what is kept of a sequence; it has ended."""
        ...


class GuessingDrafter(Drafter, Protocol):
    """A drafter whose tokens are guessed within steps, by a head of the model."""

    @property
    def most(self) -> int:
        """Tokens that it guesses in a row."""
        ...


class Foreseen(NamedTuple):
    """A guess to compare with the tokens that come.

    Attributes:
        position: of the first guessed token.
    """

    position: int
    tokens: tuple[int, ...]
    grade: Grade


@dataclass(slots=True)
class DraftState:
    """Drafts of one sequence. Written by `Drafting`.

    Attributes:
        drafters: names of those that its request allows.
        accepted, rejected: drafts so far.
        rates: how often a guessed token was right, by grade.
        foreseen: the guess that the next tokens are compared with.
    """

    drafters: frozenset[str]
    accepted: int = 0
    rejected: int = 0
    rates: dict[Grade, float] = field(default_factory=dict)
    foreseen: Foreseen | None = None
