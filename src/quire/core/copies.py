"""Changed copies of frozen dataclasses with many fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.core.pickling import values_of

if TYPE_CHECKING:
    from dataclasses import replace as replace  # whose fields are checked
else:

    def replace(value, /, **changes):
        """Return a copy with other values for some fields, as `dataclasses.replace` does.

        One call reads all fields, where that makes several for each. Every field must be an
        argument of the class. `KeyError` is raised for a field that there is not.
        """
        own = type(value)
        places = _places(own)
        values = list(values_of(own)(value))
        for name, changed in changes.items():
            values[places[name]] = changed
        return own(*values)


@cache
def _places(of: type[Any]) -> Mapping[str, int]:
    return {field.name: place for place, field in enumerate(fields(of))}
