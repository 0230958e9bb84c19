"""Prepares JSON schemas for grammars.

Schemas that would break the compiler are refused. Keywords that no grammar can enforce are removed
and named, so that the client can be told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import RequestError

MAX_NESTING = 120
"""Deepest nesting of arrays and objects; llguidance supports 128."""
MAX_CHAIN = 400
"""Longest chain of nested objects, references followed. The compiler recurses, with about 4 KB
each.
"""

FORMATS = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""Formats that the grammar enforces; all others are annotations."""

_STANDARD_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"}
) | {"json-pointer", "relative-json-pointer", "regex"}
"""Formats of JSON Schema, draft 2020-12, that a client may expect to be enforced."""

_UNENFORCED = frozenset(
    {"propertyNames", "uniqueItems", "contains", "minContains", "maxContains", "not", "if"}
    | {"then", "else", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
)
_DEFINING = ("$defs", "definitions")
_NAMED = frozenset({"properties", "patternProperties", *_DEFINING})
"""Keywords whose value maps names to schemas."""
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
_VALUES = frozenset({"const", "default"})
"""Keywords that may be null."""
_DIALECTS = frozenset(
    f"json-schema.org/{each}/schema"
    for each in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
)
"""Dialects of `$schema` that the compiler reads, without scheme and fragment."""
_SPELLED_OUT = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$", re.ASCII)
"""Matches a pattern of whole names, as `^a$` and `^(a|b)$`."""
_JOINING = frozenset(
    {"$ref", "anyOf", "oneOf", "patternProperties", "if", "then", "else", "dependencies"}
    | {"dependentRequired", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""Keywords that may add properties beyond those named."""
_BROKEN = -(2.0**63)
"""Float value of the 64-bit integers in `enum` and `const` on which llguidance 1.9 recurses
endlessly: see docs/upstream-llguidance.md.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema that can be compiled.

    Attributes:
        unenforced: removed keywords, as `path: keyword`, each once.
    """

    schema: dict[str, Any]
    unenforced: tuple[str, ...] = ()


def prepare(
    schema: Any,
    param: str,
    is_pattern: Callable[[str], bool],
    compiles: Callable[[dict[str, Any]], bool],
    *,
    close: bool = False,
) -> Prepared:
    """Return the part of a schema that a grammar can enforce.

    Args:
        is_pattern: whether a regular expression can be a grammar.
        compiles: whether a schema can.
        close: see `closed`.

    Raises:
        RequestError: `param` is no schema, or one that is nested too deeply or holds a number that
            cannot be compiled (code `invalid_schema`).
    """
    if not isinstance(schema, dict):
        raise refused_schema(param, "a schema must be a JSON object")
    _check_values(schema, param)
    schema = _asked(schema)
    _check_chain(schema, param)
    _check_loop(schema, param)
    schema = closed(schema) if close else schema
    relaxing = _Relaxing(is_pattern, compiles)
    relaxing.definitions = {
        key: relaxing.within(key, schema[key], "") for key in _DEFINING if key in schema
    }
    relaxed = relaxing.schema(schema, "")
    return Prepared(relaxed, tuple(dict.fromkeys(relaxing.unenforced)))


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties` false for objects that list properties.

    A schema without the keyword allows any properties, and models then write too many. A given
    `additionalProperties` is kept. A schema that joins objects stays as it is: what closes one of
    them would forbid the others' properties.
    """
    return schema if any(map(_joins, _schemas(schema))) else _closed(schema)


def with_objects(schema: Any) -> Any:
    """Return the schema with an object for each property whose schema is true or false.

    Chat templates read the keys of properties; Rust's schemars writes true for any JSON value.
    """
    if not isinstance(schema, dict):
        return schema
    made = {key: change_within(with_objects, key, value) for key, value in schema.items()}
    named = made.get("properties")
    if isinstance(named, dict) and any(isinstance(each, bool) for each in named.values()):
        known: dict[bool, Any] = {True: {}, False: {"not": {}}}
        made["properties"] = {
            name: known[each] if isinstance(each, bool) else each for name, each in named.items()
        }
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it."""
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            for inner in _within(key, value):
                yield from _schemas(inner)


def _within(key: str, value: Any) -> Iterator[Any]:
    """Yield the schemas within a keyword."""
    if key in _SINGLE:
        yield value
    elif key in _NAMED | _LISTED:
        yield from _children(value)


def _joins(schema: dict[str, Any]) -> bool:
    """Return whether an object has properties from several places."""
    return "allOf" in schema or ("properties" in schema and not _JOINING.isdisjoint(schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {key: change_within(_closed, key, value) for key, value in schema.items()}
    named = schema.get("properties")
    if not named or "additionalProperties" in schema or not isinstance(named, dict):
        return made
    needed = schema.get("required", [])
    if "minProperties" in schema or not isinstance(needed, list):
        return made
    if not all(isinstance(each, str) and each in named for each in needed):
        return made
    return made | {"additionalProperties": False}


def _asked(schema: Any) -> Any:
    """Return the schema without null keywords, which some clients send for absent ones, with `#`
    before references from the root, which LiteLLM omits, and with dialects that the compiler reads.
    """
    if not isinstance(schema, dict):
        return schema
    made = {
        key: f"#{value}"
        if key == "$ref" and isinstance(value, str) and value.startswith("/")
        else change_within(_asked, key, value)
        for key, value in schema.items()
        if value is not None or key in _VALUES
    }
    if isinstance(dialect := made.pop("$schema", None), str):
        name = dialect.partition("://")[2].removesuffix("#")
        if name in _DIALECTS:
            made["$schema"] = f"{'https' if '/draft/' in name else 'http'}://{name}"
    return _with_names(made)


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with patterns of whole names read as properties.

    The compiler would ask for another property of such a pattern when all its names are used.
    """
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or not isinstance(schema.get("properties", {}), dict):
        return schema
    named, rest = dict(schema.get("properties", {})), {}
    for pattern, inner in patterns.items():
        found = _SPELLED_OUT.fullmatch(pattern)
        if found is None:
            rest[pattern] = inner
            continue
        for name in (found[1] or found[2]).split("|"):
            named[name] = {"allOf": [named[name], inner]} if name in named else inner
    if len(rest) == len(patterns):
        return schema
    made = schema | {"properties": named, "patternProperties": rest}
    if not rest:
        del made["patternProperties"]
    return made


def change_within(change: Callable[[Any], Any], key: str, value: Any) -> Any:
    """Return the value of a keyword, with each schema that it holds changed."""
    if key in _SINGLE:
        return change(value)
    if key in _NAMED and isinstance(value, dict):
        return {name: change(inner) for name, inner in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [change(inner) for inner in value]
    return value


def refused_schema(param: str, reason: str) -> RequestError:
    """Return the refusal of a schema that cannot be compiled to a grammar."""
    return RequestError(
        f"'{param}' cannot be compiled: {reason}.", param=param, code="invalid_schema"
    )


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        yield from node.values()
    elif isinstance(node, list):
        yield from node


def _check_values(schema: Any, param: str) -> None:
    waiting = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise refused_schema(param, f"it is nested more than {MAX_NESTING} levels deep")
        if isinstance(node, int) and node >= _BROKEN and float(node) == _BROKEN:
            raise refused_schema(param, f"the integer {node} is too small")
        waiting += [(child, depth + 1) for child in _children(node)]


def _check_chain(schema: Any, param: str) -> None:
    """Follow references as the compiler does: each at its first occurrence only."""
    waiting, seen = [(schema, 1)], set()
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_CHAIN:
            raise refused_schema(
                param, f"its references form a chain of more than {MAX_CHAIN} objects"
            )
        reference = node.get("$ref") if isinstance(node, Mapping) else None
        inner = (
            [node[key] for key in node if key not in _DEFINING]
            if isinstance(node, Mapping)
            else list(_children(node))
        )
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            inner.append(target(reference, schema))
        waiting += [(child, depth + isinstance(child, Mapping)) for child in reversed(inner)]


def _check_loop(schema: Any, param: str) -> None:
    """Refuse a schema whose references lead from one to the next and back, and so to no value."""
    node, seen = schema, list[str]()
    while isinstance(node, Mapping) and isinstance(reference := node.get("$ref"), str):
        if reference in seen:
            loop = " to ".join(f"'{each}'" for each in [*seen[seen.index(reference) :], reference])
            raise refused_schema(param, f"it has no finite value: '$ref' leads from {loop}")
        seen.append(reference)
        node = target(reference, schema)


def target(reference: str, root: Any) -> Any:
    """Return the target of a reference `#/...` in `root`; None if it points nowhere or outside."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


@dataclass(slots=True)
class _Relaxing:
    is_pattern: Callable[[str], bool]
    compiles: Callable[[dict[str, Any]], bool]
    definitions: dict[str, Any] = field(default_factory=dict)
    """The definitions of the whole schema, for references to them."""
    unenforced: list[str] = field(default_factory=list)
    known: dict[str, bool] = field(default_factory=dict)

    def schema(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if self._drops(key, value):
                if self._is_reported(key, value):
                    self.unenforced.append(f"{path or '#'}: {key}")
            else:
                kept[key] = self.within(key, value, path)
        return self._either(kept, path) if "oneOf" in kept else kept

    def _either(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema with `oneOf` read as `anyOf` where a grammar cannot tell the
        alternatives apart.
        """
        if self.compiles(self.definitions | schema):
            return schema
        rest = {key: value for key, value in schema.items() if key != "oneOf"}
        either = {"anyOf": schema["oneOf"]}
        relaxed = (
            {**rest, "allOf": [*rest.get("allOf", ()), either]}
            if "anyOf" in rest
            else rest | either
        )
        if not self.compiles(self.definitions | relaxed):
            return schema  # and the compiler says why
        self.unenforced.append(f"{path or '#'}: oneOf")
        return relaxed

    def within(self, key: str, value: Any, path: str) -> Any:
        if key in _NAMED and isinstance(value, dict):
            return {
                name: self.schema(inner, _join(path, key, name))
                for name, inner in value.items()
                if key != "patternProperties" or self._fits(name, path)
            }
        if key in _LISTED and isinstance(value, list):
            return [self.schema(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        if key in _SINGLE:
            return self.schema(value, f"{path}[]" if key == "items" else f"{path}.*")
        return value

    def _fits(self, pattern: str, path: str) -> bool:
        if self._known(pattern):
            return True
        self.unenforced.append(f"{path or '#'}: patternProperties")
        return False

    def _drops(self, key: str, value: Any) -> bool:
        if key == "format":
            return value not in FORMATS if isinstance(value, str) else False
        if key == "pattern" and isinstance(value, str):
            return not self._known(value)
        return key in _UNENFORCED

    @staticmethod
    def _is_reported(key: str, value: Any) -> bool:
        """Return whether the client is told that a keyword is not enforced."""
        match key:
            case "format":
                return value in _STANDARD_FORMATS
            case "uniqueItems":
                return value is not False
            case "minContains" | "maxContains" | "then" | "else":
                return False  # said of the keyword that they belong to
            case _:
                return True

    def _known(self, pattern: str) -> bool:
        if pattern not in self.known:
            self.known[pattern] = self.is_pattern(pattern)
        return self.known[pattern]


def _join(path: str, key: str, name: str) -> str:
    if key in _DEFINING:
        return f"{key}.{name}"
    return f"{path}.{name}" if path else name
