"""The base of all request schemas: strict parsing, and errors that name the field.

A schema is a pydantic model. Accepted fields have their type and range; fields that this server
does not offer have type `None`, so that they are refused by name; fields that cannot change an
answer are accepted and ignored. `foreign` judges all other fields, except within the conversation,
where they pass, because they came with answers of other servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    Tag,
    ValidationError,
)
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.types import Scope

from quire.api.shared import foreign
from quire.api.shared.access import note_ignored
from quire.api.shared.durations import KeepAlive
from quire.api.shared.field_errors import (
    Generating,
    binding_field,
    explain,
    first_of,
    unknown_field,
)
from quire.api.shared.numbers import Integer, Number
from quire.api.shared.priority import Priority
from quire.core.errors import RequestError
from quire.core.sampling_params import LIMITS, MOST_TOKENS, check_repeats
from quire.core.speculation import Speculation

Parsed = TypeVar("Parsed", bound="Wire")


def _end_at_first_error(schema: Any, model: type[Wire]) -> None:
    """Mark all lists within a model's core schema. Models within it have marked their own."""
    if isinstance(schema, list | tuple):
        for each in schema:
            _end_at_first_error(each, model)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if kind == "list":
            schema["fail_fast"] = True
        if kind != "model" or schema["cls"] is model:
            for each in schema.values():
                _end_at_first_error(each, model)


class Wire(BaseModel):
    """Base of every request model: strict types. Unknown fields are kept, for `parse` to judge.

    Unions are told apart by tags that start with `@`, so that they can be left out of the name of
    the field at fault.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        populate_by_name=True,
        defer_build=True,  # until the first request: most of 200 models are only parts of others
        json_schema_extra={"additionalProperties": False},
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, in which a list is read only up to its first error.

        A body can have a million errors, and each error object takes far more memory than its
        cause.
        """
        schema = handler(source)
        _end_at_first_error(schema, cls)
        return schema


class Renamed(Wire):
    """A body that knows by which names the client sent its fields."""

    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def name_of(self, field: str) -> str:
        """Return the client's name of a field, for errors."""
        return self._names.get(field, field)


class History(Wire):
    """Base of what conversations are made of: messages, parts, tools. Unknown fields pass."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})


def parse(
    model: type[Parsed],
    payload: object,
    *,
    strict_fields: bool = True,
    generating: Generating | None = None,
) -> tuple[Parsed, list[str]]:
    """Validates a decoded body against a schema.

    Args:
        strict_fields: whether to refuse fields that no known server has.
        generating: for an endpoint that counts tokens, the generating endpoint that it counts for.

    Returns:
        The fields, and the paths of those without effect.

    Raises:
        RequestError: a field is wrong; `param` names the first, with OpenAI's `code`.
    """
    if not isinstance(payload, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    names = foreign.renamed(payload, _names_of(model))
    try:
        fields = model.model_validate(_with_own_names(payload, names))
    except ValidationError as error:
        raise explain(model, first_of(error), names) from error
    if isinstance(fields, Renamed):
        fields._names = names
    given = [
        (path, value)
        for path, value in _unknown(fields, "")
        if not foreign.asks_for_default(path, value)
    ]
    for path, value in given:
        if foreign.binds(path, value):
            raise binding_field(path)
    unknown = [path for path, _ in given]
    if strict_fields:
        generates = issubclass(model, DecodingFields)
        for path in unknown:
            if not foreign.is_known(path) or (
                not generates and foreign.is_one_of(path, _GENERATING)
            ):
                raise unknown_field(model, path, generating, generates=generates)
    return fields, unknown


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a schema's fields."""
    return frozenset(model.model_fields)


