"""JSON objects of a model folder, read value by value, with types and bounds checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from quire.core.errors import ModelError

_CONFIG = Path("config.json")
LARGEST = 2**31 - 1
"""Largest size that an array of MLX can have."""


class Values:
    """The keys of a JSON object. A null counts as absent.

    Each reader takes the names that a key has had; the first present one counts. A reader raises
    `ModelError`, naming file and key, for a value of another type, or if none is present and there
    is no default. Later code relies on these checks.

    Args:
        asked: collects the keys that were read, as paths within the file.
        file: name of the file.
        prefix: path of the object within the file, such as "text_config.".
    """

    def __init__(
        self,
        values: dict[str, Any],
        asked: set[str] | None = None,
        *,
        file: Path = _CONFIG,
        prefix: str = "",
    ) -> None:
        self.values = values
        self.file = file
        self.prefix = prefix
        self._asked: set[str] = set() if asked is None else asked

    def like(self, values: dict[str, Any], within: str = "") -> Self:
        """Return a reader of another object at the same path of the file, or at `within` it, such
        as "size.".
        """
        return type(self)(values, self._asked, file=self.file, prefix=self.prefix + within)

    def error(self, name: str, why: str) -> ModelError:
        """Return an error about a value that the caller cannot use."""
        value = f" = {self.values[name]!r}" if name in self.values else " is missing"
        return ModelError(f"{self.file}: {self.prefix}{name}{value}, {why}")

    def integer(self, *names: str, default: int | None = None, minimum: int | None = 1) -> int:
        """Return an integer of at least `minimum`; None means no bound.

        Most integers are sizes. The default is checked too, because it may be computed from other
        values. None may exceed `LARGEST`.
        """
        value = int(self._typed(names, default, int))
        if minimum is not None and value < minimum:
            raise self._refused(names[0], value, f"is less than {minimum}")
        if value > LARGEST:
            raise self._refused(names[0], value, f"is more than {LARGEST}")
        return value

    def number(
        self, *names: str, default: float | None = None, minimum: float | None = None
    ) -> float:
        """Return a finite number."""
        value = self._typed(names, default, (int, float))
        if not abs(value) <= sys.float_info.max:
            raise self._refused(names[0], value, "is not finite")
        value = float(value)
        if minimum is not None and not value >= minimum:
            raise self._refused(names[0], value, f"is less than {minimum}")
        return value

    def positive(self, *names: str, default: float | None = None) -> float:
        """Return a number above zero."""
        value = self.number(*names, default=default)
        if not value > 0:
            raise self._refused(names[0], value, "is not above 0")
        return value

    def value(self, name: str, default: Any = None) -> Any:
        """Return a value of any type, unchecked."""
        return self.values[name] if self.has(name) else default

    def flag(self, *names: str, default: bool | None = None) -> bool:
        return bool(self._typed(names, default, bool))

    def word(self, *names: str, default: str | None = None) -> str:
        return str(self._typed(names, default, str))

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if absent."""
        return tuple(self._elements(name, int))

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """Return a list with as many numbers as the default, which replaces an absent or empty
        list.
        """
        values = tuple(float(each) for each in self._elements(name, (int, float))) or (*default,)
        if len(values) != len(default):
            raise self.error(name, f"which is not {len(default)} numbers")
        return values

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        return tuple(self._elements(name, str))

    def only(self, name: str, *known: Any) -> None:
        """Refuse a value that would change the result and that the family does not implement.

        An absent key is accepted.

        Raises:
            ModelError: the value is not implemented; the message names key, value and known values.
        """
        if self.has(name):
            require(self.prefix + name, self.values[name], known, file=self.file)

    def neutral(self, values: Mapping[str, Any]) -> None:
        """Refuse all values except these, which change nothing. See `only`."""
        for name, value in values.items():
            self.only(name, value)

    def nested(self, *names: str, needed: bool = True) -> Self:
        """Return the first non-empty object under these keys.

        Args:
            needed: whether to raise if there is none; else an empty object is returned.
        """
        for name in names:
            if found := self._typed((name,), {}, dict):
                return self.like(found, f"{name}.")
        if needed:
            raise _lack(self, names[0])
        return self.like({}, f"{names[0]}.")

    def within(self, name: str) -> Self:
        """Return the object under a key, even if empty; this object if the key is absent."""
        return self.nested(name, needed=False) if self.has(name) else self

    def has(self, name: str) -> bool:
        """Return whether the key is present and not null."""
        self._asked.add(self.prefix + name)
        return self.values.get(name) is not None

    def _elements(self, name: str, kind: Any) -> list[Any]:
        """Return the list under a key, with elements of one type; empty if absent."""
        values: list[Any] = self._typed((name,), [], list)
        if any(not _is_of(each, kind) for each in values):
            raise self._refused(name, values, "has an element of the wrong type")
        return values

    def _typed(self, names: tuple[str, ...], default: Any, kind: Any) -> Any:
        self._asked.update(self.prefix + name for name in names)
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not _is_of(value, kind):
                raise self._refused(name, value, "is of the wrong type")
            return value
        if default is None:
            raise _lack(self, names[0])
        return default

    def _refused(self, name: str, value: Any, why: str) -> ModelError:
        return ModelError(f"{self.file}: {self.prefix}{name} = {value!r} {why}")


def _lack(of: Values, name: str) -> ModelError:
    model_type = of.values.get("model_type")
    kind = "" if model_type is None else f" of a {model_type!r} model"
    return ModelError(f"{of.file}{kind} lacks '{of.prefix}{name}'")


def require(name: str, value: Any, known: Iterable[Any], file: Path = _CONFIG) -> None:
    """Refuse a value that would change the result and is not implemented. True is not 1.

    Raises:
        ModelError: the value is not implemented; the message names key, value and known values.
    """
    options = tuple(known)
    if not any(value == each and (value is True) == (each is True) for each in options):
        offered = ", ".join(map(repr, options))
        raise ModelError(f"{file}: {name} = {value!r} is not supported (known: {offered})")


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, or one of several; a bool is no number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
