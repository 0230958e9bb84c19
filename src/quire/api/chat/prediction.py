"""OpenAI's `prediction`: the answer that a client expects, most of which may be right."""

from __future__ import annotations

from typing import Literal

from quire.api.shared.content import TextPart
from quire.api.shared.schema import Wire


class Prediction(Wire):
    """A text that the answer is likely to repeat, such as the file that it edits."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)
