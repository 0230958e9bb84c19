"""The format that an answer must have, and the grammar that enforces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.core.request import GrammarSpec
from quire.text.dialects.base import Tool


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format that constrains an answer.

    Attributes:
        kind: what `source` is: the JSON text of a schema, a regular expression, a JSON list of the
            texts of which the answer is one, or a context-free grammar, in Lark's notation or in
            llama.cpp's (GBNF).
        field: what the client calls it, for errors.
        strict: whether a schema is refused of which the grammar would leave a part to the model.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    source: str
    field: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """The input from which the grammar of an answer is built.

    Attributes:
        format: of the answer.
        strict: names of the tools whose calls have to meet their schemas though nothing forces
            them.
        forced: the answer is nothing but calls, of the tool `name` if that is not empty.
        parameters_field: what the client calls a tool's schema, for errors.
        bare: the answer follows a bare prompt or its own start, so that the dialect's header is
            not in it.
        started: the start that was given, which the grammar lets through as well.
    """

    format: AnswerFormat | None
    tools: tuple[Tool, ...]
    strict: frozenset[str]
    forced: bool
    name: str
    parallel: bool
    parameters_field: str
    bare: bool = False
    started: str = ""

    @property
    def field(self) -> str:
        """Return the request field to blame if no grammar can be built."""
        return "tools" if self.format is None else self.format.field


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer; None where nothing can bind it.

    Attributes:
        unenforced: what the client's schemas ask for and the grammar leaves to the model.
    """

    grammar: GrammarSpec | None
    unenforced: tuple[str, ...] = ()
