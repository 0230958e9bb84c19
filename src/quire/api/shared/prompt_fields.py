"""Fields that hold a text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from quire.api.shared.schema import TokenId

_MOST_PROMPTS = 256
_MOST_INPUTS = 2048  # OpenAI's


def _tag(value: object) -> str:
    """Return the union tag, by the first item."""
    if not isinstance(value, list):
        return "@text"
    match value[:1]:
        case [str()]:
            return "@texts"
        case [list()]:
            return "@lists"
        case _:
            return "@ids"


Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("@text")]
    | Annotated[list[str], Field(max_length=_MOST_PROMPTS), Tag("@texts")]
    | Annotated[Ids, Tag("@ids")]
    | Annotated[list[Ids], Field(max_length=_MOST_PROMPTS), Tag("@lists")],
    Discriminator(_tag),
]
Input = Annotated[
    Annotated[str, Tag("@text")]
    | Annotated[list[str], Field(max_length=_MOST_INPUTS), Tag("@texts")]
    | Annotated[Ids, Tag("@ids")]
    | Annotated[list[Ids], Field(max_length=_MOST_INPUTS), Tag("@lists")],
    Discriminator(_tag),
]


def prompts_of(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of such a field, as texts or as token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and isinstance(prompt[0], int):
        return (tuple(each for each in prompt if isinstance(each, int)),)
    return tuple(
        each if isinstance(each, str) else tuple(each)
        for each in prompt
        if not isinstance(each, int)
    )
