"""Compares the official SDKs' types of a request, nested ones too, with a schema of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel
from typing_extensions import is_typeddict

from quire.api.shared.schema import Wire, parse
from quire.core.errors import RequestError

Build = Callable[[Any], dict[str, Any]]
"""Returns a whole body with a value in its place."""

Keys = tuple[str | int, ...]
"""Where a value is in a body."""

_SAMPLES: Mapping[type, Any] = {str: "x", int: 1, float: 0.5, bool: True, object: {}}
_WRAPPERS = (Annotated, Required, NotRequired)
_TAGS = ("type", "role")
_NO_FIELD = ("unsupported_parameter", "unknown_parameter")


@cache
def _hints(params: Any) -> dict[str, Any]:
    return get_type_hints(params, include_extras=True)


def _required(params: Any) -> list[str]:
    return [name for name, kind in _hints(params).items() if get_origin(kind) is Required]


def _plain(kind: Any) -> Any:
    while get_origin(kind) in _WRAPPERS:
        kind = get_args(kind)[0]
    return kind


def _members(kind: Any) -> list[Any]:
    """Return the types of a union, or one type alone, without those that JSON cannot hold."""
    kind = _plain(kind)
    flat = [kind]
    if get_origin(kind) in (Union, UnionType):
        flat = [each for member in get_args(kind) for each in _members(member)]
    return [each for each in flat if _is_json(each)]


def _is_json(kind: Any) -> bool:
    plain = kind in (*_SAMPLES, NoneType) or get_origin(kind) in (Literal, dict)
    return plain or is_typeddict(kind) or _element(kind) is not None


def _element(kind: Any) -> Any:
    """Return the type of a list's elements; None for another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    is_list = isinstance(origin, type) and issubclass(origin, Iterable)
    return arguments[0] if is_list and len(arguments) == 1 else None


def _tags(params: Any) -> tuple[str, tuple[str, ...]]:
    """Return the field that tells a union's members apart, and its values. Both may be empty."""
    for name in _TAGS:
        if name in _required(params):
            return name, get_args(_plain(_hints(params)[name]))
    return "", ()


