"""Sentences about values that a schema refused, for requests and settings alike.

Pydantic says which rule failed by a name and numbers; its own sentences speak of "input", of Python
and of parsers, and are shown to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.figures import brief

_LONGEST_REPEATED = 40  # characters of a refused string that a message repeats
_FIRST_WITH_EXPONENT = 1e15  # of the floats, which are whole numbers from 2**53 on
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "complex": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "iterable": "a list",
    "dict": "an object",
    "mapping": "an object",
    "model": "an object",
    "dataclass": "an object",
    "none": "left out",
}
"""Expected values by the name of an error without `_type`, `_parsing` and the like."""
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def complaint(details: Sequence[Mapping[str, Any]]) -> str:
    """Return what must hold of a value, and what it is: `must be at least 1, not -5`.

    Args:
        details: pydantic's errors about the value: several if it may be of several types.
    """
    musts = list(dict.fromkeys(_must(each) for each in details))
    plain = [each.removeprefix("be ") for each in musts if each.startswith("be ")]
    rule = f"be {' or '.join(plain)}" if len(plain) == len(musts) else musts[0]
    given = _repeated(details[0]) if rule.startswith("be ") else ""
    return f"must {rule}{given}"


def _must(detail: Mapping[str, Any]) -> str:
    """Return the rule that an error names, to stand behind "must"."""
    kind, context = str(detail["type"]), detail.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        besides = f", or {context['besides']}" if "besides" in context else ""
        return f"be {words} {_number(context[name])}{besides}"
    match kind:
        case "literal_error" | "enum":
            return f"be {context['expected']}".replace("True", "true").replace("False", "false")
        case "finite_number":
            return "be a finite number"
        case "string_pattern_mismatch":
            return f"be text of the pattern {context['pattern']}"
        case "string_too_short" | "too_short" if context["min_length"] == 1:
            return "not be empty"
        case "string_too_short":
            return f"have at least {_counted(context['min_length'], 'character', 'characters')}"
        case "string_too_long":
            return f"have at most {_counted(context['max_length'], 'character', 'characters')}"
        case "too_short":
            return f"have at least {_counted(context['min_length'], 'entry', 'entries')}"
        case "too_long":
            return f"have at most {_counted(context['max_length'], 'entry', 'entries')}"
        case "json_invalid":
            return f"be JSON ({context['error']})"
        case "extra_forbidden":
            return "be left out: it is unknown"
        case "missing":
            return "be given"
        case _:
            return _of_kind(kind, str(detail["msg"]))


def _of_kind(kind: str, sentence: str) -> str:
    """Return the rule of an error about a type; pydantic's sentence for an unknown error."""
    parts = kind.split("_")
    for length in range(len(parts), 0, -1):
        if expected := _KINDS.get("_".join(parts[:length])):
            return f"be {expected}"
    return f"be of another form: {sentence}"


def _number(limit: float) -> str:
    """Return a limit: whole numbers in groups of three digits, other large ones like `3.4e38`."""
    if isinstance(limit, int) or (limit.is_integer() and abs(limit) < _FIRST_WITH_EXPONENT):
        return f"{int(limit):,}"
    return brief(limit)


def _counted(count: int, one: str, several: str) -> str:
    return f"{_number(count)} {one if count == 1 else several}"


def _repeated(detail: Mapping[str, Any]) -> str:
    """Return ", not ..." with the value if it is short; empty for none, and for long ones."""
    kind, value = detail["type"], detail.get("input")
    if kind in ("missing", "extra_forbidden", "json_invalid", "none_required"):
        return ""
    match value:
        case bool():
            return f", not {str(value).lower()}"
        case None:
            return ", not null"
        case int() | float() if len(text := str(value)) <= _LONGEST_REPEATED:
            return f", not {text}"
        case str() if len(value) <= _LONGEST_REPEATED and value.isprintable():
            return f", not {value}" if kind in _BOUNDS else f", not '{value}'"
        case dict():
            return ", not an object"
        case list() | tuple():
            return ", not a list"
        case _:
            return ""
