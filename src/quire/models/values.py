"""JSON objects of a model folder, read value by value, with types and bounds checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.errors import ModelError
from quire.models.arguments import require


class Values:
    """The keys of a JSON object. A null counts as absent.

    Each reader takes the names that a key has had, of which the first present counts, and raises
    `ModelError`, naming the key, for a value of another type, or where none is there and no default
    was given. Nothing behind these readers catches what a bad value does later: what a family
    computes with is checked here.

    Args:
        asked: takes the keys that were asked for.
    """

    def __init__(self, values: dict[str, Any], asked: set[str] | None = None) -> None:
        self.values = values
        self._asked: set[str] = set() if asked is None else asked

    def integer(self, *names: str, default: int | None = None, minimum: int | None = 1) -> int:
        """An integer of at least `minimum`, as most are sizes; None is no bound.

        A default has to obey, too: it may be a quotient of other values.
        """
        value = int(self._typed(names, default, int))
        if minimum is not None and value < minimum:
            raise ModelError(f"config.json: {names[0]} = {value} is less than {minimum}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        return float(self._typed(names, default, (int, float)))

    def positive(self, *names: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self.number(*names, default=default)
        if not value > 0:
            raise ModelError(f"config.json: {names[0]} = {value!r} is not above 0")
        return value

    def flag(self, *names: str, default: bool | None = None) -> bool:
        return bool(self._typed(names, default, bool))

    def word(self, *names: str, default: str | None = None) -> str:
        return str(self._typed(names, default, str))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; empty if absent."""
        return tuple(self._elements(name, int))

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list of as many numbers as the default, which an absent or empty one is."""
        values = tuple(float(each) for each in self._elements(name, (int, float))) or (*default,)
        if len(values) != len(default):
            raise ModelError(f"config.json: {name} has {len(values)} numbers, not {len(default)}")
        return values

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words; empty if absent."""
        return tuple(self._elements(name, str))

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """A list of pairs of integers; empty if absent."""
        pairs = [Values({name: each}).integers(name) for each in self._elements(name, list)]
        if any(len(pair) != 2 for pair in pairs):
            raise ModelError(f"config.json: {name} = {self.values[name]!r} are not pairs")
        return tuple((first, second) for first, second in pairs)

    def only(self, name: str, *known: Any) -> None:
        """Refuses a value that would change the result and that the family does not compute.

        An absent key is accepted.

        Raises:
            ModelError: naming the key, the value, and what is known.
        """
        if self.has(name):
            require(name, self.values[name], known)

    def tables(self, name: str) -> list[list[Values]]:
        """A list of lists of objects; empty if absent."""
        lists = [Values({name: each}) for each in self._elements(name, list)]
        return [[Values(each) for each in one._elements(name, dict)] for one in lists]

    def part(self, *names: str) -> dict[str, Any]:
        """The object under the first of these keys that has one with keys; empty if none has."""
        for name in names:
            found: dict[str, Any] = self._typed((name,), {}, dict)
            if found:
                return found
        return {}

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        self._asked.add(name)
        return self.values.get(name) is not None

    def _elements(self, name: str, kind: Any) -> list[Any]:
        """The list under a key, its elements of one type; empty if absent."""
        values: list[Any] = self._typed((name,), [], list)
        if any(not _is_of(each, kind) for each in values):
            raise ModelError(f"config.json: {name} = {values!r} has an element of the wrong type")
        return values

    def _typed(self, names: tuple[str, ...], default: Any, kind: Any) -> Any:
        self._asked.update(names)
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not _is_of(value, kind):
                raise ModelError(f"config.json: {name} = {value!r} is of the wrong type")
            return value
        if default is None:
            model_type = self.values.get("model_type")
            raise ModelError(f"config.json of a {model_type!r} model lacks {names[0]!r}")
        return default


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, or of one of several; a flag is no number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