class Comparison:
    """Walks an SDK's type of a body; collects each field and value that a schema lacks.

    A type is compared once with each model that reads it, so that recursion ends.

    Attributes:
        gaps: the schema's complaint, by the path of the field: `messages<user>.content<text>.text`
            has the types of union members in angle brackets.
    """

    def __init__(
        self,
        schema: type[Wire],
        params: Any,
        body: Mapping[str, Any],
        *,
        samples: Mapping[str, Any],
        unread: tuple[type, ...],
    ) -> None:
        """Compare.

        Args:
            body: the smallest valid body.
            samples: valid values, by the name of a field, where the type says too little; or fields
                to add to the required ones, by the name of their type.
            unread: models of parts that have no effect as a whole, and are named to the client.
        """
        self._schema = schema
        self._samples = samples
        self._unread = unread
        self._seen: set[tuple[Any, type]] = set()
        self.gaps: dict[str, str] = {}
        for name in _hints(params):
            self._field(params, name, "", keys=(), build=lambda field: {**body, **field})

    def _field(self, params: Any, name: str, path: str, *, keys: Keys, build: Build) -> None:
        """Compare one field."""
        kind, path, keys = _hints(params)[name], f"{path}.{name}" if path else name, (*keys, name)
        members = _members(kind)
        if not members:
            return

        def body(value: Any) -> dict[str, Any]:
            return build({name: value})

        if self._is_known(path, keys, body(self._sample(members[0], name))):
            self._value(kind, name, path, keys=keys, build=body)

    def _is_known(self, path: str, keys: Keys, body: dict[str, Any]) -> bool:
        """Return whether the schema has the field at `keys`, or the client is told it is ignored.

        A field of which a value is refused is known.
        """
        try:
            read, ignored = parse(self._schema, body)
        except RequestError as error:
            if error.code not in _NO_FIELD or error.param != _written(keys):
                return True
            self.gaps[path] = error.message
            return False
        if any(_written(keys).startswith(each) for each in ignored):
            return False
        owner = self._at(read, keys[:-1])
        if not isinstance(owner, BaseModel) or isinstance(owner, self._unread):
            return True
        if keys[-1] in _names(owner):
            return True
        self.gaps[path] = f"{type(owner).__name__} has no field '{keys[-1]}'."
        return False

    def _value(self, kind: Any, name: str, path: str, *, keys: Keys, build: Build) -> None:
        """Compare each value that a type allows."""
        members = _members(kind)
        several = len([each for each in members if each is not NoneType]) > 1
        for member in members:
            element = _element(member)
            if get_origin(member) is Literal:
                for value in get_args(member):
                    self._read(f"{path}={value}", keys, build(value))
            elif is_typeddict(member):
                self._object(member, name, path, keys=keys, build=build, named=several)
            elif element is not None:
                self._value(
                    element, name, path, keys=(*keys, 0), build=lambda value: build([value])
                )
            else:
                null = "=null" if member is NoneType else ""
                self._read(f"{path}{null}", keys, build(self._sample(member, name)))

    def _object(
        self, params: Any, name: str, path: str, *, keys: Keys, build: Build, named: bool
    ) -> None:
        """Compare the fields of an object, for each value of the field that is its tag."""
        tag, tags = _tags(params)
        base = self._sample(params, name)
        for value in tags or (params.__name__,):
            part = {**base, tag: value} if tag else base
            inner = f"{path}<{value}>" if named else path
            read = self._read(inner, keys, build(part))
            known = (params, type(read))
            if known in self._seen or not isinstance(read, BaseModel):
                continue
            if isinstance(read, self._unread):
                continue
            self._seen.add(known)
            for field in _hints(params):
                if field != tag:
                    self._field(
                        params,
                        field,
                        inner,
                        keys=keys,
                        build=lambda given, part=part: build({**part, **given}),  # type: ignore[misc]
                    )

    def _read(self, path: str, keys: Keys, body: dict[str, Any]) -> Any:
        """Return the value at `keys` of a body, as the schema read it; None if it is refused."""
        try:
            read, _ = parse(self._schema, body)
        except RequestError as error:
            self.gaps[path] = error.message
            return None
        return self._at(read, keys)

    def _at(self, read: Any, keys: Keys) -> Any:
        """Return the value at `keys`; None within JSON that is kept as it is."""
        for key in keys:
            if isinstance(read, self._unread):
                return read
            if isinstance(read, list) and isinstance(key, int):
                read = read[key]
            elif isinstance(read, BaseModel):
                read = getattr(read, _names(read)[str(key)])
            else:
                return None
        return read

    def _sample(self, kind: Any, name: str) -> Any:
        """Return a small value of a type."""
        kind = _members(kind)[0]
        if is_typeddict(kind):
            fields = {each: self._sample(_hints(kind)[each], each) for each in _required(kind)}
            return {**fields, **self._samples.get(kind.__name__, {})}
        if kind is NoneType:
            return None
        element = _element(kind)
        if element is not None:
            return [self._sample(element, name)]
        if name in self._samples:
            return self._samples[name]
        return get_args(kind)[0] if get_origin(kind) is Literal else _SAMPLES.get(kind, {})


def _names(read: BaseModel) -> dict[str, str]:
    """Return the attributes of a model, by the fields of JSON."""
    return {field.alias or own: own for own, field in type(read).model_fields.items()}


def _written(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)[1:]


def differences(gaps: Mapping[str, str], refused: Iterable[str]) -> list[str]:
    """Describe the gaps that match none of the patterns, and the patterns that match no gap."""
    patterns = list(refused)
    new = [
        f"{path}: {why}"
        for path, why in gaps.items()
        if not any(fnmatchcase(path, each) for each in patterns)
    ]
    stale = [each for each in patterns if not any(fnmatchcase(path, each) for path in gaps)]
    return [*new, *(f"{each}: listed as refused, but nothing of this name is" for each in stale)]
