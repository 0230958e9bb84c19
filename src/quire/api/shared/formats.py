"""Fields by which clients of OpenAI's protocols constrain an answer's format."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.types import Scope

from quire.api.shared.access import note_ignored
from quire.api.shared.json_text import parse_json
from quire.api.shared.pieces import compact
from quire.api.shared.schema import Renamed, UnlessEmpty, Wire, tag_by_type
from quire.core.errors import RequestError
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.messages import JsonObject

_MAX_CHARACTERS = 1 << 20
JsonSchemaText = str | JsonObject
Source = Annotated[str, Field(min_length=1, max_length=_MAX_CHARACTERS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_MAX_CHARACTERS)]],
    Field(min_length=1, max_length=4096),
]


class TextFormat(Wire):
    """Plain text, without a constraint."""

    type: Literal["text"]


class JsonObjectFormat(Wire):
    """Any JSON object. With `schema`, an extension of llama.cpp, it meets the schema."""

    type: Literal["json_object"]
    schema_: JsonObject | None = Field(default=None, alias="schema")


class JsonSchema(Wire):
    """A schema, which may have a name. The answer meets all of it that a grammar can enforce.

    The header `x-quire-unenforced` names the rest, unless `strict` is set, which refuses it.
    """

    name: str | None = Field(default=None, max_length=256)
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    """JSON that meets a schema. llama.cpp and OpenAI's Responses put the schema beside `type`."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: object) -> object:
        if not isinstance(value, dict) or "schema" not in value or "json_schema" in value:
            return value
        beside = {name: each for name, each in value.items() if name != "type"}
        return {"type": value.get("type"), "json_schema": beside}


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("@text")]
    | Annotated[JsonObjectFormat, Tag("@json_object")]
    | Annotated[JsonSchemaFormat, Tag("@json_schema")],
    Discriminator(tag_by_type),
]


class StructuredOutputs(Wire):
    """vLLM's field `structured_outputs`."""

    json_: JsonSchemaText | None = Field(default=None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None


_NO_OUTPUTS = StructuredOutputs()


class Guided(Wire):
    """The field `grammar` of Text Generation Inference."""

    type: Literal["json", "json_schema", "regex"]
    value: str | JsonObject

    def answer_format(self) -> AnswerFormat:
        """Return the format that constrains the answer, if any."""
        value = self.value
        if self.type == "regex":
            if not isinstance(value, str):
                raise RequestError(
                    "Invalid value for 'grammar.value': a regular expression must be a string.",
                    param="grammar.value",
                    code="invalid_type",
                )
            return AnswerFormat("regex", value, "grammar.value")
        if isinstance(value, dict) and self.type == "json_schema":
            return _schema("grammar.value", value.get("schema", value))
        return _schema("grammar.value", value)


def _tag_grammar(value: object) -> str:
    return "@text" if isinstance(value, str) else "@object"


class GuidedFields(Renamed):
    """Fields by which vLLM, SGLang, llama.cpp, Text Generation Inference and Ollama constrain an
    answer.
    """

    guided_json: JsonSchemaText | None = Field(
        default=None, description="response_format, under its name in vLLM and llama.cpp"
    )
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: (
        Annotated[
            Annotated[Source, Tag("@text")] | Annotated[Guided, Tag("@object")],
            Discriminator(_tag_grammar),
        ]
        | None
    ) = Field(default=None, description="a context-free grammar, Lark's or llama.cpp's (GBNF)")
    structured_outputs: StructuredOutputs | None = None
    format: Annotated[JsonSchemaText | None, UnlessEmpty] = Field(
        default=None, description="response_format, as in Ollama: json, or a JSON schema"
    )

    def guided_format(self, scope: Scope, own: AnswerFormat | None) -> AnswerFormat | None:
        """Return the format that constrains the answer; None without any.

        Args:
            own: format from the protocol's own field.

        Raises:
            RequestError: more than one field sets a format, or a schema is not a JSON object.
        """
        if own is None and self.model_fields_set.isdisjoint(_GUIDED):
            return None
        outputs = self.structured_outputs or _NO_OUTPUTS
        asked = [
            own,
            _asked_schema(self.name_of("guided_json"), self.guided_json),
            _format("regex", self.name_of("guided_regex"), self.guided_regex),
            _choice("guided_choice", self.guided_choice),
            self._grammar(),
            _asked_schema("structured_outputs.json", outputs.json_),
            _format("regex", "structured_outputs.regex", outputs.regex),
            _choice("structured_outputs.choice", outputs.choice),
            _format("grammar", "structured_outputs.grammar", outputs.grammar),
            any_object("structured_outputs.json_object") if outputs.json_object else None,
            self._ollama(scope),
        ]
        named = [each for each in asked if each is not None]
        if len(named) > 1:
            raise RequestError(
                f"'{named[1].field}' cannot be combined with '{named[0].field}'.",
                param=named[1].field,
                code="invalid_value",
            )
        return named[0] if named else None

    def _grammar(self) -> AnswerFormat | None:
        if isinstance(self.guided_grammar, Guided):
            return self.guided_grammar.answer_format()
        return _format("grammar", self.name_of("guided_grammar"), self.guided_grammar)

    def _ollama(self, scope: Scope) -> AnswerFormat | None:
        """Return the format in `format`, Ollama's field. Open WebUI sends it as text."""
        if self.format == "json":
            return any_object("format")
        if isinstance(self.format, str) and not self.format.lstrip().startswith("{"):
            note_ignored(scope, ["format"])
            return None
        return _asked_schema("format", self.format)


_GUIDED = frozenset(GuidedFields.model_fields)


class FormatFields(GuidedFields):
    """OpenAI's `response_format`, and the corresponding fields of other servers."""

    response_format: ResponseFormat | None = None

    def answer_format(self, scope: Scope) -> AnswerFormat | None:
        strict = False
        match self.response_format:
            case JsonObjectFormat(schema_=schema):
                asked: dict[str, object] = {"type": "object", **(schema or {})}
            case JsonSchemaFormat(json_schema=named):
                asked, strict = named.schema_ or {}, named.strict is True
            case _:
                return self.guided_format(scope, own=None)
        own = replace(_written("response_format", asked), strict=strict)
        return self.guided_format(scope, own)


def any_object(field: str) -> AnswerFormat:
    """Return the format of any JSON object."""
    return AnswerFormat("json_schema", '{"type":"object"}', field)


def _format(kind: Any, field: str, source: str | None) -> AnswerFormat | None:
    return None if source is None else AnswerFormat(kind, source, field)


def _choice(field: str, texts: list[str] | None) -> AnswerFormat | None:
    return None if texts is None else AnswerFormat("choice", compact(texts).decode(), field)


def _written(field: str, schema: dict[str, object]) -> AnswerFormat:
    return AnswerFormat("json_schema", compact(schema).decode(), field)


def _asked_schema(field: str, schema: JsonSchemaText | None) -> AnswerFormat | None:
    return None if schema is None else _schema(field, schema)


def _schema(field: str, schema: object) -> AnswerFormat:
    """Return a schema, given as an object or as JSON text."""
    try:
        read = parse_json(schema.encode()) if isinstance(schema, str) else schema
    except RequestError:
        read = None
    if not isinstance(read, dict):
        raise RequestError(f"'{field}' must be a JSON schema.", param=field, code="invalid_schema")
    return _written(field, read)
