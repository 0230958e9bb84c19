"""What every protocol's request schema shares: strict parsing, and errors that name the field.

A schema is a pydantic model. What may be accepted stands in it with its type and range; what this
server does not offer stands in it as a field of type `None`, so that it is refused by name; what
cannot change an answer stands in it and is not read. What stands in no schema is `foreign`'s to
judge, but for names within the conversation, which pass: they came with answers of other servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails
from starlette.types import Scope

from quire.api.shared import foreign
from quire.api.shared.access import note_ignored
from quire.api.shared.durations import KeepAlive
from quire.api.shared.field_names import field_name
from quire.core.errors import RequestError
from quire.core.sampling_params import LARGEST_REPETITION_PENALTY, LEAST_REPETITION_PENALTY
from quire.media.kinds import Protocols, kinds_by

Parsed = TypeVar("Parsed", bound="Wire")

_LONGEST_NAME = 256  # characters of an unknown field's name that its refusal repeats
REGISTERED = "@registered."
"""Begins the tag of members that the registry of media makes; a field of `MediaInput` follows."""


def _end_at_first_error(schema: Any) -> None:
    """Marks all lists within a core schema."""
    if isinstance(schema, list | tuple):
        for each in schema:
            _end_at_first_error(each)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for each in schema.values():
            _end_at_first_error(each)


class Wire(BaseModel):
    """Base of every request model: strict types. Unknown fields are kept, for `parse` to judge.

    Unions are told apart by tags that begin with `@`, so that they can be left out of the name of
    the field at fault.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        populate_by_name=True,
        json_schema_extra={"additionalProperties": False},
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of pydantic, in which a list is read up to its first error.

        A body can hold a million faults, and building an error takes far more memory than a fault.
        """
        schema = handler(source)
        _end_at_first_error(schema)
        return schema


class History(Wire):
    """Base of what conversations are made of: messages, parts, tools. Unknown fields pass."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={})