def _with_own_names(payload: dict[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return the body with aliases replaced by the schema's own names.

    Args:
        names: the alias used in the body, by the schema's name.

    Raises:
        RequestError: a field is given by both names, with different values.
    """
    own = {key: value for key, value in payload.items() if key not in names.values()}
    for field, other in names.items():
        if own.get(field) not in (None, payload[other]):
            raise RequestError(
                f"'{other}' and '{field}' mean the same and must be equal; send one of them.",
                param=other,
                code="invalid_value",
            )
        own[field] = payload[other]
    return own


def _unknown(fields: Wire, prefix: str) -> Iterator[tuple[str, object]]:
    """Return paths and values of unknown fields outside the conversation."""
    for name, value in (fields.model_extra or {}).items():
        yield f"{prefix}{name}", value
    for name, value in fields.__dict__.items():
        if value is None or not isinstance(value, _NESTED):
            continue
        nested = value if isinstance(value, list) else [value]
        if not nested or not isinstance(nested[0], Wire) or isinstance(nested[0], History):
            continue
        path = f"{prefix}{type(fields).model_fields[name].alias or name}"
        for index, each in enumerate(nested):
            place = f"[{index}]" if isinstance(value, list) else ""
            yield from _unknown(each, f"{path}{place}.")


_NESTED = (Wire, list)


def tag_by_type(value: object) -> str | None:
    """Return the union tag of a part, from its `type`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if isinstance(kind, str) else None


def tag_by_role(value: object) -> str | None:
    """Return the union tag of a message."""
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"@{role}" if isinstance(role, str) else None


def tag_text_or_list(value: object) -> str:
    """Return the union tag of a field that may be one string or a list."""
    return "@list" if isinstance(value, list) else "@text"


Entry = TypeVar("Entry")
TextOrList = Annotated[
    Annotated[str, Tag("@text")] | Annotated[list[Entry], Tag("@list")],
    Discriminator(tag_text_or_list),
]
"""`TextOrList[Part]` is a string or a list of parts; an error names the branch that was meant."""

Strings = Annotated[
    Annotated[str, Tag("@text")]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64), Tag("@list")],
    Discriminator(tag_text_or_list),
]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenCount = Annotated[Integer, Field(ge=1, le=MOST_TOKENS)]


def unlimited(least: int) -> BeforeValidator:
    """Return a validator of an answer's limit, which takes -1 and -2 for the context's, as
    llama.cpp, LM Studio and Ollama do, and says so where it refuses less than `least`.
    """

    def read(value: object) -> object:
        if isinstance(value, bool):
            return value
        if value in _UNLIMITED:
            return MOST_TOKENS
        if isinstance(value, int) and value < least:
            rule = {"ge": least, "besides": "-1 for no limit"}
            raise PydanticCustomError("greater_than_equal", "too small", rule)
        return value

    return BeforeValidator(read)


_UNLIMITED = (-1, -2, "-1", "-2")
TokenLimit = Annotated[TokenCount, unlimited(1), Field(description="-1 and -2: no limit")]


def _given(value: object) -> object:
    return None if value == "" else value


UnlessEmpty = BeforeValidator(_given)
"""A validator of a field that may be None: an empty string counts as None, as from an HTML form."""

Bias = Annotated[Number, Field(ge=-100.0, le=100.0)]


Verbosity = Literal["low", "medium", "high"]


def note_verbosity(scope: Scope, verbosity: Verbosity | None, param: str) -> None:
    """Tell a client that no model here has a verbosity setting."""
    if verbosity not in (None, "medium"):
        note_ignored(scope, [param])


class StreamUsage(Enum):
    """The chunks of a stream that carry its usage: none, a separate last one, or all."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class StreamOptions(Wire):
    """OpenAI's `stream_options`. Obfuscation, which pads chunks, is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChunkOptions(StreamOptions):
    """Stream options of endpoints that stream chunks.

    `continuous_usage_stats` is vLLM's: every chunk carries the usage of all choices so far.
    """

    continuous_usage_stats: bool | None = None


def check_stream_options(options: StreamOptions | None, *, stream: bool | None) -> None:
    """Raise `RequestError` for stream options without a stream."""
    if options is not None and not stream:
        raise RequestError(
            "'stream_options' needs 'stream' to be true.",
            param="stream_options",
            code="invalid_value",
        )


class CacheBreakpoint(History):
    """OpenAI's `prompt_cache_breakpoint`, without effect: every prefix is cached, marked or not."""

    mode: str | None = None
    ttl: str | None = None


class CacheOptions(History):
    """OpenAI's `prompt_cache_options`, without effect: every prompt is cached while there
    is room.
    """

    prewarm: bool | None = None
    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None


