"""Fields as clients write them, for errors that name one."""

from __future__ import annotations

_BRANCHES = frozenset({"str", "int", "float", "bool", "function-after", "none"})


def field_name(loc: tuple[int | str, ...]) -> str:
    """Return a path as clients write it: `("messages", 0, "@user", "content")` as
    `messages[0].content`.
    """
    name = ""
    for position, part in enumerate(loc):
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith("@") and (position == 0 or not _is_branch(part)):
            name += f".{part}" if name else part
    return name


def _is_branch(part: str) -> bool:
    """Return whether pydantic named a union's member here, not a field."""
    return part in _BRANCHES or "[" in part
