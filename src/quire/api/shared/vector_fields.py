"""Common fields and steps of the endpoints that compute vectors."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request

from quire.api.shared.context import Context
from quire.api.shared.durations import KeepAlive
from quire.api.shared.notes import note
from quire.api.shared.numbers import Integer
from quire.api.shared.priority import Priority
from quire.api.shared.schema import UnlessEmpty, Wire
from quire.serving.generation import FieldNames, Generation


class VectorFields(Wire):
    """Fields of every endpoint that computes vectors. `user` cannot change an answer.

    Attributes:
        texts_field: name of the field with the texts, for errors.
    """

    texts_field: ClassVar[str]
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Integer | None = Field(
        default=None,
        ge=-1,
        lt=2**31,
        description="truncate the prompt to so many tokens; -1: to what fits",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="where a prompt is cut; default: left, of encoders right"
    )
    priority: Priority | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None

    def generation(self, context: Context) -> Generation:
        """Return the generation, without its texts.

        Raises:
            NotFound: the request is for another model.
        """
        context.check_model(self.model)
        return Generation(
            truncate=self.truncate_prompt_tokens,
            truncate_left=None if self.truncation_side is None else self.truncation_side == "left",
            vector=True,
            names=FieldNames(prompt=self.texts_field),
            max_prompt=context.service.vectors.pooling.stages.max_tokens,
            adapter=context.adapter(self.model),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            keep_alive_s=self.keep_alive,
        )


def counted(request: Request, prompt_tokens: int, cached_tokens: int) -> dict[str, object]:
    """Return the usage of an answer, and add it to the request's log line."""
    note(request.scope, {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens})
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