class DecodingFields(Wire):
    """Sampling and length fields of every generating endpoint.

    A missing field of sampling has the value of `Service.sampling`: the operator's default, or else
    the one that the model's makers recommend.
    """

    model: str | None = None
    temperature: Annotated[Number, Field(**LIMITS["temperature"])] | None = None
    top_p: Annotated[Number, Field(**LIMITS["top_p"])] | None = None
    presence_penalty: Annotated[Number, Field(**LIMITS["presence_penalty"])] | None = None
    frequency_penalty: Annotated[Number, Field(**LIMITS["frequency_penalty"])] | None = None
    logit_bias: Annotated[dict[str, Bias] | None, UnlessEmpty] = None
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**63)
    top_k: Annotated[Integer, Field(**LIMITS["top_k"])] | None = Field(
        default=None, description="0 and -1: all tokens"
    )
    min_p: Annotated[Number, Field(**LIMITS["min_p"])] | None = None
    repetition_penalty: Annotated[Number, Field(**LIMITS["repetition_penalty"])] | None = None
    typical_p: Annotated[Number, Field(**LIMITS["typical_p"])] | None = None
    xtc_probability: Annotated[Number, Field(**LIMITS["xtc_probability"])] | None = None
    xtc_threshold: Annotated[Number, Field(**LIMITS["xtc_threshold"])] | None = None
    dry_multiplier: Annotated[Number, Field(**LIMITS["dry_multiplier"])] | None = None
    dry_base: Annotated[Number, Field(**LIMITS["dry_base"])] | None = None
    dry_allowed_length: Annotated[Integer, Field(**LIMITS["dry_allowed_length"])] | None = None
    dry_penalty_last_n: Annotated[Integer, Field(**LIMITS["dry_penalty_last_n"])] | None = Field(
        default=None, description="number of last tokens that DRY looks at; -1: all, 0: none"
    )
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64)]
        | Annotated[str, Field(max_length=4096)]
        | None
    ) = Field(
        default=None, description="texts at which a repeat ends for DRY: a list, or JSON strings"
    )
    min_tokens: Integer | None = Field(default=None, ge=0, lt=2**31)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    stop_on_loop: (
        Annotated[Integer, Field(ge=0, lt=2**31), AfterValidator(check_repeats)] | None
    ) = Field(
        default=None,
        description="end the answer after so many repeats of a cycle of tokens; 0: never",
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)] | None = (
        Field(
            default=None,
            description="the only tokens that may be sampled, end tokens included",
        )
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, max_length=256, description="texts that are never generated, as in vLLM"
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = Field(
        default=None,
        ge=-1,
        lt=2**31,
        description="truncate the prompt to so many tokens; -1: to what fits",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="the side on which the prompt is truncated; default: left"
    )
    kv_bits: float | str | None = None
    kv_scheme: str | None = None
    speculation: Speculation | None = Field(
        default=None, description="the drafter, whose tokens are verified several a step"
    )
    priority: Priority | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None

    @property
    def session(self) -> str | None:
        """The conversation or agent that the request belongs to, if it names one."""
        return None


class GenerationFields(DecodingFields):
    """Fields that OpenAI's two generating endpoints share.

    `user`, `metadata` and similar fields cannot change an answer; they are accepted and ignored.
    """

    stream: bool | None = None
    stream_options: ChunkOptions | None = None
    n: Integer | None = Field(default=None, ge=1, le=128)
    max_tokens: TokenLimit | None = None
    stop: Strings | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings, without empty ones, which never match."""
        stop = self.stop
        if stop is None or stop == "":
            return ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def stream_usage(self) -> StreamUsage:
        """Return which chunks of a stream carry usage."""
        options = self.stream_options or _NO_OPTIONS
        if options.continuous_usage_stats:
            return StreamUsage.ALL
        return StreamUsage.LAST if options.include_usage else StreamUsage.NONE


_NO_OPTIONS = ChunkOptions()
_GENERATING = frozenset(GenerationFields.model_fields)
"""Fields that have no meaning on endpoints that do not generate."""
