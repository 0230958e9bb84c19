"""What may be called: what the model calls each tool, and what the client does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.serving.generation import ToolChoice

SEARCH = "tool_search"
"""The function that stands for a search for tools."""


@dataclass(frozen=True, slots=True)
class Named:
    """What the client calls a tool, and what kind of it a call is one of."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom", "search"] = "function"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called.

    Attributes:
        named: the client's name of each tool, by the name that the model reads.
        templates: the tools that the model is told of, in the shape that chat templates read.
        strict: names of those whose calls have to meet their schemas.
        left_out: types of the tools that nobody runs here.
    """

    named: dict[str, Named] = field(default_factory=dict)
    templates: tuple[dict[str, Any], ...] = ()
    strict: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

    def client_name(self, name: str) -> Named:
        """What the client calls the tool that the model called."""
        return self.named.get(name) or Named(name)


def model_name(name: str, namespace: str | None) -> str:
    """What the model reads for a tool in a namespace."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"
