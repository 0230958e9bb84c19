"""Grammars of answer formats."""

from __future__ import annotations

import json

from llguidance.gbnf_to_lark import any_to_lark

from quire.core.errors import RequestError
from quire.core.request import GrammarSpec
from quire.serving.answer_grammar import AnswerFormat
from quire.text.dialects.grammar import json_term, literal


def format_grammar(format: AnswerFormat) -> GrammarSpec:
    """Return the grammar of an answer that consists of the format alone.

    Raises:
        RequestError: a grammar in GBNF that cannot be translated.
    """
    match format.kind:
        case "json_schema" | "regex":
            return GrammarSpec(format.kind, format.source)
        case "choice":
            return GrammarSpec("lark", f"start: body\n{body_rule(format)}\n")
        case "grammar":
            return GrammarSpec("lark", _as_lark(format))


def body_rule(format: AnswerFormat) -> str:
    """Return the Lark rule `body` for an answer within a larger grammar.

    Raises:
        RequestError: the format is the client's own grammar, whose rule names might clash.
    """
    match format.kind:
        case "json_schema":
            return f"body: {json_term(json.loads(format.source))}"
        case "regex":
            return f"body: REGEX\nREGEX: {_regex_term(format.source)}"
        case "choice":
            return "body: " + " | ".join(map(literal, json.loads(format.source)))
        case "grammar":
            raise RequestError(
                f"'{format.field}' cannot be used with this model, or together with 'tools': "
                "its answers already need the server's own grammar. Use a regular expression "
                "or a schema.",
                param=format.field,
                code="unsupported_parameter",
            )


def _regex_term(pattern: str) -> str:
    """Return a Lark terminal for a regular expression: it ends at an unescaped slash, or with the
    line.
    """
    written, escaped = [], False
    for each in pattern:
        escape = not escaped and each in "/\n"
        written.append({"/": "\\/", "\n": "\\n"}[each] if escape else each)
        escaped = each == "\\" and not escaped
    return f"/{''.join(written)}/"


def _as_lark(format: AnswerFormat) -> str:
    """Return a grammar in Lark's notation, translated if it is in GBNF."""
    try:
        return str(any_to_lark(format.source))
    except Exception as error:  # the translator raises what its parsing happens to hit
        raise RequestError(
            f"'{format.field}' cannot be compiled: {error}.",
            param=format.field,
            code="invalid_schema",
        ) from error
