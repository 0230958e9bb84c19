"""Settings of processors, as model folders hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class Settings:
    """A JSON object of a model folder, read with errors that name file and key.

    Attributes:
        prefix: the way to the object within the file, e.g. "image_processor.".
    """

    path: Path
    prefix: str
    values: dict[str, Any]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; without a default the key has to be there.

        Raises:
            ModelError: it is something else.
        """
        value = self.values.get(key, default)
        if type(value) is not int or value < minimum:
            raise self.error(key, f"not a whole number from {minimum} up")
        return value

    def number(self, key: str, default: float) -> float:
        """A number from 0 up.

        Raises:
            ModelError: it is something else.
        """
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not value >= 0:
            raise self.error(key, "not a number from 0 up")
        return float(value)

    def within(self, key: str) -> Settings:
        """The object under a key.

        Raises:
            ModelError: there is none.
        """
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "not an object")
        return Settings(self.path, f"{self.prefix}{key}.", value)

    def require(self, only: Mapping[str, object]) -> None:
        """Each key has the one value that is supported, or is left out.

        Raises:
            ModelError: another value.
        """
        for key, supported in only.items():
            if self.values.get(key, supported) != supported:
                raise self.error(key, f"and only {supported} is supported")

    def error(self, key: str, expected: str) -> ModelError:
        """For a value that is not what was `expected`."""
        value = repr(self.values[key]) if key in self.values else "missing"
        return ModelError(f"{self.path}: '{self.prefix}{key}' is {value}, {expected}")
