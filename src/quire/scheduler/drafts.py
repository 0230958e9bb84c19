"""Drafts of a sequence, and the interface of drafters. Pure Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.cache.index import Node
from quire.core.request import Request

Grade = tuple[str, int]
"""A drafter's name and the grade of its draft: acceptance is measured for each."""


class Draft(NamedTuple):
    """Tokens that a drafter expects next.

    Like the other values here it is a tuple, which is made several times as fast as a frozen
    dataclass: the device waits while drafts are made.

    Attributes:
        tokens: the guessed tokens; the first one follows the sequence's last known token.
        drafter: name of the drafter.
        grade: the drafter's own class of confidence, a small integer. Acceptance is measured by
            grade.
        run: of unread tokens that are no guesses of a head, what is expected from the first token
            on that the step before samples; see `draft_runs`.
    """

    tokens: tuple[int, ...]
    drafter: str
    grade: int = 0
    run: tuple[int, ...] = ()

    def first(self, count: int) -> Draft:
        """Return the draft of its first `count` tokens."""
        if count >= len(self.tokens):
            return self
        return self._replace(tokens=self.tokens[:count])


NO_DRAFT = Draft((), "")
"""Stands for the draft of rows that have none."""
UNREAD = -1
"""Stands for a drafted token that depends on what the host has not read of the step before."""


class DraftQuery(NamedTuple):
    """A request to draft for one sequence.

    Attributes:
        number: the sequence's number.
        tokens: tokens that the host knows. Read-only, and valid only during the call.
        content: the same tokens as the prefix index names them.
        node: the prefix index node of the last registered block; None if it was evicted.
        node_end: number of tokens up to the end of that block.
        limit: the most tokens to draft, at least 1.
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
        """Whether it can draft past a token that the host has not read yet, at little cost."""
        ...

    def token_s(self, sequences: int) -> float:
        """Return the seconds that `propose` takes for one more token of so many sequences; 0 if it
        computes none.
        """
        ...

    def reading_s(self, query: DraftQuery) -> float:
        """Return the seconds in which it reads what it has not read of a sequence, before its first
        draft; 0 if it reads nothing.
        """
        ...

    def propose(self, queries: Seq[DraftQuery]) -> Seq[Draft | None]:
        """Return a draft for each query, or None. Tokens beyond the query's limit are ignored."""
        ...

    def forget(self, number: int) -> None:
        """Drop the state of a sequence that has ended."""
        ...


class LookupDrafter(ABC):
    """A drafter that looks up each sequence's draft, which takes no time worth counting."""

    def token_s(self, sequences: int) -> float:
        return 0.0

    def reading_s(self, query: DraftQuery) -> float:
        return 0.0

    def propose(self, queries: Seq[DraftQuery]) -> Seq[Draft | None]:
        return [self.draft(each) for each in queries]

    @abstractmethod
    def draft(self, query: DraftQuery) -> Draft | None:
        """Return the draft of one sequence, or None."""

    def forget(self, number: int) -> None:  # noqa: B027  # most keep nothing
        pass


class GuessingDrafter(Drafter, Protocol):
    """A drafter whose tokens are computed within steps, by a head of the model."""

    @property
    def most(self) -> int:
        """The most tokens that it guesses in a row."""
        ...


class Foreseen(NamedTuple):
    """A draft kept for comparison with the tokens that follow.

    Attributes:
        position: position of the first guessed token.
    """

    position: int
    tokens: tuple[int, ...]
    grade: Grade


@dataclass(slots=True)
class DraftState:
    """Draft statistics of one sequence. Written by `Drafting`.

    Attributes:
        drafters: names of the drafters that its request allows.
        accepted, rejected: number of drafted tokens accepted and rejected so far.
        rates: acceptance rate by grade.
        compared: number of guesses that were compared with the tokens that followed, by grade.
        foreseen: drafts, verified or not, that the next tokens are compared with, by grade; the
            scheduler takes them.
        may_follow: see `Planner.may_follow`.
    """

    drafters: frozenset[str]
    accepted: int = 0
    rejected: int = 0
    rates: dict[Grade, float] = field(default_factory=dict)
    compared: Counter[Grade] = field(default_factory=Counter)
    foreseen: dict[Grade, Foreseen] = field(default_factory=dict)
    may_follow: bool = False

    def take_foreseen(self) -> tuple[Foreseen, ...]:
        """Return the drafts that the tokens just read are compared with, once."""
        foreseen = tuple(self.foreseen.values())
        self.foreseen.clear()
        return foreseen
