"""Reading `config.json` into frozen dataclasses that mirror it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from quire.errors import ModelError

A = TypeVar("A")


def read_arguments(cls: type[A], config: dict[str, Any], **computed: Any) -> A:
    """Fills the dataclass `cls` from the keys of `config` that bear its fields' names.

    Keys that `cls` does not have are not the model's business (training settings, versions).
    A null counts as absent. `computed` goes before `config`.

    Raises:
        ModelError: a field without a default has no value.
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
    return cls(**values)


def require(name: str, value: Any, known: Iterable[Any]) -> None:
    """Refuses a value of `config.json` that would change the result and is not implemented.

    Raises:
        ModelError: naming the key, the value, and what is known.
    """
    options = tuple(known)
    if value not in options:
        offered = ", ".join(repr(option) for option in options)
        raise ModelError(f"config.json: {name} = {value!r} is not supported (known: {offered})")
