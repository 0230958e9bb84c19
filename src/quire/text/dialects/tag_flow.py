"""Arguments in tags as they are written, see `flow`: strings flow, other values come whole.

The closing brace comes with the end, which the reader knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.text.dialects.base import Tool
from quire.text.dialects.values import kinds, property_schema, typed_argument, write_json


class TagFlow:
    """Of one call of `tool`; implements `flow.Flow`.

    Args:
        opening: of an argument; its group is the name.
        ending: of a value, with as much of what follows as makes it certain.
        doubtful: what may begin an ending, which is held.
        whole: makes a value of what its ending was found behind, or of the held part of it.
    """

    def __init__(
        self,
        tool: Tool,
        opening: re.Pattern[str],
        ending: re.Pattern[str],
        doubtful: str,
        whole: Callable[[str], str] = str,
    ) -> None:
        self._tool, self._whole = tool, whole
        self._opening, self._ending = opening, ending
        self._doubtful = re.compile(doubtful)
        self._text = ""
        self._key: str | None = None
        self._begun = False
        self._is_text = False

    def feed(self, text: str, *, marker: bool = False) -> str:
        """See `Flow`."""
        self._text += text
        written: list[str] = []
        while (piece := self._step()) is not None:
            written.append(piece)
        return "".join(written)

    def _step(self) -> str | None:
        return self._argument() if self._key is None else self._value(self._key)

    def _argument(self) -> str | None:
        found = self._opening.match(self._text)
        if found is None or found.end() == len(self._text):
            return None  # a line end may belong to the opening
        self._key = found.group(1).strip().strip("\"'")
        parameters = self._tool.parameters
        allowed = kinds(property_schema(parameters, self._key, parameters), parameters)
        self._is_text = allowed == {"string"}
        self._text = self._text[found.end() :]
        before = ", " if self._begun else "{"
        self._begun = True
        return f"{before}{write_json(self._key)}: " + ('"' if self._is_text else "")

    def _value(self, key: str) -> str | None:
        ending = self._ending.search(self._text)
        if ending is None and not self._is_text:
            return None
        if ending is not None:
            value, self._text, self._key = (
                self._whole(self._text[: ending.start()]),
                self._text[ending.end() :],
                None,
            )
            if not self._is_text:
                return write_json(typed_argument(self._tool, key, value))
            return json.dumps(value, ensure_ascii=False)[1:]
        held = self._doubtful.search(self._text)
        certain = held.start() if held is not None else len(self._text)
        value, self._text = self._text[:certain], self._text[certain:]
        return json.dumps(value, ensure_ascii=False)[1:-1] if value else None
