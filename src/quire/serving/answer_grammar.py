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
        kind: the kind of `source`: the JSON text of a schema, a regular expression, a JSON list of
            allowed answers, or a context-free grammar in Lark's notation or llama.cpp's (GBNF).
        field: the client's name of the field, for errors.
        strict: whether to refuse a schema that the grammar can enforce only in part.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    source: str
    field: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """The input from which the grammar of an answer is built.

    Attributes:
        format: the answer's format.
        strict: names of the tools whose calls, if the model makes any, must meet their schemas.
        forced: whether the answer must consist of calls only, of the tool `name` if that is not
            empty.
        parameters_field: the client's name of a tool's schema, for errors.
        bare: whether the answer lacks the dialect's header, because it follows a bare prompt or its
            own start.
        started: the given start of the answer, which the grammar must accept.
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
    """The grammar of an answer; its source is None if no grammar is needed.

    Attributes:
        unenforced: parts of the client's schemas that the grammar does not enforce.
    """

    grammar: GrammarSpec | None
    unenforced: tuple[str, ...] = ()
