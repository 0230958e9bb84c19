"""Schemas of `tool_choice` in OpenAI's `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from quire.api.responses.own_tools import OwnChoice
from quire.api.shared.schema import Wire, tag_by_type


class NamedChoice(Wire):
    """The tool that must be called, or in a list of allowed ones, that may be."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoice(Wire):
    """Some of the tools, one of which may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[NamedChoice, Tag("@function")]
            | Annotated[NamedChoice, Tag("@custom")]
            | Annotated[OwnChoice, Tag("@shell")]
            | Annotated[OwnChoice, Tag("@apply_patch")],
            Discriminator(tag_by_type),
        ]
    ] = Field(min_length=1)


def _tag_choice(value: object) -> str | None:
    return "@mode" if isinstance(value, str) else tag_by_type(value)


RequestedChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@mode")]
    | Annotated[NamedChoice, Tag("@function")]
    | Annotated[NamedChoice, Tag("@custom")]
    | Annotated[OwnChoice, Tag("@shell")]
    | Annotated[OwnChoice, Tag("@apply_patch")]
    | Annotated[AllowedChoice, Tag("@allowed_tools")],
    Discriminator(_tag_choice),
]
