"""Content parts with a file, of every media kind in `media.kinds`.

The kind names the part's type and field: `{"type": "video_url", "video_url": {"url": URL}}` in
OpenAI's protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from quire.api.shared.field_errors import REGISTERED
from quire.api.shared.schema import CacheBreakpoint, History, tag_by_type
from quire.media.kinds import MediaInput, Option, Protocols, inputs, kinds_by
from quire.media.source import Detail, MediaSource
from quire.serving.messages import SourcePart

SoftTokens = Annotated[int, Field(ge=1)]
"""The most tokens that an image, or a frame of a video, becomes: a number that the model offers."""

ImageDetail = Literal["auto", "low", "high", "original"]
"""How finely a picture is read, as OpenAI spells it. `original` is as `high`: a model reads no more
of a picture than its own limit."""

_OPTIONS: Mapping[Option, Any] = {
    "detail": (ImageDetail | None, None),
    "max_soft_tokens": (SoftTokens | None, None),
    "use_audio_in_video": (bool | None, None),
}


class Registered:
    """The members of a union for the registered kinds of media, looked up when a request is read.

    Args:
        protocols: protocols whose unions these are.
        model: returns the model of a kind's part.
    """

    def __init__(
        self,
        protocols: Protocols,
        model: Callable[[MediaInput], type[History]],
    ) -> None:
        self.tag = f"{REGISTERED}{protocols}"
        self._protocols = protocols
        self._model = model

    def kinds(self) -> dict[str, str]:
        """Kinds by the type of their part."""
        return kinds_by(self._protocols)

    def tag_of(self, value: object) -> str | None:
        """Return the tag of a member of the union."""
        tag = tag_by_type(value)
        return self.tag if tag is not None and tag[1:] in self.kinds() else tag

    def _read(self, value: Any) -> History:
        name = value["type"] if isinstance(value, dict) else value.type
        return self._model(inputs()[self.kinds()[name]]).model_validate(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        models = [self._model(inputs()[kind]) for kind in self.kinds().values()]
        return {"oneOf": [handler(model.__pydantic_core_schema__) for model in models]}


class Url(History):
    """The source of a file by URL: http(s), `data:` or `file://`. Mistral's clients send the URL
    alone.
    """

    url: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value


class UrlPart(History):
    """A file; the field of its type's name holds the URL."""

    type: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    def to_template(self, param: str) -> SourcePart:
        """Return the part in the form that templates read; `param` is its path in the request."""
        file, kind = getattr(self, self.type), URL_PARTS.kinds()[self.type]
        return media_part(kind, file.url, f"{param}.{self.type}.url", named=self.type, options=file)


@cache
def _url_part(name: str, options: tuple[Option, ...]) -> type[UrlPart]:
    title = "".join(word.capitalize() for word in name.split("_"))
    url = create_model(title, __base__=Url, __doc__=Url.__doc__, **fields_of(options))
    fields: dict[str, Any] = {"type": (literal(name), ...), name: (url, ...)}
    return create_model(f"{title}Part", __base__=UrlPart, __doc__=UrlPart.__doc__, **fields)


URL_PARTS = Registered("url_part", lambda kind: _url_part(kind.url_part, kind.options))
"""Types of content parts with a URL in OpenAI's protocols, by media kind."""


def fields_of(options: tuple[Option, ...]) -> dict[str, Any]:
    """Return these options as pydantic fields."""
    return {each: _OPTIONS[each] for each in options}


def literal(name: str) -> Any:
    """Return `Literal[name]` for a name unknown to type checkers."""
    return cast(Any, Literal)[name]


def media_part(
    kind: str, url: str, param: str, named: str, options: History | None = None
) -> SourcePart:
    """Return a file in the form that templates read. It is fetched and placed in the prompt later.

    Args:
        options: object whose fields may set how the kind is preprocessed.
    """
    soft_tokens: int | None = getattr(options, "max_soft_tokens", None)
    fineness: ImageDetail | None = getattr(options, "detail", None)
    detail: Detail = soft_tokens or ("high" if fineness == "original" else fineness) or "auto"
    sound = bool(getattr(options, "use_audio_in_video", None))
    return {
        "type": kind,
        "source": MediaSource(url, param, named, detail=detail, kind=kind, sound=sound),
    }
