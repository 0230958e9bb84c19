"""What an answer has to meet, and the grammar that comes of it, as lines between two processes.

Lines of JSON: what native code may have damaged is never unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.errors import RequestError
from quire.request import GrammarSpec
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


def encoded(wanted: Wanted) -> bytes:
    """A line for the process.

    Raises:
        RequestError: a schema is nested too deeply to be written.
    """
    fields = {**asdict(replace(wanted, tools=())), "strict": sorted(wanted.strict)}
    fields["tools"] = [(tool.name, tool.parameters) for tool in wanted.tools]
    try:
        return json.dumps(fields).encode() + b"\n"
    except RecursionError:
        field = wanted.parameters_field
        raise RequestError(
            f"'{field}' is nested too deeply.", param=field, code="invalid_schema"
        ) from None


def wanted_of(line: bytes) -> Wanted:
    """What `encoded` wrote, read by the process."""
    fields: dict[str, Any] = json.loads(line)
    fields["tools"] = tuple(Tool(name, parameters) for name, parameters in fields["tools"])
    fields["strict"] = frozenset(fields["strict"])
    return Wanted(**fields)


def answered(bound: Bound) -> bytes:
    """What the process says of a grammar that it accepted."""
    grammar = None if bound.grammar is None else asdict(bound.grammar)
    return json.dumps({"grammar": grammar, "unenforced": bound.unenforced}).encode() + b"\n"


def refused(error: RequestError) -> bytes:
    """What the process says of one that it did not."""
    fields = {"message": error.message, "param": error.param, "code": error.code}
    return json.dumps({"error": fields}).encode() + b"\n"


def decoded(line: bytes) -> Bound:
    """What the process said.

    Raises:
        RequestError: it did not accept the grammar.
    """
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        error = answer["error"]
        raise RequestError(error["message"], param=error["param"], code=error["code"])
    grammar = answer["grammar"]
    spec = None
    if grammar is not None:
        ids = {name: tuple(grammar[name]) for name in ("start_after", "opened_by")}
        spec = GrammarSpec(**{**grammar, **ids})
    return Bound(spec, tuple(answer["unenforced"]))