def parse(
    model: type[Parsed], payload: object, *, strict_fields: bool = True
) -> tuple[Parsed, list[str]]:
    """Validates a decoded body against a schema.

    Args:
        strict_fields: refuse fields that nobody knows; False lets them pass as well.

    Returns:
        The fields, and the paths of those that pass without effect.

    Raises:
        RequestError: naming the first field at fault (`param`) with OpenAI's `code`.
    """
    if not isinstance(payload, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    names = foreign.renamed(payload, model.model_fields)
    try:
        fields = model.model_validate(_with_own_names(payload, names))
    except ValidationError as error:
        raise _explain(model, error.errors(include_url=False)[0], names) from error
    unknown = [
        path for path, value in _unknown(fields, "") if not foreign.asks_for_default(path, value)
    ]
    if strict_fields:
        for path in unknown:
            if not foreign.is_known(path):
                raise _unknown_field(fields, path)
    return fields, unknown


def _with_own_names(payload: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The body with the schema's own names.

    Args:
        names: for each of the schema's that the body gives by another name, that name.

    Raises:
        RequestError: a field is given by both, with different values.
    """
    own = {key: value for key, value in payload.items() if key not in names.values()}
    for field, other in names.items():
        if own.get(field) not in (None, payload[other]):
            raise RequestError(
                f"'{other}' and '{field}' are one thing and cannot differ.",
                param=other,
                code="invalid_value",
            )
        own[field] = payload[other]
    return own


def _unknown(fields: Wire, prefix: str) -> Iterator[tuple[str, object]]:
    """Paths and values of fields that no schema has, but for those within the conversation."""
    for name, value in (fields.model_extra or {}).items():
        yield f"{prefix}{name}", value
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        path = f"{prefix}{type(fields).model_fields[name].alias or name}"
        match value:
            case History():
                pass
            case Wire():
                yield from _unknown(value, f"{path}.")
            case [Wire() as first, *_] if not isinstance(first, History):
                for index, each in enumerate(value):
                    yield from _unknown(each, f"{path}[{index}].")


def _unknown_field(fields: Wire, path: str) -> RequestError:
    """The refusal of a field that stands in no schema and that no other server honours."""
    meant = foreign.nearest(path, type(fields).model_fields)
    hint = "" if meant is None else f" Did you mean '{meant}'?"
    shown = path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}..."
    return RequestError(
        f"Unknown parameter: '{shown}'.{hint}", param=shown, code="unknown_parameter"
    )


_CODES = {
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
    "none_required": "unsupported_parameter",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "literal_error": "invalid_value",
    "string_pattern_mismatch": "invalid_value",
    "union_tag_invalid": "invalid_value",
    "value_error": "invalid_value",
}


def _explain(model: type[Wire], detail: ErrorDetails, names: Mapping[str, str]) -> RequestError:
    """One validation error as one sentence that begins with the field's name.

    Args:
        names: what the client calls fields that it does not call by their own names.
    """
    first, *rest = detail["loc"] or ("",)
    kind, param = detail["type"], field_name((names.get(str(first), first), *rest))
    code = _CODES.get(kind, "invalid_type")
    match kind:
        case "missing":
            message = f"Missing required parameter: '{param}'."
        case "none_required":
            hint = _hint(model, detail["loc"])
            message = f"'{param}' is not offered by this server{hint}."
        case "union_tag_invalid":
            context = detail["ctx"]
            param = f"{param}.{_tag_field(context)}"
            known = ", ".join(_types(str(context["expected_tags"])))
            tag = str(context["tag"]).removeprefix("@")
            message = f"Invalid value for '{param}': '{tag}'. Known here: {known}."
        case "union_tag_not_found" if not isinstance(detail["input"], dict):
            tag, code = _tag_field(detail["ctx"]), "invalid_type"
            message = f"Invalid value for '{param}': input should be an object with a '{tag}'."
        case "union_tag_not_found":
            param = f"{param}.{_tag_field(detail['ctx'])}"
            message = f"Missing required parameter: '{param}'."
        case "string_type" if detail["loc"][-1] == "@text":
            message = f"Invalid value for '{param}': input should be a string or a list."
        case "model_type" | "model_attributes_type" | "dict_type":
            message = f"Invalid value for '{param}': input should be an object."
        case "value_error":
            message = f"Invalid value for '{param}': {detail['ctx']['error']}."
        case _:
            message = f"Invalid value for '{param}': {_in_words_of_json(detail['msg'])}."
    return RequestError(message, param=param, code=code)


def _types(tags: str) -> Iterator[str]:
    """What the members of a union call themselves, the kinds of media included."""
    for tag in re.findall(r"@[\w.-]+", tags):
        registered = tag.removeprefix(REGISTERED)
        yield from (tag[1:],) if registered == tag else kinds_by(cast(Protocols, registered))


def _tag_field(context: dict[str, Any]) -> str:
    """The field that tells a union's members apart, from the name of the function that reads it."""
    return "role" if "role" in str(context["discriminator"]) else "type"


def _hint(model: type[Wire], loc: tuple[int | str, ...]) -> str:
    """What to do instead of a refused field: its description in the schema, if it has one."""
    field = model.model_fields.get(str(loc[0])) if len(loc) == 1 else None
    return f": {field.description}" if field is not None and field.description else ""


def _in_words_of_json(sentence: str) -> str:
    """A sentence of pydantic's, which speaks of Python's objects."""
    sentence = sentence[:1].lower() + sentence[1:]
    for python, json in (("dictionary", "object"), ("False", "false"), (" after validation", "")):
        sentence = sentence.replace(python, json)
    return sentence


def tag_by_type(value: object) -> str | None:
    """The union tag of a part that says its kind in `type`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"@{kind}" if isinstance(kind, str) else None


def tag_by_role(value: object) -> str | None:
    """The union tag of a message."""
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"@{role}" if isinstance(role, str) else None


def tag_text_or_list(value: object) -> str:
    """The union tag of a field that may be one string or a list."""
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
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


def _token_limit(value: object) -> object:
    """-1 and -2 are no limit but the context's, as llama.cpp, LM Studio and Ollama have them."""
    return _NO_LIMIT if value in (-1, -2) and isinstance(value, int) else value


_NO_LIMIT = 2**31 - 1
TokenLimit = Annotated[
    TokenCount, BeforeValidator(_token_limit), Field(description="-1 and -2 are no limit")
]


def _given(value: object) -> object:
    return None if value == "" else value


UnlessEmpty = BeforeValidator(_given)
"""Of a field that may be None: an empty string is one that a form has and nobody filled in."""

UnlessEmptyList = BeforeValidator(lambda value: None if value == [] else value)
"""Of a field that is not offered: an empty list asks for nothing."""

TopP = Annotated[float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


Verbosity = Literal["low", "medium", "high"]


def note_verbosity(scope: Scope, verbosity: Verbosity | None, param: str) -> None:
    """Tells a client that no model here has a switch for how much it says."""
    if verbosity not in (None, "medium"):
        note_ignored(scope, [param])


_LEAST_TOP_P = 1e-7
"""Less than the likeliest token of any vocabulary has."""


def nucleus(top_p: float) -> float:
    """`top_p` as samplers take it: 0 leaves the likeliest token, as anything that small does."""
    return max(top_p, _LEAST_TOP_P)


class StreamUsage(Enum):
    """Which chunks of a stream carry its usage: none, a last one of its own, or all of them."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class StreamOptions(Wire):
    """OpenAI's `stream_options`. Obfuscation pads chunks and changes no answer; it is not done."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChunkOptions(StreamOptions):
    """Those of endpoints that stream chunks.

    `continuous_usage_stats` is vLLM's: every chunk carries the usage of all choices so far.
    """

    continuous_usage_stats: bool | None = None


def check_stream_options(options: StreamOptions | None, *, stream: bool | None) -> None:
    """Raises `RequestError` for options of a stream where none is asked for."""
    if options is not None and not stream:
        raise RequestError(
            "'stream_options' needs 'stream' to be true.",
            param="stream_options",
            code="invalid_value",
        )


class DecodingFields(Wire):
    """How tokens are drawn and kept, in every generating endpoint, whatever its protocol has.

    What is left out has the server's default; `Service.sampling` holds those that models recommend.
    """

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias] | None, UnlessEmpty] = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 and -1 keep all tokens")
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(
        default=None, ge=LEAST_REPETITION_PENALTY, le=LARGEST_REPETITION_PENALTY
    )
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    kv_bits: float | str | None = None
    kv_scheme: str | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    keep_alive: Annotated[KeepAlive | None, UnlessEmpty] = None


class GenerationFields(DecodingFields):
    """Fields that OpenAI's two generating endpoints share.

    `user`, `metadata` and their like cannot change an answer: accepted, not read.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: ChunkOptions | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: TokenLimit | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    stop: Strings | None = None
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one never matches and is left out."""
        stop = self.stop
        if stop is None or stop == "":
            return ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def stream_usage(self) -> StreamUsage:
        """Which chunks of a stream carry its usage."""
        options = self.stream_options or ChunkOptions()
        if options.continuous_usage_stats:
            return StreamUsage.ALL
        return StreamUsage.LAST if options.include_usage else StreamUsage.NONE
