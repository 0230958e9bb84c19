"""Reads `config.json` into frozen dataclasses with the same field names."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from quire.core.errors import ModelError
from quire.core.values import LARGEST

A = TypeVar("A")


def read_arguments(cls: type[A], config: dict[str, Any], **computed: Any) -> A:
    """Fill the dataclass `cls` from the keys of `config` that have its fields' names.

    Other keys are ignored, such as training settings and versions. A null counts as absent.
    `computed` overrides `config`. Integers must be at least 1, or at least their default if that is
    less.

    Raises:
        ModelError: a field without a default has no value, or a value is of another type or too
            small.
    """
    values: dict[str, Any] = {}
    for spec in fields(cls):  # type: ignore[arg-type]  # type[T] cannot say "a dataclass"
        value = computed.get(spec.name, config.get(spec.name))
        if value is not None:
            values[spec.name] = value
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise ModelError(
                f"config.json of a {config.get('model_type')!r} model lacks {spec.name!r}"
            )
    check_types(cls, values)
    for spec in fields(cls):  # type: ignore[arg-type]  # as above
        least = spec.default if type(spec.default) is int else 1
        value = values.get(spec.name)
        if type(value) is int and value < min(least, 1):
            raise ModelError(f"config.json: {spec.name} = {value} is less than {min(least, 1)}")
        if type(value) is int and value > LARGEST:
            raise ModelError(f"config.json: {spec.name} = {value} is more than {LARGEST}")
    return cls(**values)


def check_types(cls: type, values: dict[str, Any]) -> None:
    """Check values against the types of the dataclass fields that they are for.

    Raises:
        ModelError: a value has another type or is not finite; the message names the key, the value
            and the type.
    """
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not _is_of(value, hints[name]):
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            raise ModelError(f"config.json: {name} = {value!r} is not of type {wanted}")
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise ModelError(f"config.json: {name} = {value!r} is not finite")


def _is_of(value: Any, hint: Any) -> bool:
    if get_origin(hint) is UnionType:
        return any(_is_of(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_is_of(each, item) for each in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)
