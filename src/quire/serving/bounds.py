"""What an answer has to meet, and the grammar that comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import GrammarSpec
from quire.text.dialects.base import Tool


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer has to meet.

    Attributes:
        schema: JSON text of the schema of the answer.
        strict: names of the tools whose calls have to meet their schemas though nothing forces
            them.
        forced: the answer is nothing but calls, of the tool `name` if that is not empty.
        schema_field, parameters_field: what the client calls them, for errors.
    """

    schema: str | None
    tools: tuple[Tool, ...]
    strict: frozenset[str]
    forced: bool
    name: str
    parallel: bool
    schema_field: str
    parameters_field: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The grammar of an answer; None where nothing can bind it.

    Attributes:
        unenforced: what the client's schemas ask for and the grammar leaves to the model.
    """

    grammar: GrammarSpec | None
    unenforced: tuple[str, ...] = ()
